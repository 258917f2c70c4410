"""Qwen-Image-2.1 in Diffusers, `QwenImage21Transformer2DModel`: names, config.json, calls."""

# D model width, F width of the MLP, W width of the sinusoidal timestep embedding, E text width
# C numbers in a token, L text tokens

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import PositiveInt

from dit.config.checks import Rule
from dit.models.diffusers.arrangements import ByHead
from dit.models.diffusers.form import (
    ConfigKeys,
    DiffusersForm,
    Key,
    OwnKey,
    Pipeline,
    heads_of,
    own_names,
    same,
)
from dit.models.diffusers.names import NameTable, TensorSplit, linear_rows, without_biases
from dit.models.family import REFERENCE
from dit.models.joint.diffusers import patch_rules
from dit.models.joint.sequential_names import SequentialNames, sequential_rows, weight_row
from dit.models.joint.tensor_names import stream_sizes, two_linears
from dit.models.qwen_image21.family import EPS, SIDES, QwenImage21Config, text_names

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dit.batch import LatentSample

CLASS = "QwenImage21Transformer2DModel"
PATCH = 1
"""Side of a patch in latent pixels."""
SLOT = SIDES**2
"""Number of a picture's tokens for each of its placeholder tokens in the text encoder's output."""
_COLUMN = TensorSplit.COLUMN
_LAYERS = SequentialNames(
    norms=(),
    modulation=None,
    attention="attn",
    mlp=("img_mlp.gate_layer", "img_mlp.proj", "img_mlp.out"),
)


def _sizes(model: QwenImage21Config) -> dict[str, int]:
    width = model.hidden_size
    made = {"4D": 4 * width, "Q": 3 * width, "2F": 2 * model.ffn_hidden_size}
    return stream_sizes(model) | made


_EMBEDDER = "time_text_embed.timestep_embedder"
_TABLE = NameTable(
    rows=(
        weight_row("text_norm", "txt_in.text_norm", "E", kind="offset"),
        *without_biases(
            (
                *linear_rows("patches", "img_in", "D", "C"),
                *linear_rows("text_embedder.linear_1", "txt_in.in_layer", "D", "E"),
                *linear_rows("text_embedder.linear_2", "txt_in.out_layer", "D", "D"),
                *two_linears("told", _EMBEDDER, "W"),
                *linear_rows("modulations.blocks", "modulation.1", "4D", "D", split=_COLUMN),
                *linear_rows("modulations.out", "norm_out.linear", "D", "D", split=_COLUMN),
                *linear_rows("proj_out", "proj_out", "C", "D"),
            )
        ),
        *sequential_rows("blocks", "transformer_blocks", _LAYERS, heads=ByHead(rotated=(0, 1))),
    ),
    sizes=_sizes,
    layers=lambda model: {"blocks": model.num_layers},
)
QWEN_IMAGE21_NAMES = own_names(_TABLE)
"""Diffusers' names of linears, mapped to themselves: ComfyUI and trainers use the same names."""


def _rules(t: Any) -> list[Rule]:
    channels = t.out_channels or t.in_channels
    return [
        (
            channels == t.in_channels,
            f"out_channels={channels} must be equal to in_channels={t.in_channels}",
        ),
        (t.eps == EPS, f"eps={t.eps:g} must be {EPS:g}"),
    ]


KEYS = ConfigKeys(
    keys=(
        Key("patch_size", "patch_spatial", PATCH),
        same("in_channels", 64),
        Key("out_channels", None, 64, PositiveInt | None, write=lambda m: m.in_channels),
        same("num_layers", 32),
        heads_of(128),
        same("num_attention_heads", 32),
        Key("context_in_dim", "crossattn_emb_size", 4096),
        Key(
            "mlp_ratio",
            "mlp_ratio",
            3,
            read=lambda t: float(t.mlp_ratio),
            write=lambda m: int(m.mlp_ratio),
        ),
        Key("axes_dims_rope", "rope_axes", (16, 56, 56)),
        Key("eps", default=EPS),
        same("causal_condition", True),
    ),
    kept=(
        OwnKey("patch_temporal", PositiveInt, published=lambda _: 1),
        OwnKey("reference_latents", int, published=lambda _: 0, read=int, may_be_told=True),
    ),
    rules=_rules,
)


def _inexpressible(model: QwenImage21Config) -> list[str]:
    ratio = model.mlp_ratio
    if ratio == int(ratio):
        return []
    return [
        f"model.mlp_ratio={ratio} cannot be exported: Diffusers' {CLASS} takes only whole numbers."
        " Train with a whole number to export"
    ]


def _run_network(
    network: nn.Module, sample: LatentSample, level: float, model: QwenImage21Config
) -> Tensor:
    """The output [C, 1, H, W] of Diffusers' network for one sample.

    The network replaces the states of placeholder tokens by pictures, so these states are zeros.
    """
    import torch
    from torch.nn.functional import pad

    from dit.models.positions import patchify, unpatchify

    references = [x for name, x in sample.others.items() if name.startswith(REFERENCE)]
    patch = (1, model.patch_spatial)
    pictures = [patchify(x, *patch) for x in (*references, sample.latent_CFHW)]
    grids, rows = zip(*pictures, strict=True)
    texts = [sample.inputs.get(name, sample.text_LE[:0]) for name in text_names(model)]
    slots = [len(one) // SLOT for one in rows]
    # There is a text before each reference, and all other texts before the target. The placeholder
    # tokens of the target are the last ones in the mask.
    before, after = texts[: len(references)], texts[len(references) :]
    pairs = zip(before, slots, strict=False)
    text_LE = torch.cat([*(pad(text, (0, 0, 0, n)) for text, n in pairs), *after])
    pairs = zip(before, slots, strict=False)
    runs = [run for text, n in pairs for run in ((False, len(text)), (True, n))]
    runs += [(False, sum(map(len, after))), (True, slots[-1])]
    is_slot_L = torch.cat([torch.full((length,), value) for value, length in runs])
    (made,) = network(
        hidden_states=torch.cat(rows)[None],
        encoder_hidden_states=text_LE[None],
        timestep=torch.tensor([level / 1000]),
        img_shapes=[list(grids)],
        img_mask=is_slot_L[None],
        return_dict=False,
    )
    return unpatchify(made[0, -len(rows[-1]) :], grids[-1], *patch)


FORM = DiffusersForm(
    class_name=CLASS,
    table=_TABLE,
    keys=KEYS,
    inexpressible=_inexpressible,
    original_names=(QWEN_IMAGE21_NAMES,),
    comfyui_names=lambda _: QWEN_IMAGE21_NAMES,
    pipelines={"QwenImage21Pipeline": Pipeline(rules=partial(patch_rules, rows=PATCH))},
    # Diffusers' table has 1024 rows and columns on either side of the middle of a picture.
    largest_latent=lambda model: (1, *(2 * 1024 * model.patch_spatial,) * 2),
    run_network=_run_network,
)
