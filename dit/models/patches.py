"""Latents <-> tokens of one sample; `dit.data.pack` writes those of many into a pack."""

# c latent channels, C numbers in a token, T tokens; F H W frames, rows, columns of a latent

from __future__ import annotations

import torch
from torch import Tensor

from dit.batch import Grid, PackedBatch


def patchify(latent_CFHW: Tensor, patch_temporal: int, patch_spatial: int) -> tuple[Grid, Tensor]:
    """The grid of a latent [c, F, H, W], and its tokens [T, C].

    Tokens are in order (frame, row, column), features of a token in order (c, t, h, w).
    """
    pt, p = patch_temporal, patch_spatial
    cut = latent_CFHW.unflatten(3, (-1, p)).unflatten(2, (-1, p)).unflatten(1, (-1, pt))
    tokens = cut.permute(1, 3, 5, 0, 2, 4, 6)  # frame row column c t h w
    f, h, w = tokens.shape[:3]
    return (f, h, w), tokens.flatten(3).flatten(0, 2)


def write_patches(out_TC: Tensor, latent_CFHW: Tensor, grid: Grid, patch: Grid) -> None:
    """Writes the tokens [T, C] of a latent [c, F, H, W], in the order of `patchify`."""
    (f, h, w), (pt, ph, pw) = grid, patch
    latent_CFHW = latent_CFHW.to(out_TC.dtype)
    if pw == 2:  # the two neighbours in a row move as one number, 8 times as fast
        pair = torch.int32 if out_TC.dtype == torch.bfloat16 else torch.int64
        latent_CFHW, out_TC, pw = latent_CFHW.view(pair), out_TC.view(pair), 1
    split = latent_CFHW.view(-1, f, pt, h, ph, w, pw)
    out_TC.view(f, h, w, -1, pt, ph, pw).copy_(split.permute(1, 3, 5, 0, 2, 4, 6))


def unpatchify(latent_TC: Tensor, grid: Grid, patch_temporal: int, patch_spatial: int) -> Tensor:
    """Latent [c, F, H, W] from the first frames * rows * columns tokens of `latent_TC`."""
    f, h, w = grid
    pt, p = patch_temporal, patch_spatial
    patches = latent_TC[: f * h * w].reshape(f, h, w, -1, pt, p, p)  # frame row column c t h w
    return patches.permute(3, 0, 4, 1, 5, 2, 6).reshape(-1, f * pt, h * p, w * p)


def unpack_latents(
    latent_TC: Tensor, batch: PackedBatch, *, patch_temporal: int, patch_spatial: int
) -> list[Tensor]:
    """The latent [c, F, H, W] of each sample of the pack, without padding.

    Tokens are in order (frame, row, column), features of a token in order (c, t, h, w).
    """
    return [
        unpatchify(latent_TC[start:], grid, patch_temporal, patch_spatial)
        for grid, start in zip(batch.grids, batch.starts[:-1], strict=True)
    ]
