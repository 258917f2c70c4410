"""Names in Diffusers of the layers with joint attention, which several families share."""

# D model width, F width of the MLP, K head width, C numbers in a token of the prediction

from __future__ import annotations

from typing import Any

from dit.config import ModelConfig
from dit.models.diffusers_names import (
    ByHead,
    HeadColumns,
    RotaryPairs,
    Row,
    SwappedHalves,
    TensorSplit,
    linear_rows,
)

_COLUMN, _ROW = TensorSplit.COLUMN, TensorSplit.ROW
BY_HEAD = ByHead(rotated=(0, 1))
"""Neighbours are rotated together there, and halves of a head here."""


def norm_rows(ours: str, theirs: str, names: tuple[str, str]) -> tuple[Row, ...]:
    """RMSNorm of queries and of keys, with one weight for all heads."""
    return tuple(
        Row(
            f"{ours}.{letter}_layernorm.weight",
            (f"{theirs}.{name}.weight",),
            TensorSplit.REPLICATED,
            ("K",),
            RotaryPairs(),
        )
        for letter, name in zip("qk", names, strict=True)
    )


def double_stream_rows(
    ours: str,
    theirs: str,
    *,
    modulations: tuple[str, str] = ("norm1.linear", "norm1_context.linear"),
    mlps: tuple[str, str] = ("ff", "ff_context"),
) -> tuple[Row, ...]:
    """Of double-stream layers, which begin with `ours` and `theirs`; latents, then text."""
    latents = (("to_q", "to_k", "to_v"), ("norm_q", "norm_k"), "to_out.0")
    text = (
        ("add_q_proj", "add_k_proj", "add_v_proj"),
        ("norm_added_q", "norm_added_k"),
        "to_add_out",
    )
    rows: list[Row] = []
    for prefix, (qkv, norms, out), modulation, mlp in zip(
        ("", "text_"), (latents, text), modulations, mlps, strict=True
    ):
        attention, of_attention = f"{ours}.{prefix}attention", f"{theirs}.attn"
        feed_forward, of_mlp = f"{ours}.{prefix}mlp", f"{theirs}.{mlp}.net"
        whole: Any = {"split": _COLUMN}
        rows += [
            *linear_rows(
                f"{ours}.{prefix}modulation.linear", f"{theirs}.{modulation}", "6D", "D", **whole
            ),
            *linear_rows(
                f"{attention}.linear_qkv",
                tuple(f"{of_attention}.{name}" for name in qkv),
                *("3D", "D"),
                arrangement=BY_HEAD,
                **whole,
            ),
            *norm_rows(attention, of_attention, norms),
            *linear_rows(f"{attention}.linear_proj", f"{of_attention}.{out}", "D", "D", split=_ROW),
            *linear_rows(f"{feed_forward}.linear_fc1", f"{of_mlp}.0.proj", "F", "D", **whole),
            *linear_rows(f"{feed_forward}.linear_fc2", f"{of_mlp}.2", "D", "F", split=_ROW),
        ]
    return tuple(rows)


def single_stream_rows(ours: str, theirs: str) -> tuple[Row, ...]:
    """Of single-stream layers, which begin with `ours` and `theirs`."""
    made = (*(f"{theirs}.attn.to_{letter}" for letter in "qkv"), f"{theirs}.proj_mlp")
    whole: Any = {"split": _COLUMN}
    return (
        *linear_rows(f"{ours}.modulation.linear", f"{theirs}.norm.linear", "3D", "D", **whole),
        *norm_rows(f"{ours}.attention", f"{theirs}.attn", ("norm_q", "norm_k")),
        *linear_rows(f"{ours}.linear_in", made, "3D+F", "D", arrangement=BY_HEAD, **whole),
        *linear_rows(
            f"{ours}.linear_out",
            f"{theirs}.proj_out",
            *("D", "D+F"),
            split=_ROW,
            arrangement=HeadColumns(),
        ),
    )


HEAD_ROWS: tuple[Row, ...] = (
    *linear_rows(
        "modulate_out.linear",
        "norm_out.linear",
        *("2D", "D"),
        split=_COLUMN,
        arrangement=SwappedHalves(),
    ),
    *linear_rows("proj_out", "proj_out", "C", "D"),
)
"""Of what follows the layers."""


def stream_sizes(model: ModelConfig) -> dict[str, int]:
    """The numbers of the letters of all these lines, but C."""
    width, hidden = model.hidden_size, model.ffn_hidden_size
    return {
        "D": width,
        "2D": 2 * width,
        "3D": 3 * width,
        "6D": 6 * width,
        "F": hidden,
        "3D+F": 3 * width + hidden,
        "D+F": width + hidden,
        "K": width // model.num_attention_heads,
    }
