"""The three values that cross folder borders.

A `LatentSample` is what a shard holds; a `PackedBatch` is what the loader hands to the step; a
`Problem` is what an objective asks of the network. All three are frozen.
"""

# C latent channels, or patch features C * pt * ph * pw once patched; T packed tokens; L text tokens
# N samples in a pack; E text width; D model width; F H W frames, rows and columns of a latent

from __future__ import annotations

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
    """The part of every sample's tokens, padding included, that one context-parallel rank has."""

    index: int = 0  # of this part
    count: int = 1  # number of parts, all of equal size; 1 is the whole pack
    # Ring attention: two pieces of each sample, one as far from its start as the other from its end
    halves: bool = False

    def pieces(self, length: int) -> tuple[tuple[int, int], ...]:
        """(first token, number of tokens) of each piece of a sample of `length` tokens."""
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
    fps_N: Tensor  # float32, frames per second; NaN for an image or unknown
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
    def real_tokens(self) -> int:
        return sum(self.num_tokens)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by the names of their fields."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def to(self, device: torch.device) -> PackedBatch:
        """The same pack with its tensors on `device`."""
        moved: Any = {n: t.to(device, non_blocking=True) for n, t in self.tensors.items()}
        return replace(self, **moved)

    @property
    def shared_spans(self) -> tuple[tuple[int, int], ...]:
        """For each sample, its first token in the tensors and how many of its tokens are real."""
        spans = []
        for (start, stop), real in zip(pairwise(self.starts), self.num_tokens, strict=True):
            # Real tokens come first in a sample, and therefore in its pieces as well.
            pieces = self.share.pieces(stop - start)
            here = sum(min(max(real - first, 0), size) for first, size in pieces)
            spans.append((start // self.share.count, here))
        return tuple(spans)

    def rows(self, share: SequenceShard) -> Tensor:
        """Indices of the tokens of the whole pack that `share` has, in its order."""
        pieces = [
            (start + first, size)
            for start, stop in pairwise(self.starts)
            for first, size in share.pieces(stop - start)
        ]
        return torch.cat([torch.arange(first, first + size) for first, size in pieces])


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
