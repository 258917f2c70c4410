"""Tiny models, and packs with random contents for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import lcm
from typing import Any

import torch

from dit.batch import (
    TEXT,
    WHOLE,
    CleanTokens,
    Grid,
    GuidanceInput,
    LatentSample,
    PackedBatch,
    ReferenceGrids,
    StepEnd,
    TokenWeights,
    by_type,
    pack_identity,
)
from dit.config import ModelConfig, Precision, RunConfig
from dit.data.pack import pack_samples
from dit.models.dit.family import DitConfig
from dit.models.family import Family, InputKind, SampleInput
from dit.models.patch_layout import PatchLayout
from dit.models.registry import family_of
from dit.token_ids import as_digits


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


def random_samples(
    grids: Sequence[Grid],
    texts: Sequence[int],
    *,
    model: ModelConfig,
    fps: Sequence[float] = (),
    family: Family | None = None,
    reference_frames: int = 1,
) -> list[LatentSample]:
    """Samples with these grids (frames, rows, columns in patches) and text lengths.

    They have the other inputs of the family, too; given frames where there are more than one, and
    in every second sample reference latents of `reference_frames` frames, of sizes of their own.
    """
    generator = torch.Generator().manual_seed(0)
    tall, wide = model.patch_temporal, model.patch_spatial
    samples = [
        LatentSample(
            key=str(i),
            latent_CFHW=torch.randn(
                model.in_channels, f * tall, h * wide, w * wide, generator=generator
            ),
            text_LE=torch.randn(length, model.crossattn_emb_size, generator=generator),
            fps=fps[i] if fps else float("nan"),
        )
        for i, ((f, h, w), length) in enumerate(zip(grids, texts, strict=True))
    ]
    inputs = (family or family_of(model)).inputs(model)
    sides = (tall, model.side_cells)
    drawn: Any = {"rng": generator, "reference_frames": reference_frames}
    return [replace(one, others=_others(one, inputs, sides, **drawn)) for one in samples]


def random_pack(
    grids: Sequence[Grid],
    texts: Sequence[int],
    *,
    model: ModelConfig,
    multiple: int = 8,
    fps: Sequence[float] = (),
    family: Family | None = None,
    guidance: float | None = None,
    **samples: Any,
) -> PackedBatch:
    """A pack of `random_samples`, which get `samples` as further arguments."""
    family = family or family_of(model)
    has_sound = any(one.kind is InputKind.SOUND for one in family.inputs(model))
    layout = PatchLayout(
        patch_temporal=model.patch_temporal,
        patch_spatial=model.patch_spatial,
        sample_multiple=lcm(multiple, model.attended_multiple),
        positions=family.positions(model),
        inputs=family.inputs(model),
        attended=model.attended,
        clean_level=family.objective.clean_level,
        guidance=guidance,
        draws_given_frames=has_sound,
        clean_sound_level=family.objective.clean_level if has_sound else None,
    )
    drawn = random_samples(grids, texts, model=model, fps=fps, family=family, **samples)
    return pack_samples(drawn, layout)


def _others(
    sample: LatentSample,
    inputs: Sequence[SampleInput],
    patch: tuple[int, int],
    *,
    rng: torch.Generator,
    reference_frames: int,
) -> dict[str, torch.Tensor]:
    """Vectors, rows beside the text, condition channels, given first frames and references."""
    found, (frames, side) = {}, patch
    for number, one in enumerate(inputs):
        if one.kind is InputKind.CHANNELS:
            size = sample.latent_CFHW.shape[1:]
            found[one.name] = torch.randn(one.width, *size, generator=rng)
        elif one.vocabulary is not None:
            ids = torch.randint(one.vocabulary, (len(sample.text_LE) + 1,), generator=rng)
            found[one.name] = as_digits(ids)
        elif one.kind is InputKind.TEXT and one.name != TEXT:
            rows = (int(sample.key) + 1) % 3 if one.may_be_empty else 3
            found[one.name] = torch.randn(one.rows or rows, one.width, generator=rng)
        elif one.kind is InputKind.VECTOR:
            found[one.name] = torch.randn(one.width, generator=rng)
        elif one.kind is InputKind.FRAME_CHANNELS and int(sample.key) % 2:
            found[one.name] = torch.randn(*sample.latent_CFHW[:, :frames].shape, generator=rng)
        elif one.kind is InputKind.FRAMES and sample.latent_CFHW.shape[1] > frames:
            found[one.name] = torch.randn(sample.latent_CFHW[:, :frames].shape, generator=rng)
        elif one.kind is InputKind.SOUND and int(sample.key) % 3 != 2:
            length = 2 * sample.latent_CFHW.shape[1] + 3
            found[one.name] = torch.randn(one.width, length, generator=rng)
        elif one.kind is InputKind.REFERENCE and int(sample.key) % 2:
            size = (reference_frames * frames, number * side, int(sample.key) * side)
            found[one.name] = torch.randn(one.width, *size, generator=rng)
    return found


def single(batch: PackedBatch, index: int) -> PackedBatch:
    """The sample at `index` as a pack of its own."""
    start, stop = batch.starts[index : index + 2]
    rows = {name: starts[index : index + 2] for name, starts in batch.text_offsets.items()}
    is_clean_T = batch.level_row_T[start:stop] >= batch.num_samples
    clean, end = batch.method(CleanTokens), batch.method(StepEnd)
    weights, others = batch.method(TokenWeights), batch.references
    keys = batch.keys[index : index + 1]
    return PackedBatch(
        latent_TC=batch.latent_TC[start:stop],
        position_TA=batch.position_TA[start:stop],
        segment_T=torch.zeros(stop - start, dtype=torch.int64),
        is_real_T=batch.is_real_T[start:stop],
        is_target_T=batch.is_target_T[start:stop],
        level_row_T=is_clean_T.long(),
        condition_TC=None if batch.condition_TC is None else batch.condition_TC[start:stop],
        texts={name: batch.texts[name][slice(*rows[name])] for name in rows},
        vectors={name: rows[index : index + 1] for name, rows in batch.vectors.items()},
        fps_N=batch.fps_N[index : index + 1],
        grids=batch.grids[index : index + 1],
        starts=(0, stop - start),
        text_offsets={name: (0, last - first) for name, (first, last) in rows.items()},
        keys=keys,
        captions=(),
        pack_id=pack_identity(keys),
        share=WHOLE,
        methods=by_type(
            None if weights is None else TokenWeights(weight_T=weights.weight_T[start:stop]),
            None if end is None else StepEnd(level_N=end.level_N[index : index + 1]),
            CleanTokens(level=clean.level, counts=clean.counts[index : index + 1])
            if clean is not None and is_clean_T.any()
            else None,
            batch.method(GuidanceInput),
            ReferenceGrids(of=others[index : index + 1]) if any(others) else None,
        ),
    )


def run_config(**groups: Any) -> RunConfig:
    """The defaults of a run, with the default network where `groups` name none."""
    return RunConfig(**({"model": DitConfig()} | groups))
