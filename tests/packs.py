"""Packs with random contents for tests."""

from __future__ import annotations

from itertools import accumulate

import torch

from dit.batch import PackedBatch, pack_identity
from dit.config import ModelConfig


def random_pack(
    grids: list[tuple[int, int, int]],
    texts: list[int],
    *,
    model: ModelConfig,
    multiple: int = 8,
    fps: list[float] | None = None,
    seed: int = 0,
) -> PackedBatch:
    """A pack of samples with these grids (frames, rows, columns in patches) and text lengths."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [f * h * w for f, h, w in grids]
    padded = [-(-n // multiple) * multiple for n in tokens]
    fps = fps or [float("nan")] * len(grids)
    latents, positions = [], []
    for (f, h, w), n, room, rate in zip(grids, tokens, padded, fps, strict=True):
        latent = torch.randn(n, model.patch_features, generator=generator)
        latents.append(torch.nn.functional.pad(latent, (0, 0, 0, room - n)))
        axes = torch.meshgrid(torch.arange(f), torch.arange(h), torch.arange(w), indexing="ij")
        position = torch.stack([a.flatten().float() for a in axes], dim=-1)
        if rate == rate:
            position[:, 0] = position[:, 0] / rate * model.base_fps
        positions.append(torch.nn.functional.pad(position, (0, 0, 0, room - n)))
    keys = tuple(f"{seed}-{i}" for i in range(len(grids)))
    return PackedBatch(
        latent_TC=torch.cat(latents),
        position_T3=torch.cat(positions),
        segment_T=torch.repeat_interleave(torch.arange(len(grids)), torch.tensor(padded)),
        is_real_T=torch.cat(
            [torch.arange(room) < n for n, room in zip(tokens, padded, strict=True)]
        ),
        text_LE=torch.randn(sum(texts), model.crossattn_emb_size, generator=generator),
        fps_N=torch.tensor(fps),
        grids=tuple(grids),
        starts=(0, *accumulate(padded)),
        text_starts=(0, *accumulate(texts)),
        keys=keys,
        pack_id=pack_identity(keys),
    )


def single(batch: PackedBatch, index: int) -> PackedBatch:
    """The sample at `index` as a pack of its own."""
    start, stop = batch.starts[index : index + 2]
    first, last = batch.text_starts[index : index + 2]
    keys = batch.keys[index : index + 1]
    return PackedBatch(
        latent_TC=batch.latent_TC[start:stop],
        position_T3=batch.position_T3[start:stop],
        segment_T=torch.zeros(stop - start, dtype=torch.int64),
        is_real_T=batch.is_real_T[start:stop],
        text_LE=batch.text_LE[first:last],
        fps_N=batch.fps_N[index : index + 1],
        grids=batch.grids[index : index + 1],
        starts=(0, stop - start),
        text_starts=(0, last - first),
        keys=keys,
        pack_id=pack_identity(keys),
    )
