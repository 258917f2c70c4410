"""Names of the weights of `sound_dit` in files; Diffusers has no such network.

Adapter files, Muon and `optimizer.groups` handle queries, keys and values separately, although our
network fuses them in one linear. So each of them has a name in this table.
"""

# of latents, of sound: D, A widths; F, G hidden widths of MLPs; K, J head widths; M, N numbers of
# modulations; C, B numbers in a token
# E text width, W width of the sinusoidal timestep embedding

from __future__ import annotations

from typing import Any, NamedTuple

from dit.models.diffusers.arrangements import ByHead, ByOwnHead
from dit.models.diffusers.names import NameTable, Row, TensorSplit, linear_rows, without_biases
from dit.models.layer_spec import LEVEL_WAVES
from dit.models.sound_dit.family import SoundDitConfig

_LAYER, _BLOCK = "decoder.layers.*", "blocks.*"
_BY_HEAD = {"D": ByHead(), "A": ByOwnHead(heads="sound_attention_heads", width="sound_hidden_size")}
_HEAD = {"D": "K", "A": "J"}


class _StreamWeights(NamedTuple):
    """Names of a stream's weights, and letters for the stream's sizes."""

    prefix: str
    """Prefix of most names."""
    first: str
    """Name of the linear that embeds the stream's tokens."""
    width: str
    """Letter for the width of the stream."""
    hidden: str
    """Letter for the hidden width of the MLP."""
    modulation: str
    """Letter for the number of outputs of the modulation."""
    numbers: str
    """Letter for the number of features of a token."""


_STREAMS = (
    _StreamWeights("", "patches", "D", "F", "M", "C"),
    _StreamWeights("sound_", "sound_in", "A", "G", "N", "B"),
)


def _attention(ours: str, theirs: str, widths: tuple[str, str, str], **exists: Any) -> list[Row]:
    """Lines of the name table for an attention of the layers and its norms.

    `widths` are letters for the width of the queries' tokens, the width of the keys' tokens, and
    the width of all heads together.
    """
    width, keys, inner = widths
    ours, theirs = f"{_LAYER}.{ours}", f"{_BLOCK}.{theirs}"
    column: Any = {"split": TensorSplit.COLUMN, **exists}
    fused: Any = {**column, "arrangement": _BY_HEAD[inner]}
    q, *kv = names = [f"{theirs}.to_{letter}" for letter in "qkv"]
    if "self_" in ours:
        linears = linear_rows(f"{ours}.linear_qkv", tuple(names), f"3{inner}", width, **fused)
    else:
        linears = (
            *linear_rows(f"{ours}.linear_q", q, inner, width, **column),
            *linear_rows(f"{ours}.linear_kv", tuple(kv), f"2{inner}", keys, **fused),
        )
    norms = (
        Row(
            f"{ours}.{letter}_layernorm.weight",
            (f"{theirs}.norm_{letter}.weight",),
            TensorSplit.REPLICATED,
            (_HEAD[inner],),
            **exists,
        )
        for letter in "qk"
    )
    row: Any = {"split": TensorSplit.ROW, **exists}
    last = linear_rows(f"{ours}.linear_proj", f"{theirs}.to_out", width, inner, **row)
    return [*without_biases([*linears, *last]), *norms]


def _of_stream(one: _StreamWeights) -> list[Row]:
    """Lines of the name table for one stream: attention, MLP, modulations, embedding and head."""
    prefix, width = one.prefix, one.width
    mlp, modulation, out = (f"{prefix}{part}" for part in ("mlp", "modulation", "modulate_out"))
    of_layer = f"{_LAYER}.{modulation}.linear", f"{_BLOCK}.{modulation}.linear"
    own = (width, width, width)
    up = (f"{_LAYER}.{mlp}.linear_fc1", f"{_BLOCK}.{mlp}.0", one.hidden, width)
    down = (f"{_LAYER}.{mlp}.linear_fc2", f"{_BLOCK}.{mlp}.2", width, one.hidden)
    plain = (
        *linear_rows(one.first, one.first, width, one.numbers),
        *linear_rows(*up, split=TensorSplit.COLUMN),
        *linear_rows(*down, split=TensorSplit.ROW),
        *linear_rows(f"{prefix}proj_out", f"{prefix}proj_out", one.numbers, width),
    )
    return [
        *without_biases(plain),
        *_attention(f"{prefix}self_attention", f"{prefix}attention", own),
        *_attention(f"{prefix}cross_attention", f"{prefix}cross_attention", (width, "E", width)),
        *linear_rows(*of_layer, one.modulation, "D"),
        *linear_rows(f"{out}.linear", f"{out}.linear", f"2{width}", "D"),
    ]


def _meet(model: SoundDitConfig) -> bool:
    return model.streams_meet


def _sizes(model: SoundDitConfig) -> dict[str, int]:
    width, sound = model.hidden_size, model.sound_hidden_size
    parts = 12 if model.streams_meet else 9  # shift, scale and gate of each step
    return {
        **{
            f"{n or ''}{name}": (n or 1) * s
            for n in (0, 2, 3)
            for name, s in (("D", width), ("A", sound))
        },
        **{"F": model.ffn_hidden_size, "G": int(sound * model.mlp_ratio)},
        **{"K": width // model.num_attention_heads, "J": sound // model.sound_attention_heads},
        **{"M": parts * width, "N": parts * sound},
        **{"C": model.patch_features, "B": model.sound_channels},
        "E": model.crossattn_emb_size,
        "W": LEVEL_WAVES,
    }


TABLE = NameTable(
    rows=(
        *linear_rows("level.level.linear_1", "level.linear_1", "D", "W"),
        *linear_rows("level.level.linear_2", "level.linear_2", "D", "D"),
        *(row for one in _STREAMS for row in _of_stream(one)),
        *_attention("from_sound", "from_sound_attention", ("D", "A", "A"), exists=_meet),
        *_attention("from_video", "from_video_attention", ("A", "D", "A"), exists=_meet),
    ),
    sizes=_sizes,
    layers=lambda model: {"decoder": model.num_layers},
)
"""The name table of the network."""
