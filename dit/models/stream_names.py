"""Names in Diffusers of the layers with joint attention, which several families share."""

# D model width, F width of the MLP, K head width

from __future__ import annotations

from typing import Any

from dit.models.diffusers_names import ByHead, RotaryPairs, Row, TensorSplit, linear_rows

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
