"""Group of LatentSamples -> PackedBatch: patches, positions, padding, captions."""

# C latent channels, or patch features C * pt * ph * pw once patched; T packed tokens; L text tokens
# N samples in a pack; E text width; F H W frames, rows, columns, of the latent or in patches

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from dit.batch import LatentSample, PackedBatch, pack_identity
from dit.config import RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchLayout:
    """How a latent becomes tokens."""

    patch_temporal: int
    patch_spatial: int
    sample_multiple: int
    """Each sample is padded to a multiple of this many tokens."""
    base_fps: float
    """A frame's position is frame * base_fps / fps of the clip."""

    @classmethod
    def of(cls, config: RunConfig) -> PatchLayout:
        return cls(
            patch_temporal=config.model.patch_temporal,
            patch_spatial=config.model.patch_spatial,
            sample_multiple=config.dataset.sample_multiple,
            base_fps=config.model.base_fps,
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
        tokens = math.prod(self.grid(latent_CFHW))
        return -(-tokens // self.sample_multiple) * self.sample_multiple


def pack(samples: Sequence[LatentSample], layout: PatchLayout) -> PackedBatch:
    """Lays `samples` end to end; padding tokens are zero, at position 0, and not real."""
    grids = tuple(layout.grid(sample.latent_CFHW) for sample in samples)
    padded = [layout.padded_tokens(sample.latent_CFHW) for sample in samples]
    starts = tuple(accumulate(padded, initial=0))
    features = samples[0].latent_CFHW.shape[0] * math.prod(layout.patch)
    latent_TC = torch.empty(starts[-1], features)
    position_T3 = torch.zeros(starts[-1], 3)
    is_real_T = torch.zeros(starts[-1], dtype=torch.bool)
    for sample, grid, (start, stop) in zip(samples, grids, pairwise(starts), strict=True):
        own = slice(start, start + math.prod(grid))
        _write_patches(latent_TC[own], sample.latent_CFHW, grid, layout.patch)
        latent_TC[own.stop : stop] = 0
        position_T3[own] = positions(grid, fps=sample.fps, base_fps=layout.base_fps)
        is_real_T[own] = True
    keys = tuple(sample.key for sample in samples)
    return PackedBatch(
        latent_TC=latent_TC,
        position_T3=position_T3,
        segment_T=torch.arange(len(samples)).repeat_interleave(torch.tensor(padded)),
        is_real_T=is_real_T,
        text_LE=_join_texts([sample.text_LE for sample in samples]),
        fps_N=torch.tensor([sample.fps for sample in samples], dtype=torch.float32),
        grids=grids,
        starts=starts,
        text_starts=tuple(accumulate((len(sample.text_LE) for sample in samples), initial=0)),
        keys=keys,
        captions=tuple(sample.caption for sample in samples),
        pack_id=pack_identity(keys),
    )


@lru_cache(maxsize=32)  # most datasets have few sizes, and small ones take longer than to copy
def positions(grid: tuple[int, int, int], *, fps: float, base_fps: float) -> Tensor:
    """[F*H*W, 3] float32 (frame at `base_fps`, row, column) of one sample, in token order.

    Without fps (NaN) frames are counted as they are.
    """
    frames, rows, columns = (torch.arange(size, dtype=torch.float32) for size in grid)
    if not math.isnan(fps):
        frames = frames * (base_fps / fps)
    return torch.cartesian_prod(frames, rows, columns)


def _write_patches(
    out_TC: Tensor, latent_CFHW: Tensor, grid: tuple[int, int, int], patch: tuple[int, int, int]
) -> None:
    """Tokens in order (frame, row, column), features of a token in order (c, t, h, w)."""
    (f, h, w), (pt, ph, pw) = grid, patch
    latent_CFHW = latent_CFHW.float()
    if pw == 2:  # the two neighbours in a row move as one number, 8 times as fast
        latent_CFHW, out_TC, pw = latent_CFHW.view(torch.int64), out_TC.view(torch.int64), 1
    split = latent_CFHW.view(-1, f, pt, h, ph, w, pw)
    out_TC.view(f, h, w, -1, pt, ph, pw).copy_(split.permute(1, 3, 5, 0, 2, 4, 6))


def _join_texts(texts: list[Tensor]) -> Tensor:
    """[L, E] in bfloat16 if all are stored so, else in float32."""
    keep = all(text.dtype == torch.bfloat16 for text in texts)
    return torch.cat(texts if keep else [text.float() for text in texts])
