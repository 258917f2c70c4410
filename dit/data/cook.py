"""Shard record -> LatentSample, or the reason why not.

1. measure_sample    the head of a record -> its size in a pack; decodes no tensor
2. cook              a whole record -> LatentSample, when it is chosen for a pack
"""

# C latent channels; F H W frames, rows, columns of the latent; L text tokens; E text width

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dit.batch import LatentSample
from dit.config import RunConfig
from dit.data.pack import PatchLayout
from dit.data.records import Head, head_length, is_dfm, read_outline, read_record
from dit.data.rejections import Reject, SampleRefused


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What a sample must be to fit the model and the pack."""

    layout: PatchLayout
    channels: int
    text_width: int
    capacity: int
    """Tokens of one pack."""
    table: tuple[int, int, int] | None
    """Latent frames, rows and columns that learnable positions cover; None for no such table."""

    @property
    def pack_bytes(self) -> int:
        """Enough bytes for a pack, unless its captions have twice as many tokens as its latents."""
        features = self.channels * math.prod(self.layout.patch)
        return self.capacity * (4 * features + 8 * self.text_width + 64)

    @classmethod
    def of(cls, config: RunConfig) -> Expected:
        return cls(
            layout=PatchLayout.of(config),
            channels=config.model.in_channels,
            text_width=config.model.crossattn_emb_size,
            capacity=config.dataset.task_encoder_seq_length,
            table=config.model.largest_latent,
        )


_INFINITY = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00}  # as bits; NaN has larger ones
_FEW = 2**13  # numbers; for fewer, a sum is faster than integer views
SMALL = 8192
"""Bytes of a sample that is decoded when it is read: for so few, that is faster than two reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleSize:
    """What packing needs to know of a sample."""

    tokens: int
    """Tokens in a pack, padding included."""
    shape: tuple[int, int]
    """Tokens of the latent without padding, and of the caption."""
    dtypes: tuple[torch.dtype, torch.dtype]
    """Types of the latent and of the caption."""

    @classmethod
    def of(cls, latent_CFHW: Tensor, text_LE: Tensor, layout: PatchLayout) -> SampleSize:
        tokens = math.prod(layout.grid(latent_CFHW))
        return cls(
            tokens=layout.padded(tokens),
            shape=(tokens, len(text_LE)),
            dtypes=(latent_CFHW.dtype, text_LE.dtype),
        )


def measure_sample(parts: Mapping[str, Any], expected: Expected) -> SampleSize | None:
    """The size of a sample from its record, whose `.safetensors` may be whole or a Head.

    None where the whole record must be read: it is at hand and small, it has DFM's layout, or
    something is wrong with it. A damaged head can say anything, so `cook` finds the reason.
    """
    payload = parts.get("safetensors")
    if payload is None or is_dfm(parts):
        return None
    if not isinstance(payload, Head):
        if len(payload) <= SMALL:
            return None
        payload = Head(data=payload[: head_length(payload)], size=len(payload))
    try:
        outline = read_outline({**parts, "safetensors": payload})
        check_latent(outline.latent_CFHW, expected)
        text_LE = _checked_text(outline.text_LE, expected)
    except SampleRefused:
        return None
    return SampleSize.of(outline.latent_CFHW, text_LE, expected.layout)


def cook(
    parts: Mapping[str, Any], expected: Expected, *, key: str, source: str = ""
) -> LatentSample:
    """LatentSample from the parts (extension -> bytes) of one record.

    Raises:
        SampleRefused: the record is damaged, or the sample does not fit the model or the pack.
    """
    record = read_record(parts)
    check_latent(record.latent_CFHW, expected)
    text_LE = _checked_text(record.text_LE, expected)
    # Last, because only this looks at every number.
    if not _all_finite(record.latent_CFHW):
        raise SampleRefused(Reject.NOT_FINITE, _count_bad(record.latent_CFHW))
    if not _all_finite(text_LE):
        raise SampleRefused(Reject.TEXT_NOT_FINITE, _count_bad(text_LE))
    return LatentSample(
        key=key,
        latent_CFHW=record.latent_CFHW.contiguous(),
        text_LE=text_LE,
        fps=record.fps,
        caption=record.caption,
        source=source,
    )


def check_latent(latent_CFHW: Tensor, expected: Expected) -> None:
    """Checks the shape of a latent.

    Raises:
        SampleRefused: it does not fit the model or the pack.
    """
    channels, *size = latent_CFHW.shape
    shape, layout = list(latent_CFHW.shape), expected.layout
    if channels != expected.channels:
        raise SampleRefused(
            Reject.CHANNELS,
            f"latent {shape} has {channels} channels, model.in_channels={expected.channels}",
        )
    if any(length % patch for length, patch in zip(size, layout.patch, strict=True)):
        raise SampleRefused(
            Reject.NOT_PATCHABLE,
            f"latent {shape} does not divide by model.patch_temporal={layout.patch_temporal}"
            f" and model.patch_spatial={layout.patch_spatial}",
        )
    tokens = layout.padded_tokens(latent_CFHW)
    if tokens > expected.capacity:
        raise SampleRefused(
            Reject.TOO_LONG,
            f"latent {shape} takes {tokens} tokens,"
            f" dataset.task_encoder_seq_length={expected.capacity}",
        )
    table = expected.table
    if table is not None and any(a > b for a, b in zip(size, table, strict=True)):
        raise SampleRefused(Reject.BEYOND_TABLE, f"latent {shape} exceeds model.max_size={table}")


def _checked_text(text_LE: Tensor | None, expected: Expected) -> Tensor:
    if text_LE is None or len(text_LE) == 0:
        raise SampleRefused(
            Reject.NO_TEXT, "no `text`" if text_LE is None else "`text` has 0 tokens"
        )
    if text_LE.shape[1] != expected.text_width:
        raise SampleRefused(
            Reject.TEXT_WIDTH,
            f"text {list(text_LE.shape)} has width {text_LE.shape[1]},"
            f" model.crossattn_emb_size={expected.text_width}",
        )
    # bfloat16 stays as stored; all other types become float32.
    return text_LE if text_LE.dtype == torch.bfloat16 else text_LE.float()


def _all_finite(values: Tensor) -> bool:
    infinity = _INFINITY.get(values.dtype)
    if infinity is None or values.numel() < _FEW:
        # A sum is faster than isfinite(): finite if all numbers are, unless it overflows.
        total = values.sum(dtype=torch.float32).item()
        return math.isfinite(total) or bool(values.isfinite().all())
    # For these types a sum would make a float32 copy. With their bits as integers, infinity and
    # NaN are the largest numbers: the positive ones as int16, the negative ones as uint16.
    bits = values.view(torch.int16).numpy()
    return bits.max() < infinity and bits.view(np.uint16).max() < infinity + 0x8000


def _count_bad(values: Tensor) -> str:
    return f"{int((~values.isfinite()).sum())} of {values.numel()} numbers"
