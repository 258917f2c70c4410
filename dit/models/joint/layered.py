"""Layers of networks in which each layer sees another hidden state of text (HiDream-I1)."""

from __future__ import annotations

from typing import Any

from dit.models.layer_spec import (
    Activation,
    AttentionSpec,
    DoubleLayerSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerTextSpec,
    NetworkSpec,
    QkNorm,
    SequentialLayerSpec,
    StackSpec,
)


def seen_states(layers: int, states: int) -> tuple[int, ...]:
    """The index of the hidden state that each layer sees: its own, or the last one."""
    return tuple(min(number, states - 1) for number in range(layers))


def layered_stacks(model: Any) -> tuple[StackSpec, ...]:
    """Double-stream layers, then sequential ones, all with experts.

    The last layer's text is projected before all layers, so the layer has no linear for it.
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
    parts: Any = {"attention": attention, "feed_forward": experts}
    first = DoubleLayerSpec(
        **parts,
        text_feed_forward=swiglu(model.ffn_hidden_size),
        one_modulation=True,
        layer_text=text(0),
    )
    plain: Any = {"weighted": False, "after": False, "shifted": True, "tanh": False}
    then = SequentialLayerSpec(**parts, **plain, layer_text=text(double))
    last = SequentialLayerSpec(**parts, **plain)
    return (
        StackSpec(name="double_blocks", count=double, layer=first),
        StackSpec(name="single_blocks", count=single - 1, layer=then),
        StackSpec(name="last_block", count=1, layer=last),
    )


def layered_spec(model: Any) -> NetworkSpec:
    """The layers, and the texts, which have equally many rows in every sample."""
    return NetworkSpec(stacks=layered_stacks(model), text_tokens=3 * model.text_length)
