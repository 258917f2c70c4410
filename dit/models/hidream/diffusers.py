"""HiDream-I1 in Diffusers, `HiDreamImageTransformer2DModel`: tensor names, config.json, calls."""

# D model width, P width of pooled text, E width of T5, H width of a hidden state of Llama
# W width of the sinusoidal timestep embedding, C numbers in a token

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import NonNegativeInt, PositiveInt

from dit.config.checks import Rule
from dit.models.diffusers.arrangements import THWC, Features
from dit.models.diffusers.form import (
    ConfigKeys,
    DiffusersForm,
    Key,
    OwnKey,
    PartBeside,
    Pipeline,
    heads_of,
    own_names,
    same,
)
from dit.models.diffusers.names import NameTable, linear_rows
from dit.models.family import POOLED
from dit.models.hidream.expert_names import layered_rows
from dit.models.hidream.family import (
    MLP_RATIO,
    MOST_EXPERTS,
    SEES_SOURCE,
    STATES,
    HiDreamConfig,
    seen_states,
)
from dit.models.joint.diffusers import outputs_as_inputs
from dit.models.joint.tensor_names import modulation_rows, stream_sizes, two_linears

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dit.batch import LatentSample

CLASS = "HiDreamImageTransformer2DModel"
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
_BESIDE = {
    "tokenizer_4": PartBeside(kind="AutoTokenizer", model=LLAMA, has_weights=False),
    "text_encoder_4": PartBeside(kind="LlamaForCausalLM", model=LLAMA, has_weights=True),
}
_FED = Features(THWC, axis=1)
_TABLE = NameTable(
    rows=(
        *linear_rows("patches", "x_embedder.proj", "D", "C", arrangement=_FED),
        *two_linears("told.level", "t_embedder.timestep_embedder", "W"),
        *two_linears("told.pooled", "p_embedder.pooled_embedder", "P"),
        *layered_rows(),
        *modulation_rows("modulate_out", "final_layer.adaLN_modulation.1", "2D"),
        *linear_rows("proj_out", "final_layer.linear", "C", "D", arrangement=Features(THWC)),
    ),
    sizes=lambda model: _sizes(model),
    layers=lambda model: {
        "double_blocks": model.num_layers,
        "single_blocks": model.num_single_layers - 1,
        "last_block": 1,
    },
    first=lambda model: {"last_block": model.num_single_layers - 1},
)


def _sizes(model: HiDreamConfig) -> dict[str, int]:
    hidden, shared = model.ffn_hidden_size, model.shared_hidden_size
    return stream_sizes(model) | {
        **{"12D": 12 * model.hidden_size, "2F": 2 * hidden, "S": shared, "2S": 2 * shared},
        **{"X": model.num_routed_experts, "P": model.pooled_size, "H": model.llama_size},
    }


def _rules(t: Any) -> list[Rule]:
    layers, seen = t.num_layers + t.num_single_layers, list(t.llama_layers)
    return [
        outputs_as_inputs(t),
        (
            tuple(seen) == seen_states(layers, max(seen) + 1),
            f"llama_layers={seen}, but layer i of the {layers} layers must use hidden state i, or"
            " the last one",
        ),
        (t.num_routed_experts > 0, "num_routed_experts=0 must be at least 1"),
        (
            t.num_routed_experts <= MOST_EXPERTS,
            f"num_routed_experts={t.num_routed_experts} must be at most {MOST_EXPERTS}",
        ),
        (
            sum(t.axes_dims_rope) == t.attention_head_dim,
            f"the sum of axes_dims_rope={list(t.axes_dims_rope)} must be"
            f" attention_head_dim={t.attention_head_dim}",
        ),
    ]


def _states(t: Any) -> int:
    """Number of Llama's hidden states in shards, from a config.json `t`.

    Shards may hold more states than the layers use; then the private key `llama_states` counts.
    """
    seen = max(t.llama_layers) + 1
    return seen if seen < len(t.llama_layers) else max(seen, t.kept.llama_states)


KEYS = ConfigKeys(
    keys=(
        Key("patch_size", "patch_spatial", 2),
        same("in_channels", 64),
        Key("out_channels", type=PositiveInt | None),
        same("num_layers", 16),
        same("num_single_layers", 32),
        heads_of(128),
        same("num_attention_heads", 20),
        Key(
            "caption_channels",
            ("crossattn_emb_size", "llama_size"),
            (4096, 4096),
            write=lambda m: (m.crossattn_emb_size, m.llama_size),
            read=lambda t: t.caption_channels,
        ),
        Key("text_emb_dim", "pooled_size", 2048),
        Key("num_routed_experts", "num_routed_experts", 4, NonNegativeInt),
        same("num_activated_experts", 2),
        Key("axes_dims_rope", "rope_axes", (32, 32), tuple[PositiveInt, ...]),
        same("max_resolution", (128, 128)),
        Key(
            "llama_layers",
            "llama_states",
            (0,),
            tuple[NonNegativeInt, ...],
            read=_states,
            write=lambda m: seen_states(m.all_layers, m.llama_states),
        ),
        # Whether experts run without gradients even in training mode.
        Key("force_inference_output", default=False),
    ),
    kept=(
        OwnKey("patch_temporal", PositiveInt, published=lambda _: 1),
        OwnKey("text_length", PositiveInt, published=lambda _: 128, may_be_told=True),
        OwnKey("llama_states", PositiveInt, published=lambda t: max(t.llama_layers) + 1),
    ),
    rules=_rules,
)


def _inexpressible(model: HiDreamConfig) -> list[str]:
    if model.mlp_ratio == MLP_RATIO:
        return []
    return [
        f"model.mlp_ratio={model.mlp_ratio:g} cannot be exported: {MLP_RATIO:g} is fixed in"
        f" Diffusers' {CLASS}. Train with model.mlp_ratio={MLP_RATIO:g} to export"
    ]


def layer_states(text_LX: Tensor, model: HiDreamConfig) -> Tensor:
    """Llama's concatenated hidden states [L, X] as Diffusers' network takes them.

    The result is [states, 1, L, H].
    """
    return text_LX.unflatten(1, (-1, model.llama_size)).transpose(0, 1)[:, None]


def _run_network(
    network: nn.Module, sample: LatentSample, level: float, model: HiDreamConfig
) -> Tensor:
    """The output [C, 1, H, W] of Diffusers' network for one sample, negated as by its pipeline.

    In training mode, which is needed for gradients of experts, the network returns tokens
    [1, C, T, p * p]; this function puts them together to the picture.
    """
    import torch

    p, latent_CHW = model.patch_spatial, sample.latent_CFHW[:, 0]
    rows, columns = (side // p for side in latent_CHW.shape[1:])
    (made,) = network(
        latent_CHW[None],
        timesteps=torch.tensor([level]),
        encoder_hidden_states_t5=sample.text_LE[None],
        encoder_hidden_states_llama3=layer_states(sample.others[STATES], model),
        pooled_embeds=sample.others[POOLED][None],
        return_dict=False,
    )
    if any(type(one).__name__ == CLASS and one.training for one in network.modules()):
        made = made[:, :, : rows * columns].unflatten(3, (p, p)).unflatten(2, (rows, columns))
        made = made.transpose(3, 4).flatten(4).flatten(2, 3)
    return -made[0, :, None]


HIDREAM_NAMES = own_names(_TABLE)
"""Diffusers' names of linears, mapped to themselves: the original project, ComfyUI and trainers use
the same names."""

FORM = DiffusersForm(
    class_name=CLASS,
    table=_TABLE,
    keys=KEYS,
    inexpressible=_inexpressible,
    pipelines={"HiDreamImagePipeline": Pipeline(beside=_BESIDE)},
    # A class of HiDream-E1's code; its weights have the same names and shapes as HiDream-I1's.
    refused_pipelines={"HiDreamImageEditingPipeline": SEES_SOURCE},
    original_names=(HIDREAM_NAMES,),
    comfyui_names=lambda _: HIDREAM_NAMES,
    largest_latent=lambda _: (1, 2**20, 2**20),
    run_network=_run_network,
)
