"""Packs of a network with sound: six mixed samples, and each of them alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dit.batch import LATENTS, SOUND, WHOLE, LatentSample, PackedBatch, Problem
from dit.config import ObjectiveConfig, Precision
from dit.data.pack import pack_samples
from dit.distributed.model_parallel import split_tokens
from dit.models.patch_layout import PatchLayout
from dit.models.registry import family_named
from dit.models.sound_dit.family import FAMILY, SoundDitConfig
from dit.objectives.pack_draws import with_clean_tokens
from dit.objectives.registry import training_objective
from dit.objectives.training_target import problem_of_streams

# A video with sound; one without; all frames given; the sound given; a prefix of the sound; a
# picture without sound.
GRIDS = [(3, 2, 3), (2, 2, 2), (2, 3, 2), (3, 2, 2), (2, 2, 4), (1, 4, 4)]
TEXTS = [5, 0, 7, 3, 9, 4]
SOUNDS = [7, 0, 5, 9, 11, 0]
GIVEN_TOKENS = [6, 0, 12, 0, 0, 0]
GIVEN_SOUND = [0, 0, 0, 9, 4, 0]
FLOW = ObjectiveConfig(name="flow", sound_weight=0.5)


def sound_model(**changes: Any) -> SoundDitConfig:
    """A tiny float32 network of `sound_dit`, with `changes`."""
    tiny = {"name": "custom", **FAMILY.tiny["sound_dit_s"], "num_layers": 2}
    return SoundDitConfig(**(tiny | {"precision": Precision.FP32} | changes))


def sound_layout(model: SoundDitConfig, *, multiple: int = 4) -> PatchLayout:
    family = family_named("sound_dit")
    return PatchLayout(
        patch_temporal=model.patch_temporal,
        patch_spatial=model.patch_spatial,
        sample_multiple=multiple,
        positions=family.positions(model),
        inputs=family.inputs(model),
        draws_given_frames=True,
        clean_sound_level=0.0,
    )


def sound_samples(model: SoundDitConfig) -> list[LatentSample]:
    rng = torch.Generator().manual_seed(0)
    made = []
    for n, ((f, h, w), text, frames) in enumerate(zip(GRIDS, TEXTS, SOUNDS, strict=True)):
        p = model.patch_spatial
        heard = torch.randn(model.sound_channels, frames, generator=rng)
        made.append(
            LatentSample(
                key=f"k{n}",
                latent_CFHW=torch.randn(model.in_channels, f, h * p, w * p, generator=rng),
                text_LE=torch.randn(text, model.crossattn_emb_size, generator=rng),
                fps=24.0 if f == 1 else 8.0,
                others={SOUND: heard} if frames else {},
            )
        )
    return made


class Mixed:
    """The pack of some of the six samples, whose levels and noise are those of the pack of all."""

    def __init__(self, model: SoundDitConfig, chosen: list[int] | None = None):
        every = range(len(GRIDS)) if chosen is None else chosen
        samples = sound_samples(model)
        layout = sound_layout(model)
        batch = pack_samples([samples[n] for n in every], layout)
        batch = with_clean_tokens(batch, [GIVEN_TOKENS[n] for n in every])
        sound = with_clean_tokens(batch.others[SOUND], [GIVEN_SOUND[n] for n in every])
        self.batch: PackedBatch = replace(batch, others={SOUND: sound})
        levels = {
            LATENTS: torch.linspace(0.1, 0.9, len(GRIDS))[list(every)],
            SOUND: torch.linspace(0.8, 0.2, len(GRIDS))[list(every)],
        }
        noise = {name: self._noise(name, every) for name in levels}
        objective = training_objective(FLOW)
        self.problem: Problem = problem_of_streams(objective, self.batch, levels, noise)

    def _noise(self, name: str, every: Any) -> Tensor:
        stream = self.batch.streams[name]
        noise_TC = torch.zeros(stream.latent_TC.shape)
        for sample, number in enumerate(every):
            rng = torch.Generator().manual_seed(100 + number + 50 * (name == SOUND))
            first, count = stream.starts[sample], stream.num_tokens[sample]
            noise_TC[first : first + count] = torch.randn(
                count, stream.latent_TC.shape[1], generator=rng
            )
        return noise_TC

    def on_one_rank(self, multiple: int = 4) -> tuple[PackedBatch, Problem]:
        return split_tokens(self.batch, self.problem, share=WHOLE, multiple=multiple)
