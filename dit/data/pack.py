"""Group of LatentSamples -> PackedBatch: patches, positions, padding, captions."""

# C latent channels, or patch features C * pt * ph * pw once patched; T packed tokens; L text tokens
# N samples in a pack; E text width; F H W frames, rows, columns, of the latent or in patches

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dit.batch import LatentSample, PackedBatch, pack_identity, views_of, wider_first
from dit.config import RunConfig
from dit.models.family import family_of
from dit.models.positions import PositionRule


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchLayout:
    """How a latent becomes tokens."""

    patch_temporal: int
    patch_spatial: int
    sample_multiple: int
    """Each sample is padded to a multiple of this many tokens."""
    positions: PositionRule
    """Where the tokens of a sample stand, as its network's family has it."""

    @classmethod
    def of(cls, config: RunConfig) -> PatchLayout:
        return cls(
            patch_temporal=config.model.patch_temporal,
            patch_spatial=config.model.patch_spatial,
            sample_multiple=config.dataset.sample_multiple,
            positions=family_of(config.model).positions(config.model),
        )

    @property
    def patch(self) -> tuple[int, int, int]:
        """Latent frames, rows and columns of one token."""
        return self.patch_temporal, self.patch_spatial, self.patch_spatial

    def grid(self, latent_CFHW: Tensor) -> tuple[int, int, int]:
        """Patches along frames, rows and columns; exact only where the latent divides."""
        frames, rows, columns = latent_CFHW.shape[1:]
        return (
            frames // self.patch_temporal,
            rows // self.patch_spatial,
            columns // self.patch_spatial,
        )

    def padded_tokens(self, latent_CFHW: Tensor) -> int:
        """Tokens the sample takes in a pack, its padding among them."""
        return self.padded(math.prod(self.grid(latent_CFHW)))

    def padded(self, tokens: int) -> int:
        """The next multiple of `sample_multiple`."""
        return -(-tokens // self.sample_multiple) * self.sample_multiple


def pack_samples(samples: Sequence[LatentSample], layout: PatchLayout) -> PackedBatch:
    """Lays `samples` end to end; padding tokens are zero, at position 0, and not real."""
    latents, texts = [s.latent_CFHW for s in samples], [s.text_LE for s in samples]
    writer = PackWriter(
        layout,
        samples=len(samples),
        latent=Extent(
            rows=sum(map(layout.padded_tokens, latents)),
            width=len(latents[0]) * math.prod(layout.patch),
            dtype=common_dtype(latent.dtype for latent in latents),
        ),
        text=Extent(
            rows=sum(map(len, texts)),
            width=texts[0].shape[1],
            dtype=common_dtype(text.dtype for text in texts),
        ),
    )
    for sample in samples:
        writer.add(sample)
    return writer.finish()


def common_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """bfloat16 if all are stored so, else float32."""
    return torch.bfloat16 if set(dtypes) == {torch.bfloat16} else torch.float32


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """Of a pack, for the latents or the captions of its samples: a matrix."""

    rows: int
    width: int
    dtype: torch.dtype


def private_bytes(size: int) -> Tensor:
    """[size] uint8 in memory of this process."""
    return torch.empty(size, dtype=torch.uint8)


class PackWriter:
    """A pack in the making: a sample is copied when it is added, and its memory is free then.

    All lies in one row of bytes from the start, as it does on its way to other processes.
    """

    def __init__(
        self,
        layout: PatchLayout,
        *,
        samples: int,
        latent: Extent,
        text: Extent,
        memory: Callable[[int], Tensor] = private_bytes,
    ):
        """Room for at most so many samples; `memory` gives bytes."""
        self._layout = layout
        sizes = {
            "latent_TC": (latent.dtype, latent.rows, latent.width),
            "position_T3": (torch.float32, latent.rows, 3),
            "segment_T": (torch.int64, latent.rows),
            "is_real_T": (torch.bool, latent.rows),
            "text_LE": (text.dtype, text.rows, text.width),
            "fps_N": (torch.float32, samples),
        }
        outlines = wider_first(
            {n: torch.empty(size, dtype=d, device="meta") for n, (d, *size) in sizes.items()}
        )
        self._tensors = views_of(memory(sum(t.nbytes for t in outlines.values())), outlines)
        self._added: list[_Added] = []
        self._start = self._text_start = 0

    def add(self, sample: LatentSample) -> None:
        """Writes the sample behind those that are there."""
        layout, latent_TC = self._layout, self._tensors["latent_TC"]
        grid = layout.grid(sample.latent_CFHW)
        padded = layout.padded(math.prod(grid))
        stop, text_stop = self._start + padded, self._text_start + len(sample.text_LE)
        first_padding = self._start + math.prod(grid)
        own_TC = latent_TC[self._start : first_padding]
        _write_patches(own_TC, sample.latent_CFHW, grid, layout.patch)
        if first_padding < stop:
            latent_TC[first_padding:stop] = 0
        self._tensors["text_LE"][self._text_start : text_stop] = sample.text_LE
        self._start, self._text_start = stop, text_stop
        self._added.append(
            _Added(
                key=sample.key,
                caption=sample.caption,
                fps=sample.fps,
                grid=grid,
                padded=padded,
                text=len(sample.text_LE),
            )
        )

    def finish(self) -> PackedBatch:
        """The pack, without the room that was not used."""
        added, rows = self._added, {"text_LE": self._text_start, "fps_N": len(self._added)}
        tensors: Any = {n: t[: rows.get(n, self._start)] for n, t in self._tensors.items()}
        spans = [_span(a.grid, a.padded, a.fps, self._layout.positions) for a in added]
        padded, keys = [a.padded for a in added], tuple(a.key for a in added)
        torch.cat([position for position, _ in spans], out=tensors["position_T3"])
        torch.cat([is_real for _, is_real in spans], out=tensors["is_real_T"])
        owners = torch.arange(len(added))
        tensors["segment_T"].copy_(owners.repeat_interleave(torch.tensor(padded)))
        tensors["fps_N"].copy_(torch.tensor([a.fps for a in added], dtype=torch.float32))
        return PackedBatch(
            **tensors,
            grids=tuple(a.grid for a in added),
            starts=tuple(accumulate(padded, initial=0)),
            text_starts=tuple(accumulate((a.text for a in added), initial=0)),
            keys=keys,
            captions=tuple(a.caption for a in added),
            pack_id=pack_identity(keys),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Added:
    """What a pack says of a sample."""

    key: str
    caption: str
    fps: float
    grid: tuple[int, int, int]
    padded: int
    """Tokens, with padding."""
    text: int
    """Tokens of its caption."""


@lru_cache(maxsize=32)  # most datasets have few sizes, and small ones take longer than to copy
def _span(
    grid: tuple[int, int, int], padded: int, fps: float, positions: PositionRule
) -> tuple[Tensor, Tensor]:
    """Positions of the tokens of a sample, padding included, and which of them are real."""
    position_T3 = positions(grid, fps=fps)
    padding = padded - len(position_T3)
    return pad(position_T3, (0, 0, 0, padding)), torch.arange(padded) < len(position_T3)


def _write_patches(
    out_TC: Tensor, latent_CFHW: Tensor, grid: tuple[int, int, int], patch: tuple[int, int, int]
) -> None:
    """Tokens in order (frame, row, column), features of a token in order (c, t, h, w)."""
    (f, h, w), (pt, ph, pw) = grid, patch
    latent_CFHW = latent_CFHW.to(out_TC.dtype)
    if pw == 2:  # the two neighbours in a row move as one number, 8 times as fast
        pair = torch.int32 if out_TC.dtype == torch.bfloat16 else torch.int64
        latent_CFHW, out_TC, pw = latent_CFHW.view(pair), out_TC.view(pair), 1
    split = latent_CFHW.view(-1, f, pt, h, ph, w, pw)
    out_TC.view(f, h, w, -1, pt, ph, pw).copy_(split.permute(1, 3, 5, 0, 2, 4, 6))
