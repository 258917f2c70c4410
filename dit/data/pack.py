"""Samples -> packs.

1. full_with_first, best_fit_decreasing    which samples share a pack (integers)
2. turn                                    which pack is next, so that ranks have equal cost
3. pack_samples, PackWriter                samples -> PackedBatch: patches, positions, padding
"""

# C latent channels, or patch features C * pt * ph * pw once patched; T packed tokens; L text tokens
# N samples in a pack; E text width; F H W frames, rows, columns, of the latent or in patches

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import gcd
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from dit.batch import LatentSample, PackedBatch
from dit.config import RunConfig
from dit.models.family import family_of
from dit.models.positions import PositionRule
from dit.pack_wire import private_bytes, views_of, widest_first

# Only the oldest samples of a longer buffer are tried: 256 fill packs as well as 4096 do, and four
# times as fast.
_CANDIDATES = 256
# Packs that differ by less than capacity / 100 count as equally full; with more candidates,
# by less than capacity / candidates. If the fullest were always taken, samples that leave odd gaps
# would stay behind until the stream ends: 5% more packs for 430 nasty samples.
_AS_FULL = 100
_FIRST_WAITING = 8  # packs in waiting at the first turn; more of them would delay it


def full_with_first(lengths: Sequence[int], *, capacity: int) -> list[int]:
    """A pack of at most `capacity` with sample 0, which has waited longest, as full as possible.

    All other samples wait for the next pack, and newcomers replace those that were taken. With a
    buffer of 64 samples this fills packs better than best-fit decreasing does with 4096, and no
    sample waits for ever. Among packs that are equally full, within 1%, the one with the longest
    samples is taken, because short ones fill gaps later. Indices ascend.

    Raises:
        ValueError: a length is not in [1, capacity].
    """
    _check(lengths, capacity)
    unit = gcd(*lengths)
    candidates = range(1, min(len(lengths), _CANDIDATES))
    order = sorted(candidates, key=lambda i: (lengths[i], -i))
    room = (capacity - lengths[0]) // unit
    # Bit n of sums[k] is set if some of the k shortest candidates add up to n units.
    sums, within = [1], (1 << room + 1) - 1
    for index in order:
        sums.append(sums[-1] | sums[-1] << lengths[index] // unit & within)
    empty = max(room + 1 - sums[-1].bit_length(), capacity // max(_AS_FULL, len(order)) // unit)
    chosen = [0]
    for index, shorter in zip(reversed(order), reversed(sums[:-1]), strict=True):
        without = room - lengths[index] // unit
        # Taken if shorter ones can fill the rest, up to the room that may stay empty.
        if without >= 0 and shorter >> max(without - empty, 0) & (1 << min(without, empty) + 1) - 1:
            room = without
            chosen.append(index)
    return sorted(chosen)


def best_fit_decreasing(lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Partition of range(len(lengths)) into bins of at most `capacity`.

    The longest goes first, each into the bin where it leaves the least room; of equal lengths the
    earlier one goes first. Members ascend within a bin, and bins by their first member, so that the
    order of training does not follow the lengths.

    Raises:
        ValueError: a length is not in [1, capacity].
    """
    _check(lengths, capacity)
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, bin), ascending
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        tightest = bisect_left(room, (lengths[index], -1))
        if tightest < len(room):
            left, chosen = room.pop(tightest)
        else:
            left, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(index)
        insort(room, (left - lengths[index], chosen))
    return sorted(sorted(members) for members in bins)


def _check(lengths: Sequence[int], capacity: int) -> None:
    for index, length in enumerate(lengths):
        if not 1 <= length <= capacity:
            raise ValueError(f"lengths[{index}]={length} must lie in [1, {capacity}]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Which pack a rank takes at one turn."""

    waiting: int
    """Packs to choose from: one more each turn, up to `packs`."""
    place: int
    """Place of the chosen pack in the order of cost, from the cheapest."""


def turn(number: int, *, packs: int, seed: int) -> Turn:
    """Turn `number` of any rank: in `packs` turns each place comes once, in random order.

    A step takes as long as its slowest rank. Ranks read different samples and do not communicate
    while they do, but the distribution of their packs is the same. So each keeps some packs in
    waiting, and all take at their n-th turn the one at the same place in the order of cost.
    """
    cycle, within = divmod(number, packs)
    order = np.random.default_rng((seed, cycle)).permutation(packs)
    waiting = min(packs, _FIRST_WAITING + number)
    return Turn(waiting=waiting, place=int(order[within]) * waiting // packs)


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
        """Tokens of the sample in a pack, with its padding."""
        return self.padded(math.prod(self.grid(latent_CFHW)))

    def padded(self, tokens: int) -> int:
        """The next multiple of `sample_multiple`."""
        return -(-tokens // self.sample_multiple) * self.sample_multiple


def pack_samples(samples: Sequence[LatentSample], layout: PatchLayout) -> PackedBatch:
    """Lays `samples` end to end. Padding tokens are zero, at position 0, and not real."""
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
    """Size of the matrix for the latents or the captions of a pack."""

    rows: int
    width: int
    dtype: torch.dtype


class PackWriter:
    """Writes a pack, sample by sample, so that the memory of each sample is free after its copy.

    All tensors lie in one row of bytes from the start, as they do on the way to other processes.
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
        """A pack of at most `samples` samples; `memory(n)` gives n bytes."""
        self._layout = layout
        sizes = {
            "latent_TC": (latent.dtype, latent.rows, latent.width),
            "position_T3": (torch.float32, latent.rows, 3),
            "segment_T": (torch.int64, latent.rows),
            "is_real_T": (torch.bool, latent.rows),
            "text_LE": (text.dtype, text.rows, text.width),
            "fps_N": (torch.float32, samples),
        }
        outlines = widest_first(
            {n: torch.empty(size, dtype=d, device="meta") for n, (d, *size) in sizes.items()}
        )
        self._tensors = views_of(memory(sum(t.nbytes for t in outlines.values())), outlines)
        self._added: list[_Added] = []
        self._start = self._text_start = 0

    def add(self, sample: LatentSample) -> None:
        """Writes the sample after those that are there."""
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
        """The pack, without the memory that was not used."""
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
    """What a pack keeps of a sample beside its tensors."""

    key: str
    caption: str
    fps: float
    grid: tuple[int, int, int]
    padded: int
    """Tokens of the latent, with padding."""
    text: int
    """Tokens of the caption."""


def pack_identity(keys: tuple[str, ...]) -> int:
    """Order-sensitive 63-bit hash of the sample keys of a pack, the same on every machine."""
    digest = hashlib.blake2b("\0".join(keys).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@lru_cache(
    maxsize=32
)  # most datasets have few sizes, and for small ones this takes longer than a copy
def _span(
    grid: tuple[int, int, int], padded: int, fps: float, positions: PositionRule
) -> tuple[Tensor, Tensor]:
    """Positions of the tokens of a sample, with padding, and which of them are real."""
    position_T3 = positions(grid, fps=fps)
    padding = padded - len(position_T3)
    return pad(position_T3, (0, 0, 0, padding)), torch.arange(padded) < len(position_T3)


def _write_patches(
    out_TC: Tensor, latent_CFHW: Tensor, grid: tuple[int, int, int], patch: tuple[int, int, int]
) -> None:
    """Tokens are in the order (frame, row, column), features of a token in (c, t, h, w)."""
    (f, h, w), (pt, ph, pw) = grid, patch
    latent_CFHW = latent_CFHW.to(out_TC.dtype)
    if pw == 2:  # the two neighbours in a row move as one number, 8 times as fast
        pair = torch.int32 if out_TC.dtype == torch.bfloat16 else torch.int64
        latent_CFHW, out_TC, pw = latent_CFHW.view(pair), out_TC.view(pair), 1
    split = latent_CFHW.view(-1, f, pt, h, ph, w, pw)
    out_TC.view(f, h, w, -1, pt, ph, pw).copy_(split.permute(1, 3, 5, 0, 2, 4, 6))
