"""HiDream-I1 in Diffusers: names of tensors, config.json, pipelines, calls of its network.

Its class is `HiDreamImageTransformer2DModel`.
"""

# D model width, P width of pooled text, E of T5, H of a hidden state of Llama
# W cosines and sines of the level, C numbers in a token

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
            f"llama_layers={seen}; layer i of {layers} sees state i, or the last one",
        ),
        (t.num_routed_experts > 0, "num_routed_experts=0, whose layers have one feed-forward"),
        (
            t.num_routed_experts <= MOST_EXPERTS,
            f"num_routed_experts={t.num_routed_experts}, more than {MOST_EXPERTS}",
        ),
        (
            sum(t.axes_dims_rope) == t.attention_head_dim,
            f"axes_dims_rope={list(t.axes_dims_rope)}, which do not fill a head of"
            f" {t.attention_head_dim}",
        ),
    ]


def _states(t: Any) -> int:
    """Number of Llama's hidden states in shards, from a config.json `t`.

    Shards may hold more states than layers use; then our own key `llama_states` has the number.
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
        # Whether experts have no gradients, of which Diffusers' own networks in training have some.
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
    return [f"model.mlp_ratio={model.mlp_ratio:g}, not {MLP_RATIO:g}"]


def layer_states(text_LX: Tensor, model: HiDreamConfig) -> Tensor:
    """Hidden states [L, X] of Llama in the form of Diffusers' network, [states, 1, L, H]."""
    return text_LX.unflatten(1, (-1, model.llama_size)).transpose(0, 1)[:, None]


def _run_network(
    network: nn.Module, sample: LatentSample, level: float, model: HiDreamConfig
) -> Tensor:
    """Output of Diffusers' network for one sample, with the sign that its pipeline gives it.

    In training mode, the only one in which experts have gradients, the network outputs rows of
    tokens, [1, C, T, p * p], which are put back into the picture's form.
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
"""Diffusers' names of linears by their names in the original project, ComfyUI and trainers, which
are equal."""

FORM = DiffusersForm(
    class_name=CLASS,
    table=_TABLE,
    keys=KEYS,
    inexpressible=_inexpressible,
    pipelines={"HiDreamImagePipeline": Pipeline(beside=_BESIDE)},
    # Of HiDream-E1's own code; the weights have the names and shapes of HiDream-I1's.
    refused_pipelines={"HiDreamImageEditingPipeline": SEES_SOURCE},
    original_names=(HIDREAM_NAMES,),
    comfyui_names=lambda _: HIDREAM_NAMES,
    largest_latent=lambda _: (1, 2**20, 2**20),
    run_network=_run_network,
)
