"""The family `hidream`, HiDream-I1 Full and Dev: its fields, sizes, rules and `Family`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dit.config.checks import Rule, bounded
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
from dit.models.layer_spec import (
    JOINT_TOKENS,
    TEXT_TOKENS,
    TOKENS,
    Activation,
    Attend,
    AttentionSpec,
    Feed,
    FeedForwardSpec,
    LayerSpec,
    Modulation,
    NetworkSpec,
    PerBlockModulation,
    Port,
    QkNorm,
    Slot,
    StackSpec,
    View,
)
from dit.models.registry import imported

TITLE, STATES, LAYER_TEXT = "HiDream-I1", "text_2", "layer_text"
MOST_EXPERTS = 16
MLP_RATIO, MLP_MULTIPLE = 4.0, 256
"""Constants of Diffusers' class, whose config.json has no keys for them."""
_ENCODER = "hidream"
SEES_SOURCE = "the picture to edit side by side with the target, in one picture"
"""Input of HiDream-E1's network that this family does not support, for messages."""

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
"""Keys of `model` for the tiny network of each size (`Family.tiny`)."""


@dataclass(frozen=True, kw_only=True)
class HiDreamConfig(DoubleSingleConfig):
    """Keys of `model`: sizes, conditions, precision and parallelism."""

    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = MODEL_SIZES
    attends_to_padding: ClassVar[bool] = True

    name: str = "hidream_i1_full"
    """A named size (hidream_i1_full, hidream_i1_dev) or `custom`."""
    family: str = "hidream"
    num_layers: int = 16
    num_single_layers: int = bounded(32, most=2**14)
    """Number of layers after the double-stream ones; each computes latents and text jointly."""
    hidden_size: int = 2560
    num_attention_heads: int = 20
    crossattn_emb_size: int = 4096
    """Width of T5's states in the shards."""
    pooled_size: int = bounded(2048, most=2**20)
    """Width of `pooled_text`, the pooled outputs of two CLIP encoders for a caption."""
    llama_size: int = bounded(4096, most=2**20)
    """Width of one hidden state of Llama."""
    llama_states: int = bounded(32, most=2**10)
    """Number of Llama's hidden states in `text_2`, which holds them concatenated. Layer i of the
    network uses state i; layers beyond this number use the last state."""
    text_length: int = bounded(128, most=2**16)
    """Number of tokens of each text of a sample, padding included."""
    num_routed_experts: int = bounded(4, most=MOST_EXPERTS)
    """Number of routed experts: feed-forwards that a router weights for each token."""
    num_activated_experts: int = bounded(2, most=MOST_EXPERTS)
    """Number of routed experts that each token uses: those with the largest router weights."""
    rope_axes: tuple[int, int, int] = bounded((64, 32, 32), most=2**17, least=None)
    max_resolution: tuple[int, int] = bounded((128, 128), most=2**12, least=None)
    """Latent rows and columns of the largest square picture. A picture that is not square is padded
    with tokens of zeros to as many tokens, and layers attend to them, as in the published
    network."""

    def own_sizes(self) -> list[Rule]:
        chosen, experts = self.num_activated_experts, self.num_routed_experts
        return [
            *super().own_sizes(),
            learns_pictures(self, TITLE),
            (
                self.text_pad_to is None,
                f"text_pad_to={self.text_pad_to} must be null: texts of {TITLE} already have"
                " text_length tokens, with their encoders' states of padding",
            ),
            (
                chosen <= experts,
                f"num_activated_experts={chosen} must not be more than"
                f" num_routed_experts={experts}",
            ),
            (
                min(self.max_resolution) >= 1,
                f"max_resolution={list(self.max_resolution)} must be at least [1, 1]",
            ),
            (
                self.token_route is None,
                f"route_from={self.route_from} must be null, and route_to, too: {TITLE} attends to"
                " padding, and token routing would leave out some of it",
            ),
        ]

    def own_shapes(self) -> list[Rule]:
        tp, shared = self.tensor_model_parallel_size, self.shared_hidden_size
        return [
            axes_fill_heads(self),
            (
                shared % tp == 0,
                f"tensor_model_parallel_size={tp} must divide {shared}, the hidden width of the"
                " shared expert (from hidden_size and mlp_ratio)",
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
    """Hidden width of a SwiGLU that replaces an MLP of hidden width `width`.

    It is 2/3 of `width`, rounded up to a multiple of 256, as in Diffusers.
    """
    return -(-int(2 * width / 3) // MLP_MULTIPLE) * MLP_MULTIPLE


def seen_states(layers: int, states: int) -> tuple[int, ...]:
    """For each of `layers` layers, the index of its hidden state of Llama, of which `states` exist.

    Layer i uses state i; layers beyond the last state use the last state.
    """
    return tuple(min(number, states - 1) for number in range(layers))


@dataclass(frozen=True)
class FeedExperts(Feed):
    """A mixture of `count` routed experts and a shared expert; all of them are feed-forwards.

    y = shared(x) + sum of p_e * expert_e(x) over the `chosen` largest p_e, with
    p = softmax(router(x)). `feed_forward` describes each routed expert.
    """

    runs: ClassVar[str] = "dit.models.hidream.experts:FeedingExperts"
    shared: FeedForwardSpec
    count: int
    chosen: int
    """Number of routed experts that a token uses. The other experts are also computed, with weight
    0."""

    @property
    def hidden(self) -> int:
        return self.shared.hidden + self.count * self.feed_forward.hidden

    @property
    def exchanges(self) -> int:
        return 1 + self.count


@dataclass(frozen=True, kw_only=True)
class OwnText(View):
    """A view in which each layer gets its own hidden state of the text encoder as additional text.

    Each layer projects its own hidden state; the result follows the other text of the sample. The
    projection for the last layer is computed before all layers.
    """

    runs: ClassVar[str] = "dit.models.hidream.layer_text:SeeingOwnText"
    place: str
    """Name of the stream of tokens (`TEXT_TOKENS` or `JOINT_TOKENS`) that contains the text."""
    width: int
    """Width of one hidden state of the text encoder."""
    states: tuple[int, ...]
    """Index of the hidden state of each layer of the network."""
    first: int = 0
    """Index of this stack's first layer among all layers of the network."""

    @property
    def row(self) -> str:
        return self.place

    def state(self, layer: int) -> int | None:
        """The index of the hidden state that layer `layer` of the stack projects.

        Returns None for the last layer of the network, which projects none.
        """
        number = self.first + layer
        return self.states[number] if number + 1 < len(self.states) else None

    def columns(self, state: int) -> slice:
        """The columns of hidden state `state` in the concatenation of all states."""
        return slice(state * self.width, (state + 1) * self.width)


def hidream_stacks(model: HiDreamConfig) -> tuple[StackSpec, ...]:
    """The specifications of the stacks: double-stream layers, then sequential ones, with experts.

    The last layer is a stack by itself, without a linear for its hidden state, which is projected
    before all layers.
    """
    double, single, width = model.num_layers, model.num_single_layers, model.hidden_size

    def swiglu(hidden: int) -> FeedForwardSpec:
        return FeedForwardSpec(width=width, hidden=hidden, activation=Activation.SWIGLU)

    def own(row: str, first: int = 0) -> OwnText:
        states = seen_states(double + single, model.llama_states)
        return OwnText(place=row, width=model.llama_size, states=states, first=first)

    def experts(row: str, slot: Slot) -> FeedExperts:
        expert, shared = swiglu(model.ffn_hidden_size), swiglu(model.shared_hidden_size)
        numbers = model.num_routed_experts, model.num_activated_experts
        return FeedExperts(Port(row, "mlp", slot), expert, shared, *numbers)

    heads: Any = {"heads": model.num_attention_heads, "norm": QkNorm.ACROSS_HEADS, "eps": 1e-5}
    attention = AttentionSpec(width=width, bias=True, **heads)
    m = Modulation("modulation", PerBlockModulation())
    of_text = Port(TEXT_TOKENS, "text_attention", m[2])
    first = LayerSpec(
        (
            Attend(Port(TOKENS, "attention", m[0]), attention, of_text),
            experts(TOKENS, m[1]),
            Feed(Port(TEXT_TOKENS, "text_mlp", m[3]), swiglu(model.ffn_hidden_size)),
        ),
        own(TEXT_TOKENS),
    )
    steps = (
        Attend(Port(JOINT_TOKENS, "attention", m[0]), attention),
        experts(JOINT_TOKENS, m[1]),
    )
    then, last = LayerSpec(steps, own(JOINT_TOKENS, double)), LayerSpec(steps)
    return (
        StackSpec(name="double_blocks", count=double, layer=first),
        StackSpec(name="single_blocks", count=single - 1, layer=then),
        StackSpec(name="last_block", count=1, layer=last),
    )


def _spec(model: HiDreamConfig) -> NetworkSpec:
    return NetworkSpec(stacks=hidream_stacks(model), text_tokens=3 * model.text_length)


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
    spec=_spec,
    parts={**JOINT_PARTS, LAYER_TEXT: "text", "state_embedder": "text"},
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
    refused={"hidream_e1": f"an input with {SEES_SOURCE}"},
    tiny=TINY,
)
