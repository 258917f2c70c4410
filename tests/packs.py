"""Tiny models, and packs with random contents for them."""

from __future__ import annotations

from typing import Any

import torch

from dit.batch import LatentSample, PackedBatch
from dit.config import Precision, RunConfig
from dit.data.pack import PatchLayout, pack_identity, pack_samples
from dit.models.dit.config import DitConfig
from dit.models.family import family_of
from dit.models.positions import GridPositions


def tiny_model(**changes: Any) -> DitConfig:
    """A float32 model of milliseconds, with `changes`."""
    sizes = {
        "name": "custom",
        "num_layers": 2,
        "hidden_size": 96,
        "num_attention_heads": 4,
        "in_channels": 4,
        "crossattn_emb_size": 20,
        "adaln_lora_dim": 16,
        "precision": Precision.FP32,
    }
    return DitConfig(**(sizes | changes))


def random_pack(
    grids: list[tuple[int, int, int]],
    texts: list[int],
    *,
    model: DitConfig,
    multiple: int = 8,
    fps: list[float] | None = None,
) -> PackedBatch:
    """A pack of samples with these grids (frames, rows, columns in patches) and text lengths."""
    generator = torch.Generator().manual_seed(0)
    tall, wide = model.patch_temporal, model.patch_spatial
    rates = fps or [float("nan")] * len(grids)
    samples = [
        LatentSample(
            key=str(i),
            latent_CFHW=torch.randn(
                model.in_channels, f * tall, h * wide, w * wide, generator=generator
            ),
            text_LE=torch.randn(length, model.crossattn_emb_size, generator=generator),
            fps=rate,
        )
        for i, ((f, h, w), length, rate) in enumerate(zip(grids, texts, rates, strict=True))
    ]
    layout = PatchLayout(
        patch_temporal=tall,
        patch_spatial=wide,
        sample_multiple=multiple,
        positions=GridPositions(model.base_fps),
        inputs=family_of(model).inputs(model),
    )
    return pack_samples(samples, layout)


def single(batch: PackedBatch, index: int) -> PackedBatch:
    """The sample at `index` as a pack of its own."""
    start, stop = batch.starts[index : index + 2]
    first, last = batch.text_starts[index : index + 2]
    keys = batch.keys[index : index + 1]
    return PackedBatch(
        latent_TC=batch.latent_TC[start:stop],
        position_TA=batch.position_TA[start:stop],
        segment_T=torch.zeros(stop - start, dtype=torch.int64),
        is_real_T=batch.is_real_T[start:stop],
        is_target_T=batch.is_target_T[start:stop],
        level_row_T=torch.zeros(stop - start, dtype=torch.int64),
        texts={"text": batch.text_LE[first:last]},
        fps_N=batch.fps_N[index : index + 1],
        grids=batch.grids[index : index + 1],
        starts=(0, stop - start),
        text_offsets={"text": (0, last - first)},
        keys=keys,
        pack_id=pack_identity(keys),
    )


def run_config(**groups: Any) -> RunConfig:
    """The defaults of a run, with the default network where `groups` name none."""
    return RunConfig(**({"model": DitConfig()} | groups))
