"""The family `hidream`, HiDream-I1 Full and Dev: its fields, sizes, rules and `Family`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dit.config.checks import Rule, bounded
from dit.config.resume import Refused
from dit.models.family import (
    Family,
    InputKind,
    ObjectiveConventions,
    SampleInput,
    WeightRules,
    grid_positions,
    pooled_input,
)
from dit.models.joint.family import (
    ADALN_ZERO,
    JOINT_PARTS,
    TINY_DOUBLE_SINGLE,
    DoubleSingleConfig,
    axes_fill_heads,
    learns_pictures,
)
from dit.models.joint.layered import layered_spec
from dit.models.layer_spec import MOST_EXPERTS
from dit.models.registry import imported

TITLE, STATES = "HiDream-I1", "text_2"
MLP_RATIO, MLP_MULTIPLE = 4.0, 256
"""Constants of Diffusers' class, whose config.json has no keys for them."""
_ENCODER = "hidream"
SEES_SOURCE = "the picture that it edits beside the target, in one picture"
"""Feature of HiDream-E1 that the network here lacks."""

MODEL_SIZES: dict[str, dict[str, Any]] = {"hidream_i1_full": {}, "hidream_i1_dev": {}}
"""Fields of `model` by size name, from config.json of HiDream-ai/HiDream-I1-Full and -Dev."""
TINY: Mapping[str, Mapping[str, Any]] = {
    "hidream_i1_full": {
        **TINY_DOUBLE_SINGLE,
        "num_single_layers": 3,
        "hidden_size": 48,
        "mlp_ratio": 1.0,
        "crossattn_emb_size": 16,
        "pooled_size": 10,
        "llama_size": 20,
        "llama_states": 5,
        "rope_axes": (4, 4, 4),
        "max_resolution": (8, 8),
        "text_length": 3,
    }
}
"""Tiny size by name (`Family.tiny`)."""


@dataclass(frozen=True, kw_only=True)
class HiDreamConfig(DoubleSingleConfig):
    """Keys of `model`: sizes, conditions, precision and parallelism."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = MODEL_SIZES
    attends_to_padding: ClassVar[bool] = True

    name: str = "hidream_i1_full"
    """A named size (hidream_i1_full, hidream_i1_dev) or `custom`."""
    family: str = "hidream"
    num_layers: int = 16
    num_single_layers: Refused[int] = bounded(32, most=2**14)
    """Number of layers over latents and text jointly, after the double-stream layers."""
    hidden_size: int = 2560
    num_attention_heads: int = 20
    crossattn_emb_size: int = 4096
    """Width of the T5 states in the shards."""
    pooled_size: Refused[int] = bounded(2048, most=2**20)
    """Width of `pooled_text`, the concatenated pooled embeddings of two CLIP encoders."""
    llama_size: Refused[int] = bounded(4096, most=2**20)
    """Width of one hidden state of Llama."""
    llama_states: Refused[int] = bounded(32, most=2**10)
    """Number of Llama hidden states that `text_2` holds side by side. Layer i of the network
    attends to state i; later layers attend to the last state."""
    text_length: Refused[int] = bounded(128, most=2**16)
    """Number of tokens of each text, padding included."""
    num_routed_experts: Refused[int] = bounded(4, most=MOST_EXPERTS)
    """Number of experts (feed-forwards) that a router weighs for each token."""
    num_activated_experts: Refused[int] = bounded(2, most=MOST_EXPERTS)
    """Number of routed experts that are used for a token."""
    rope_axes: Refused[tuple[int, int, int]] = bounded((64, 32, 32), most=2**17, least=None)
    max_resolution: Refused[tuple[int, int]] = bounded((128, 128), most=2**12, least=None)
    """Largest latent (rows, columns); a non-square picture is padded with zeros to this number of
    tokens, which take part in attention as in the published weights."""

    def own_sizes(self) -> list[Rule]:
        chosen, experts = self.num_activated_experts, self.num_routed_experts
        return [
            *super().own_sizes(),
            learns_pictures(self, TITLE),
            (
                self.text_pad_to is None,
                f"text_pad_to={self.text_pad_to}: texts of {TITLE} have text_length rows, and keep"
                " what their encoders make of padding; set it to null",
            ),
            (
                chosen <= experts,
                f"num_activated_experts={chosen} is more than num_routed_experts={experts}",
            ),
            (
                min(self.max_resolution) >= 1,
                f"max_resolution={list(self.max_resolution)} must be at least [1, 1]",
            ),
            (
                self.token_route is None,
                f"route_from={self.route_from}: {TITLE} attends to padding, of which a route of"
                " tokens would leave out a part; set it to null",
            ),
        ]

    def own_shapes(self) -> list[Rule]:
        tp, shared = self.tensor_model_parallel_size, self.shared_hidden_size
        return [
            axes_fill_heads(self),
            (
                shared % tp == 0,
                f"the width {shared} of the shared expert does not divide by"
                f" tensor_model_parallel_size={tp}",
            ),
        ]

    @property
    def ffn_hidden_size(self) -> int:
        if self.mlp_ratio == MLP_RATIO:
            return _rounded(4 * self.hidden_size)
        return int(self.hidden_size * self.mlp_ratio)

    @property
    def shared_hidden_size(self) -> int:
        """Hidden width of the shared expert, which all tokens use."""
        if self.mlp_ratio == MLP_RATIO:
            return _rounded(2 * self.hidden_size)
        return max(self.ffn_hidden_size // 2, 1)

    @property
    def text_multiple(self) -> int:
        return 3 * self.text_length

    def attended(self, grid: tuple[int, int, int], tokens: int) -> int:
        frames, rows, columns = grid
        if rows == columns:
            return tokens
        filled = self.max_resolution[0] * self.max_resolution[1] // self.patch_spatial**2
        return max(tokens, frames * filled)

    @property
    def cost_sizes(self) -> list[int]:
        sizes = super().cost_sizes
        return [*sizes, self.text_length, self.num_routed_experts]


def _rounded(width: int) -> int:
    """Width of a SwiGLU that replaces a feed-forward of `width`, rounded as in Diffusers."""
    return -(-int(2 * width / 3) // MLP_MULTIPLE) * MLP_MULTIPLE


def _inputs(model: HiDreamConfig) -> tuple[SampleInput, ...]:
    rows: Any = {"kind": InputKind.TEXT, "rows": model.text_length, "encoder": _ENCODER}
    return (
        SampleInput(name="text", width=model.crossattn_emb_size, **rows),
        SampleInput(name=STATES, width=model.llama_states * model.llama_size, **rows),
        pooled_input(model, encoder=_ENCODER),
    )


FAMILY = Family(
    name="hidream",
    config=HiDreamConfig,
    network=imported("dit.models.hidream.model:HiDreamNetwork"),
    spec=layered_spec,
    parts={**JOINT_PARTS, "layer_text": "text", "state_embedder": "text"},
    diffusers=imported("dit.models.hidream.diffusers:FORM"),
    inputs=_inputs,
    positions=grid_positions,  # frame 0
    weights=WeightRules(zero=ADALN_ZERO),
    objective=ObjectiveConventions(
        settings={"name": "flow"},
        of_size={
            "hidream_i1_full": {"flow_shift": 3.0},
            "hidream_i1_dev": {"flow_shift": 6.0},
        },
        sign=-1,
        clean_level=None,
    ),
    vae=lambda _: _ENCODER,
    distilled=("hidream_i1_dev",),
    refused={"hidream_e1": f"sees {SEES_SOURCE}"},
    tiny=TINY,
)
