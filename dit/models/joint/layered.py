"""Layers of networks in which each layer sees another hidden state of text (HiDream-I1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dit.models.layer_spec import (
    JOINT_TOKENS,
    TEXT_TOKENS,
    TOKENS,
    Activation,
    Attend,
    AttentionSpec,
    ExpertsSpec,
    Feed,
    FeedForwardSpec,
    LayerSpec,
    LayerTextSpec,
    Modulation,
    NetworkSpec,
    PerBlockModulation,
    Port,
    QkNorm,
    StackSpec,
    View,
)


def seen_states(layers: int, states: int) -> tuple[int, ...]:
    """Index of the text encoder's hidden state that each layer sees: its own, or the last one."""
    return tuple(min(number, states - 1) for number in range(layers))


@dataclass(frozen=True)
class OwnText(View):
    """A layer's own text tokens, behind the other text; the layer does not change them."""

    runs: ClassVar[str] = "dit.models.stacks.layered_transformer:SeeingOwnText"
    text: LayerTextSpec


def layered_stacks(model: Any) -> tuple[StackSpec, ...]:
    """Double-stream layers, then sequential layers, all with experts.

    The last layer's text is projected before all layers, so that layer has no projection.
    """
    double, single, width = model.num_layers, model.num_single_layers, model.hidden_size

    def swiglu(hidden: int) -> FeedForwardSpec:
        return FeedForwardSpec(width=width, hidden=hidden, activation=Activation.SWIGLU)

    def text(first: int) -> LayerTextSpec:
        sizes: Any = {"width": model.llama_size, "first": first}
        return LayerTextSpec(states=seen_states(double + single, model.llama_states), **sizes)

    experts = ExpertsSpec(
        expert=swiglu(model.ffn_hidden_size),
        shared=swiglu(model.shared_hidden_size),
        count=model.num_routed_experts,
        chosen=model.num_activated_experts,
    )
    heads: Any = {"heads": model.num_attention_heads, "norm": QkNorm.ACROSS_HEADS, "eps": 1e-5}
    attention = AttentionSpec(width=width, bias=True, **heads)
    m = Modulation("modulation", PerBlockModulation())
    of_text = Port(TEXT_TOKENS, "text_attention", m[2])
    first = LayerSpec(
        (
            Attend(Port(TOKENS, "attention", m[0]), attention, of_text),
            Feed(Port(TOKENS, "mlp", m[1]), experts),
            Feed(Port(TEXT_TOKENS, "text_mlp", m[3]), swiglu(model.ffn_hidden_size)),
        ),
        view=OwnText(TEXT_TOKENS, text(0)),
    )
    steps = (
        Attend(Port(JOINT_TOKENS, "attention", m[0]), attention),
        Feed(Port(JOINT_TOKENS, "mlp", m[1]), experts),
    )
    then, last = LayerSpec(steps, OwnText(JOINT_TOKENS, text(double))), LayerSpec(steps)
    return (
        StackSpec(name="double_blocks", count=double, layer=first),
        StackSpec(name="single_blocks", count=single - 1, layer=then),
        StackSpec(name="last_block", count=1, layer=last),
    )


def layered_spec(model: Any) -> NetworkSpec:
    """The network's layers, and its texts, which have equally many tokens in every sample."""
    return NetworkSpec(stacks=layered_stacks(model), text_tokens=3 * model.text_length)
