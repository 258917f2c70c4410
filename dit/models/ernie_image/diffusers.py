"""ERNIE-Image in Diffusers, `ErnieImageTransformer2DModel`: tensor names, config.json, calls."""

# D model width, K head width, Q queries, keys and values of a token, F width of the MLP
# E text width, C numbers in a token

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import PositiveInt

from dit.config.checks import Rule
from dit.models.diffusers.arrangements import (
    THWC,
    ByHead,
    Convolution,
    Features,
    SwappedHalves,
)
from dit.models.diffusers.form import (
    ConfigKeys,
    DiffusersForm,
    Key,
    OwnKey,
    Pipeline,
    own_names,
    same,
)
from dit.models.diffusers.names import NameTable, TensorSplit, linear_rows, without_biases
from dit.models.ernie_image.family import EPS, THETA, ErnieImageConfig
from dit.models.joint.diffusers import mlp_ratio, outputs_as_inputs
from dit.models.joint.sequential_names import SequentialNames, sequential_rows
from dit.models.joint.tensor_names import stream_sizes

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dit.batch import LatentSample

CLASS = "ErnieImageTransformer2DModel"
_COLUMN = TensorSplit.COLUMN
_LAYERS = SequentialNames(
    norms=("adaLN_sa_ln", "adaLN_mlp_ln"),
    modulation=None,
    attention="self_attention",
    mlp=("mlp.gate_proj", "mlp.up_proj", "mlp.linear_fc2"),
)


def _sizes(model: ErnieImageConfig) -> dict[str, int]:
    return stream_sizes(model) | {"Q": 3 * model.hidden_size, "2F": 2 * model.ffn_hidden_size}


_TABLE = NameTable(
    rows=(
        *linear_rows("patches", "x_embedder.proj", "D", "C", arrangement=Convolution(axes=2)),
        *without_biases(
            linear_rows("text_embedder", "text_proj", "D", "E", exists=lambda m: m.projects_text)
        ),
        # In Diffusers its inputs are sines, then cosines.
        *linear_rows(
            "told.linear_1", "time_embedding.linear_1", "D", "D", arrangement=SwappedHalves(axis=1)
        ),
        *linear_rows("told.linear_2", "time_embedding.linear_2", "D", "D"),
        *linear_rows("modulations.blocks", "adaLN_modulation.1", "6D", "D", split=_COLUMN),
        *linear_rows(
            "modulations.out",
            "final_norm.linear",
            *("2D", "D"),
            split=_COLUMN,
            arrangement=SwappedHalves(),
        ),
        *sequential_rows("blocks", "layers", _LAYERS, heads=ByHead(), rotated=False),
        *linear_rows("proj_out", "final_linear", "C", "D", arrangement=Features(THWC)),
    ),
    sizes=_sizes,
    layers=lambda model: {"blocks": model.num_layers},
)
ERNIE_IMAGE_NAMES = own_names(_TABLE)
"""Diffusers' names of linears, mapped to themselves: ComfyUI and trainers use the same names."""


def _rules(t: Any) -> list[Rule]:
    return [
        outputs_as_inputs(t),
        (t.eps == EPS, f"eps={t.eps:g} must be {EPS:g}"),
        (t.rope_theta == THETA, f"rope_theta={t.rope_theta:g} must be {THETA:g}"),
        (t.qk_layernorm, "qk_layernorm=false must be true"),
    ]


KEYS = ConfigKeys(
    keys=(
        same("hidden_size", 3072),
        same("num_attention_heads", 24),
        same("num_layers", 24),
        Key(
            "ffn_hidden_size",
            "mlp_ratio",
            8192,
            read=lambda t: mlp_ratio(t.ffn_hidden_size, t.hidden_size),
            write=lambda m: m.ffn_hidden_size,
        ),
        same("in_channels", 128),
        Key("out_channels", default=128, write=lambda m: m.in_channels),
        Key("patch_size", "patch_spatial", 1),
        Key("text_in_dim", "crossattn_emb_size", 2560),
        Key("rope_theta", default=int(THETA)),
        Key("rope_axes_dim", "rope_axes", (32, 48, 48)),
        Key("eps", default=EPS),
        Key("qk_layernorm", default=True),
    ),
    kept=(OwnKey("patch_temporal", PositiveInt, published=lambda _: 1),),
    rules=_rules,
)


def _run_network(
    network: nn.Module, sample: LatentSample, level: float, _: ErnieImageConfig
) -> Tensor:
    import torch

    (made,) = network(
        hidden_states=sample.latent_CFHW[:, 0][None],
        timestep=torch.tensor([level]),
        text_bth=sample.text_LE[None],
        text_lens=torch.tensor([len(sample.text_LE)]),
        return_dict=False,
    )
    return made[0][:, None]


FORM = DiffusersForm(
    class_name=CLASS,
    table=_TABLE,
    keys=KEYS,
    original_names=(ERNIE_IMAGE_NAMES,),
    comfyui_names=lambda _: ERNIE_IMAGE_NAMES,
    pipelines={"ErnieImagePipeline": Pipeline()},
    largest_latent=lambda _: (1, 2**20, 2**20),
    run_network=_run_network,
)
