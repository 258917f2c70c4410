"""The three values that cross folder borders.

A `LatentSample` is what a shard holds; a `PackedBatch` is what the loader hands to the step; a
`Problem` is what an objective asks of the network. All are frozen: nobody edits another's value.
"""

# C latent channels, or patch features C * pt * ph * pw once patched; T packed tokens; L text tokens
# N samples in a pack; E text width; D model width; F H W frames, rows and columns of a latent

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentSample:
    """One encoded image or video with its caption, as a shard holds it."""

    key: str  # unique in its dataset; part of the pack identity
    latent_CFHW: Tensor  # float, whitened to unit variance per channel
    text_LE: Tensor  # float, true length, at least one token
    fps: float  # frames per second of the latent's pixels; NaN for an image or unknown
    caption: str = ""
    source: str = ""  # name of the dataset in a blend


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceShard:
    """Which tokens of a pack are here: of each sample, padding included, one of equal parts."""

    index: int = 0  # of this part
    count: int = 1  # of parts; 1 is the whole pack
    halves: bool = (
        False  # a part is two pieces, as far from the start of the sample as from its end
    )

    def pieces(self, length: int) -> tuple[tuple[int, int], ...]:
        """(first token, number of tokens) of the parts here of a sample of `length` tokens."""
        if not self.halves:
            size = length // self.count
            return ((self.index * size, size),)
        size = length // (2 * self.count)
        return (self.index * size, size), ((2 * self.count - 1 - self.index) * size, size)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """N samples laid end to end in one row of T tokens (THD).

    Tensors with a T hold the tokens of `share`; everything else describes the whole pack.
    """

    # bfloat16 or float32, whitened to std 1; C = channels * patch volume, order (c, t, h, w)
    latent_TC: Tensor
    position_T3: Tensor  # float32 (frame at 24 fps, row, column) inside the owning sample
    segment_T: Tensor  # int64 in [0, N): the sample that owns each token
    is_real_T: Tensor  # bool, False on alignment padding
    text_LE: Tensor  # bfloat16 or float32, the N captions laid end to end
    fps_N: Tensor  # float32, NaN for none
    # Python integers, so that no step waits for a device to learn a length.
    grids: tuple[tuple[int, int, int], ...]  # per sample: frames, rows, columns, in patches
    starts: tuple[int, ...]  # N + 1 offsets of the samples in T, each a multiple of sample_multiple
    text_starts: tuple[int, ...]  # N + 1 offsets of the captions in L
    keys: tuple[str, ...]  # of the N samples; empty strings where a sample has none
    captions: tuple[str, ...] = ()  # of the N samples, where they are known; for people alone
    pack_id: int  # 63-bit identity that, with seed and step, decides all random draws
    share: SequenceShard = SequenceShard()

    @property
    def num_samples(self) -> int:
        return len(self.grids)

    @property
    def num_tokens(self) -> tuple[int, ...]:
        """Real tokens of each sample."""
        return tuple(f * h * w for f, h, w in self.grids)

    @property
    def shared_spans(self) -> tuple[tuple[int, int], ...]:
        """Of each sample, the first row of its tokens here and how many of them are real.

        Real tokens come first in a sample, and so they do in its parts.
        """
        spans = []
        for (start, stop), real in zip(pairwise(self.starts), self.num_tokens, strict=True):
            pieces = self.share.pieces(stop - start)
            here = sum(min(max(real - first, 0), size) for first, size in pieces)
            spans.append((start // self.share.count, here))
        return tuple(spans)

    def rows(self, share: SequenceShard) -> Tensor:
        """Which tokens of the whole pack `share` has, in its order."""
        pieces = [
            (start + first, size)
            for start, stop in pairwise(self.starts)
            for first, size in share.pieces(stop - start)
        ]
        return torch.cat([torch.arange(first, first + size) for first, size in pieces])

    @property
    def real_tokens(self) -> int:
        return sum(self.num_tokens)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name, those of wider numbers first."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return wider_first({n: value for n, value in values.items() if isinstance(value, Tensor)})

    def joined(self) -> tuple[PackedBatch, Tensor]:
        """For another process: the pack without numbers, and all numbers as one row of bytes.

        One tensor takes one message, or one piece of shared memory; each takes a millisecond.
        """
        tensors = self.tensors
        outlines = {n: torch.empty_like(t, device="meta") for n, t in tensors.items()}
        row = _row_of(list(tensors.values()))
        if row is None:
            parts = [t.contiguous().view(-1).view(torch.uint8) for t in tensors.values()]
            row = torch.cat(parts)
        return replace(self, **outlines), row

    def filled(self, row: Tensor) -> PackedBatch:
        """The inverse, of the pack without numbers; the tensors are views of `row`."""
        return replace(self, **views_of(row, self.tensors))

    def __reduce__(self) -> tuple[Any, ...]:
        """Its numbers are pickled as one tensor: torch saves no views of one row as they are."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        sizes = {name: (t.dtype, tuple(t.shape)) for name, t in self.tensors.items()}
        others = {name: value for name, value in values.items() if name not in sizes}
        return _unpickled, (others, sizes, self.joined()[1])

    def to(self, device: torch.device) -> PackedBatch:
        """The same pack with its tensors on `device`."""
        outline, row = self.joined()
        return outline.filled(row.to(device, non_blocking=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A weighted regression: weight · mean over C of (network output - target)².

    The network sees `input_TC` and `level_N` only. Padding tokens are zero in both tensors.
    """

    input_TC: Tensor  # float32, what the network is fed
    level_N: Tensor  # float32, ln(sigma) / 4 for EDM, timestep_scale * t for flow matching
    target_TC: Tensor  # float32, what the raw network output should be
    weight_N: Tensor  # float32, multiplies the squared error of each token of the sample
    noise_N: Tensor  # float32, sigma or t itself, for metrics and samplers


def wider_first(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The order of the tensors of a pack in one row of bytes: each begins where its type may."""
    return dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))


def views_of(row: Tensor, outlines: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parts of a row of bytes as tensors like `outlines`, which are `wider_first`."""
    parts = row.split([t.nbytes for t in outlines.values()])
    return {
        name: part.view(t.dtype).view(t.shape)
        for (name, t), part in zip(outlines.items(), parts, strict=True)
    }


def _unpickled(
    others: dict[str, Any], sizes: dict[str, tuple[torch.dtype, tuple[int, ...]]], row: Tensor
) -> PackedBatch:
    outlines = {n: torch.empty(size, dtype=d, device="meta") for n, (d, size) in sizes.items()}
    tensors: Any = views_of(row, outlines)
    return PackedBatch(**others, **tensors)


def _row_of(tensors: list[Tensor]) -> Tensor | None:
    """The row of bytes whose views they are, one after the other; None where they are not."""
    storage = tensors[0].untyped_storage()
    start = at = tensors[0].storage_offset() * tensors[0].element_size()
    for t in tensors:
        here = t.untyped_storage().data_ptr() == storage.data_ptr()
        if not here or t.storage_offset() * t.element_size() != at or not t.is_contiguous():
            return None
        at += t.nbytes
    row = torch.empty(0, dtype=torch.uint8, device=tensors[0].device)
    return row.set_(storage, start, (at - start,), (1,))


def pack_identity(keys: tuple[str, ...]) -> int:
    """Order-sensitive 63-bit hash of the sample keys of a pack, the same on every machine."""
    digest = hashlib.blake2b("\0".join(keys).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
