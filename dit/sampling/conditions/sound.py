"""Treats a video and its sound as one state of a sampler; parts of the state may be known.

All streams of a pack form one sequence of tokens: latents, then sound. Solvers treat each number by
the noise level of its sample, so one solver serves both streams; features that the narrower stream
lacks are zeros throughout.
"""

# T tokens of all streams, C the widest of their features, N samples, M level rows
# K channels, A frames of the latent of a sound; F H W frames, rows, columns of a latent

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from dit.batch import LATENTS, SOUND, NoisyTokens, PackedBatch, Perturbation
from dit.config import ModelConfig, Sampler
from dit.models.patch_layout import PatchLayout
from dit.models.registry import family_of, has_sound
from dit.objectives.noise import insert_padding
from dit.objectives.objective import SamplingPath, per_token
from dit.objectives.pack_draws import with_clean_tokens
from dit.objectives.training_target import with_clean_level, with_given_tokens
from dit.sampling.ode_solvers import Network


@dataclass(frozen=True, kw_only=True, slots=True)
class SoundRequest:
    """The sound of a video to generate, and the known parts of sound and video."""

    frames: int
    """Latent frames of the sound; 0: the video has no sound."""
    given_KA: Tensor | None = None
    """The first latent frames of the sound, or all of them, without noise; None: all are generated.
    """
    given_CFHW: Tensor | None = None
    """The first latent frames of the video, or all of them, without noise; None: all are generated.
    """

    def inputs(self, model: ModelConfig, start_KA: Tensor | None = None) -> dict[str, Tensor]:
        """The sound's latent [K, A] by its name as an input; empty if there is no sound.

        Where it is generated it is zero, or `start_KA`, the latent that the sampler starts from.
        """
        widths = [one.width for one in family_of(model).inputs(model) if one.name == SOUND]
        if not self.frames or not widths:
            return {}
        sound_KA = torch.zeros(widths[0], self.frames) if start_KA is None else start_KA.clone()
        if self.given_KA is not None:
            sound_KA[:, : self.given_KA.shape[1]] = self.given_KA
        return {SOUND: sound_KA}

    def video(self, blank_CFHW: Tensor) -> Tensor:
        """The latent of the video: `blank_CFHW`, with known frames in place of its first ones."""
        if self.given_CFHW is None:
            return blank_CFHW
        frames = self.given_CFHW.shape[1]
        return torch.cat((self.given_CFHW, blank_CFHW[:, frames:]), dim=1)


def sound_frames(model: ModelConfig, *, frames: int, fps: float) -> int:
    """Latent frames of the sound of a video with `frames` pictures at `fps` a second.

    0 for a network without sound, and for a single picture.
    """
    inputs = {one.name: one for one in family_of(model).inputs(model)}
    if SOUND not in inputs or frames == 1 or not math.isfinite(fps):
        return 0
    return inputs[SOUND].sound_frames(frames / fps)


def layout_with_given(layout: PatchLayout, sounds: Sequence[SoundRequest | None]) -> PatchLayout:
    """`layout`, which allows clean tokens if any of `sounds` has known sound or frames.

    None in `sounds` stands for a sample without sound.
    """
    given = [one for one in sounds if one is not None]
    if not any(one.given_KA is not None or one.given_CFHW is not None for one in given):
        return layout
    return replace(layout, draws_given_frames=True, clean_sound_level=layout.clean_level)


def with_given(
    batch: PackedBatch, sounds: Sequence[SoundRequest | None], layout: PatchLayout
) -> PackedBatch:
    """The pack `batch`, in which known frames and known sound are marked as clean tokens.

    `sounds` has an entry for each sample; None for one without sound.
    """
    frames, heard = [0] * len(sounds), [0] * len(sounds)
    for n, one in enumerate(sounds):
        if one is not None and one.given_KA is not None:
            heard[n] = one.given_KA.shape[1]
        if one is not None and one.given_CFHW is not None:
            frames[n] = math.prod(layout.grid(one.given_CFHW))
    if any(frames):
        batch = with_clean_tokens(batch, frames)
    if any(heard):
        sound = with_clean_tokens(batch.others[SOUND], heard)
        batch = replace(batch, others={**batch.others, SOUND: sound})
    return batch


@dataclass(frozen=True, kw_only=True, slots=True)
class JointStreams:
    """The tokens of all streams of a pack in one sequence, as solvers see them."""

    pack: PackedBatch
    row: PackedBatch
    """The pack with the tokens of all streams as its own; its grids are those of the latents."""

    @classmethod
    def of(cls, pack: PackedBatch) -> JointStreams:
        streams = list(pack.streams.values())
        per_token = ("segment_T", "is_real_T", "is_target_T", "level_row_T")
        row: dict[str, Any] = {
            name: torch.cat([getattr(stream, name) for stream in streams]) for name in per_token
        }
        latent_TC = _side_by_side([stream.latent_TC.float() for stream in streams])
        return cls(pack=pack, row=replace(pack, latent_TC=latent_TC, **row))

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """(tokens, features) of each stream, by its name."""
        of_streams = self.pack.streams.items()
        return {name: (s.latent_TC.shape[0], s.latent_TC.shape[1]) for name, s in of_streams}

    def noise(self, of_latents_TC: Tensor, seeds: Sequence[int]) -> Tensor:
        """Standard normal noise [T, C] for both streams.

        `of_latents_TC` is the noise of the latents. The noise of the sound is drawn here, by the
        same `seeds`, one for each sample, but from other random numbers.
        """
        sound = self.pack.others.get(SOUND)
        if sound is None:
            return of_latents_TC
        drawn = [
            torch.randn(tokens, sound.latent_TC.shape[1], generator=_generator(seed))
            for tokens, seed in zip(sound.num_tokens, seeds, strict=True)
        ]
        noise_TC = insert_padding(torch.cat(drawn).to(of_latents_TC), sound)
        return _side_by_side([of_latents_TC, noise_TC])

    def started(self, noise_TC: Tensor, path: SamplingPath, noise_N: Tensor) -> Tensor:
        """The state [T, C] of the pack's latents at the noise levels `noise_N` [N] of its samples.

        `noise_TC` is standard normal noise.
        """
        signal_T1 = per_token(path.signal(noise_N), self.row)
        return signal_T1 * self.row.latent_TC + per_token(noise_N, self.row) * noise_TC

    def apart(self, state_TC: Tensor) -> dict[str, Tensor]:
        """Splits a state [T, C] into the part of each stream, by its name."""
        tokens = [tokens for tokens, _ in self.sizes.values()]
        parts = zip(self.sizes.items(), state_TC.split(tokens), strict=True)
        return {name: part[:, :features] for (name, (_, features)), part in parts}

    def per_token(self, of_streams: Sequence[float]) -> Tensor:
        """The number of the stream of each token, [T, 1] float32, from those of all streams."""
        pairs = zip(self.sizes.values(), of_streams, strict=False)
        rows = [torch.full((tokens, 1), float(value)) for (tokens, _), value in pairs]
        return torch.cat(rows)

    def perturbed(self, perturbation: Perturbation) -> JointStreams:
        """Makes streams of the same pack whose passes leave attention out."""
        return replace(self, pack=self.pack.with_method(perturbation))

    def network(self, model: Callable[..., Any], path: SamplingPath) -> Network:
        """`model` as a function that maps the state of all streams to its raw output, both [T, C].

        Its second argument has one timestep for each sample; known tokens get the timestep of clean
        tokens.
        """

        def run(input_TC: Tensor, level_N: Tensor) -> Tensor:
            parts, others = self.apart(with_given_tokens(input_TC, self.row)), {}
            for name, stream in self.pack.others.items():
                level_M = with_clean_level(level_N, stream, path)
                fed = NoisyTokens(input_TC=parts[name], level_M=level_M)
                others[name] = stream.with_method(fed)
            level_M = with_clean_level(level_N, self.pack, path)
            made = model(parts[LATENTS], level_M, replace(self.pack, others=others))
            return _side_by_side([made[name] for name in self.pack.streams]) if others else made

        return run

    def sounds(self, state_TC: Tensor) -> list[Tensor | None]:
        """The latent [K, A] of each sample's sound in `state_TC`; None if there is no sound."""
        sound = self.pack.others.get(SOUND)
        if sound is None:
            return [None] * self.pack.num_samples
        rows_TC = with_given_tokens(self.apart(state_TC)[SOUND], sound)
        spans = zip(sound.starts, sound.num_tokens, strict=False)
        return [rows_TC[at : at + n].T.contiguous() if n else None for at, n in spans]


def _generator(seed: int) -> torch.Generator:
    """A generator for sound, whose numbers differ from those of latents with the same seed."""
    return torch.Generator("cpu").manual_seed(other_seed(seed, 1))


def other_seed(seed: int, number: int) -> int:
    """A seed whose random numbers differ from those of `seed` and of other `number`s."""
    mixed = np.random.SeedSequence(seed % 2**64, spawn_key=(number,))
    return int(mixed.generate_state(1, np.uint64)[0])


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Concatenates `parts` [T, C] along tokens; narrower ones are filled up with zeros."""
    widest = max(part.shape[1] for part in parts)
    return torch.cat([pad(part, (0, widest - part.shape[1])) for part in parts])


def check_sound(
    sounds: Sequence[Any], model: ModelConfig, *, sampler: Sampler, guider: bool
) -> None:
    """Checks that settings of the sampler can be used for a network with sound.

    Raises:
        ValueError: sound is asked of a network without it; or the sampler or a guider is for
            networks with one stream of tokens.
    """
    if not has_sound(model):
        if any(one is not None for one in sounds):
            raise ValueError(
                f"model.family={model.family} makes no sound; leave --frames_of and --sound_of out"
            )
        return
    for wrong, what in (
        (sampler is Sampler.LCM, f"sampler {sampler}"),
        (guider, "--guider"),
    ):
        if wrong:
            raise ValueError(
                f"{what} cannot be used with model.family={model.family}, which makes frames and"
                " sound together; leave it out"
            )
