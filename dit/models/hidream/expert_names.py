"""Diffusers' names of the tensors of HiDream's layers: experts, attention, text projections."""
# D model width, F width of an expert, S width of the shared expert, X number of experts

from __future__ import annotations

from typing import Any

from dit.models.diffusers.arrangements import GatesAndValues, RotaryPairs
from dit.models.diffusers.names import Row, TensorSplit, linear_rows, without_biases
from dit.models.hidream.family import MOST_EXPERTS
from dit.models.joint.tensor_names import BY_HEAD, modulation_rows

_REPLICATED, _COLUMN, _ROW = TensorSplit.REPLICATED, TensorSplit.COLUMN, TensorSplit.ROW


def across_heads_rows(ours: str, theirs: str, end: str = "") -> tuple[Row, ...]:
    """Lines of the name table for an attention with norms across heads.

    `end` is a suffix of Diffusers' names of linears and norms: "_t" for the attention of text.
    """
    made = tuple(f"{theirs}.to_{letter}{end}" for letter in "qkv")
    norms = (("query", "q"), ("key", "k"))
    return (
        *linear_rows(f"{ours}.linear_qkv", made, "3D", "D", split=_COLUMN, arrangement=BY_HEAD),
        *(
            Row(
                f"{ours}.across_heads.{name}_scale",
                (f"{theirs}.{letter}_rms_norm{end}.weight",),
                *(_COLUMN, ("D",), RotaryPairs()),
            )
            for name, letter in norms
        ),
        *linear_rows(f"{ours}.linear_proj", f"{theirs}.to_out{end}", "D", "D", split=_ROW),
    )


def swiglu_rows(ours: str, theirs: str, hidden: str = "F", **options: Any) -> tuple[Row, ...]:
    width = "ffn_hidden_size" if hidden == "F" else "shared_hidden_size"
    pairs: Any = {"split": _COLUMN, "arrangement": GatesAndValues(hidden=width), **options}
    made = (f"{theirs}.w1", f"{theirs}.w3")
    out: Any = {"split": _ROW, **options}
    return without_biases(
        (
            *linear_rows(f"{ours}.linear_fc1", made, f"2{hidden}", "D", **pairs),
            *linear_rows(f"{ours}.linear_fc2", f"{theirs}.w2", "D", hidden, **out),
        )
    )


def expert_rows(ours: str, theirs: str) -> tuple[Row, ...]:
    """Lines of the name table for the router, the shared expert and the routed experts."""
    gate = (f"{theirs}.gate.weight",)
    router = Row(f"{ours}.router.weight", gate, _REPLICATED, ("X", "D"))

    def expert(number: int) -> tuple[Row, ...]:
        exists: Any = {"exists": lambda model: number < model.num_routed_experts}
        return swiglu_rows(f"{ours}.expert_{number}", f"{theirs}.experts.{number}", **exists)

    return (
        router,
        *swiglu_rows(f"{ours}.shared", f"{theirs}.shared_experts", "S"),
        *(row for number in range(MOST_EXPERTS) for row in expert(number)),
    )


def _layer_rows(stack: str, theirs: str) -> tuple[Row, ...]:
    ours, theirs, double = f"{stack}.layers.*", f"{theirs}.*.block", stack == "double_blocks"
    made = "12D" if double else "6D"
    rows = (
        *modulation_rows(f"{ours}.modulation", f"{theirs}.adaLN_modulation.1", made),
        *across_heads_rows(f"{ours}.attention", f"{theirs}.attn1"),
        *expert_rows(f"{ours}.mlp", f"{theirs}.ff_i"),
    )
    if double:
        rows += across_heads_rows(f"{ours}.text_attention", f"{theirs}.attn1", "_t")
        rows += swiglu_rows(f"{ours}.text_mlp", f"{theirs}.ff_t")
    return rows


def _projections() -> tuple[Row, ...]:
    """Lines of the name table for the text projections: one per layer for Llama, one for T5."""

    def row(ours: str, width: str = "H", **options: Any) -> Row:
        theirs = ("caption_projection.*.linear.weight",)
        return Row(f"{ours}.weight", theirs, _REPLICATED, ("D", width), **options)

    of_layer = "layers.*.layer_text.linear"
    return (
        row("text_embedder", "E", offset=lambda model: model.all_layers),
        row("state_embedder", offset=lambda model: model.all_layers - 1),
        row(f"double_blocks.{of_layer}"),
        row(f"single_blocks.{of_layer}", offset=lambda model: model.num_layers),
    )


_BLOCKS = {
    "double_blocks": "double_stream_blocks",
    "single_blocks": "single_stream_blocks",
    "last_block": "single_stream_blocks",
}


def layered_rows() -> tuple[Row, ...]:
    """Lines of the name table for all layers and all text projections."""
    layers = (_layer_rows(ours, theirs) for ours, theirs in _BLOCKS.items())
    return (*_projections(), *(row for rows in layers for row in rows))
