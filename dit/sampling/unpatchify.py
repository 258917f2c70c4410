"""Tokens of a pack -> latents (the inverse of patchify)."""

# C patch features = c * pt * p * p, T packed tokens; F H W frames, rows, columns of a latent

from __future__ import annotations

from torch import Tensor

from dit.batch import PackedBatch


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


def unpatchify(
    latent_TC: Tensor, grid: tuple[int, int, int], patch_temporal: int, patch_spatial: int
) -> Tensor:
    """Latent [c, F, H, W] from the first frames * rows * columns tokens of `latent_TC`."""
    f, h, w = grid
    pt, p = patch_temporal, patch_spatial
    patches = latent_TC[: f * h * w].reshape(f, h, w, -1, pt, p, p)  # frame row column c t h w
    return patches.permute(3, 0, 4, 1, 5, 2, 6).reshape(-1, f * pt, h * p, w * p)
