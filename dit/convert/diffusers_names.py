"""Which tensor of Diffusers' `CosmosTransformer3DModel` is which of ours, and how they differ.

`TABLE` says it once. Importing reads it from right to left, exporting from left to right, and the
registration with Megatron-Bridge makes its mappings of it. `pairs` spells it out for one model.
"""

# D model width, R rank of a modulation, F width of the MLP, E width of the text that layers see,
# I width of the text in the shards, K head width, C numbers in a token of the latent (P with the
# padding mask), frames rows columns: learnable positions

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from dit.config import ExtraPosition, ModelConfig


class TensorKind(StrEnum):
    """How a tensor of ours is made of those of Diffusers, and what tensor ranks share of it."""

    REPLICATED = "replicated"  # the same; each rank has all of it
    COLUMN = "column"  # the same; ranks share its outputs
    ROW = "row"  # the same; ranks share its inputs
    QKV = "qkv"  # three laid together head by head; ranks share the heads
    KV = "kv"  # two
    PATCH = "patch"  # outputs in order (c, t, h, w), with Diffusers (h, w, t, c)


Shape = tuple[str, ...]
Condition = Callable[[ModelConfig], bool]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; `*` stands for the number of a layer, from 0."""

    ours: str
    theirs: tuple[str, ...]
    kind: TensorKind
    shape: Shape  # of ours, in the letters of the legend
    exists: Condition = lambda _: True


def _positions(model: ModelConfig) -> bool:
    return model.extra_pos_embed is ExtraPosition.LEARNABLE


def _projection(model: ModelConfig) -> bool:
    return model.crossattn_proj_size is not None


def _modulation(ours: str, theirs: str, parts: str) -> tuple[Row, ...]:
    return (
        Row(
            f"{ours}.linear_1.weight",
            (f"{theirs}.linear_1.weight",),
            TensorKind.REPLICATED,
            ("R", "D"),
        ),
        Row(
            f"{ours}.linear_2.weight",
            (f"{theirs}.linear_2.weight",),
            TensorKind.REPLICATED,
            (parts, "R"),
        ),
    )


def _attention(ours: str, theirs: str) -> tuple[Row, ...]:
    return (
        Row(
            f"{ours}.linear_proj.weight", (f"{theirs}.to_out.0.weight",), TensorKind.ROW, ("D", "D")
        ),
        Row(
            f"{ours}.q_layernorm.weight",
            (f"{theirs}.norm_q.weight",),
            TensorKind.REPLICATED,
            ("K",),
        ),
        Row(
            f"{ours}.k_layernorm.weight",
            (f"{theirs}.norm_k.weight",),
            TensorKind.REPLICATED,
            ("K",),
        ),
    )


def _letters(theirs: str, letters: str) -> tuple[str, ...]:
    return tuple(f"{theirs}.to_{letter}.weight" for letter in letters)


LAYER, BLOCK = "decoder.layers.*", "transformer_blocks.*"
SELF, CROSS = f"{LAYER}.self_attention", f"{LAYER}.cross_attention"
LEVEL, TIME = "level", "time_embed"

TABLE: tuple[Row, ...] = (
    Row("patches.weight", ("patch_embed.proj.weight",), TensorKind.REPLICATED, ("D", "P")),
    Row(
        f"{LEVEL}.linear_1.weight",
        (f"{TIME}.t_embedder.linear_1.weight",),
        TensorKind.REPLICATED,
        ("D", "D"),
    ),
    Row(
        f"{LEVEL}.linear_2.weight",
        (f"{TIME}.t_embedder.linear_2.weight",),
        TensorKind.REPLICATED,
        ("3D", "D"),
    ),
    Row(f"{LEVEL}.norm.weight", (f"{TIME}.norm.weight",), TensorKind.REPLICATED, ("D",)),
    *(
        Row(
            f"positions.pos_emb_{axis}",
            (f"learnable_pos_embed.pos_emb_{axis}",),
            TensorKind.REPLICATED,
            (size, "D"),
            _positions,
        )
        for axis, size in (("t", "frames"), ("h", "rows"), ("w", "columns"))
    ),
    Row(
        "text_proj.weight",
        ("crossattn_proj.0.weight",),
        TensorKind.REPLICATED,
        ("E", "I"),
        _projection,
    ),
    Row("text_proj.bias", ("crossattn_proj.0.bias",), TensorKind.REPLICATED, ("E",), _projection),
    *_modulation(f"{LAYER}.modulate_self", f"{BLOCK}.norm1", "3D"),
    Row(
        f"{SELF}.linear_qkv.weight", _letters(f"{BLOCK}.attn1", "qkv"), TensorKind.QKV, ("3D", "D")
    ),
    *_attention(SELF, f"{BLOCK}.attn1"),
    *_modulation(f"{LAYER}.modulate_cross", f"{BLOCK}.norm2", "3D"),
    Row(f"{CROSS}.linear_q.weight", _letters(f"{BLOCK}.attn2", "q"), TensorKind.COLUMN, ("D", "D")),
    Row(f"{CROSS}.linear_kv.weight", _letters(f"{BLOCK}.attn2", "kv"), TensorKind.KV, ("2D", "E")),
    *_attention(CROSS, f"{BLOCK}.attn2"),
    *_modulation(f"{LAYER}.modulate_mlp", f"{BLOCK}.norm3", "3D"),
    Row(
        f"{LAYER}.mlp.linear_fc1.weight",
        (f"{BLOCK}.ff.net.0.proj.weight",),
        TensorKind.COLUMN,
        ("F", "D"),
    ),
    Row(
        f"{LAYER}.mlp.linear_fc2.weight", (f"{BLOCK}.ff.net.2.weight",), TensorKind.ROW, ("D", "F")
    ),
    *_modulation("modulate_out", "norm_out", "2D"),
    Row("proj_out.weight", ("proj_out.weight",), TensorKind.PATCH, ("C", "D")),
)


def _sizes(model: ModelConfig) -> dict[str, int]:
    width, volume = model.hidden_size, model.patch_temporal * model.patch_spatial**2
    frames, rows, columns = model.max_size
    return {
        "D": width,
        "2D": 2 * width,
        "3D": 3 * width,
        "R": model.adaln_lora_dim,
        "F": model.ffn_hidden_size,
        "E": model.text_width,
        "I": model.crossattn_emb_size,
        "K": width // model.num_attention_heads,
        "C": model.patch_features,
        "P": model.patch_features + (volume if model.concat_padding_mask else 0),
        "frames": frames // model.patch_temporal,
        "rows": rows // model.patch_spatial,
        "columns": columns // model.patch_spatial,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """One tensor of ours, and those of Diffusers that hold the same numbers."""

    ours: str  # as Megatron-Core stores it: the layers of one name together
    layer: int | None  # which of them
    theirs: tuple[str, ...]
    kind: TensorKind
    shape: tuple[int, ...]  # of ours
    model: ModelConfig

    @property
    def their_shape(self) -> tuple[int, ...]:
        """Shape of each of theirs."""
        return (self.shape[0] // len(self.theirs), *self.shape[1:])

    def join(self, parts: list[Tensor]) -> Tensor:
        """Ours, of theirs."""
        m = self.model
        match self.kind:
            case TensorKind.QKV | TensorKind.KV:
                heads = [part.unflatten(0, (m.num_attention_heads, -1)) for part in parts]
                return torch.stack(heads, dim=1).flatten(0, 2)
            case TensorKind.PATCH:
                s, t = m.patch_spatial, m.patch_temporal
                split = parts[0].unflatten(0, (s, s, t, -1))
                return split.permute(3, 2, 0, 1, 4).flatten(0, 3)
            case _:
                return parts[0]

    def split(self, whole: Tensor) -> list[Tensor]:
        """Theirs, of ours: the inverse of `join`."""
        m = self.model
        match self.kind:
            case TensorKind.QKV | TensorKind.KV:
                heads = whole.unflatten(0, (m.num_attention_heads, len(self.theirs), -1))
                return [part.flatten(0, 1) for part in heads.unbind(1)]
            case TensorKind.PATCH:
                s, t = m.patch_spatial, m.patch_temporal
                split = whole.unflatten(0, (-1, t, s, s))
                return [split.permute(2, 3, 1, 0, 4).flatten(0, 3)]
            case _:
                return [whole]


def pairs(model: ModelConfig) -> list[Pair]:
    """The table for one model, layer after layer: each tensor of both sides exactly once."""
    sizes, outside, layered = _sizes(model), [], []
    for row in TABLE:
        if row.exists(model):
            (layered if "*" in row.ours else outside).append(row)

    def pair(row: Row, layer: int | None) -> Pair:
        return Pair(
            ours=row.ours.replace(".*", ""),
            layer=layer,
            theirs=tuple(name.replace("*", str(layer)) for name in row.theirs),
            kind=row.kind,
            shape=tuple(sizes[letter] for letter in row.shape),
            model=model,
        )

    return [
        *(pair(row, None) for row in outside),
        *(pair(row, layer) for layer in range(model.num_layers) for row in layered),
    ]
