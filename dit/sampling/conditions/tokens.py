"""Pictures and clips that condition a video from any of its frames on, during sampling.

The arithmetic is that of Diffusers' `LTXConditionPipeline`:

1. At frame 0 a condition is mixed into the first latent frames of the noise, by its strength.
2. At a later frame it becomes additional tokens with the position of that frame. Of a clip only
   the first latent frames become tokens; the others are mixed into the noise at their own frames.
3. A token of strength s has a timestep of at most 1 - s, and is not stepped above that level.
4. Tokens of strength 1 may get some noise at each step, times the square of the step's level.

In a sample, the tokens of conditions follow those of its references.
"""

# C patch features, T packed tokens, N samples, S + 1 levels of S steps, A axes of positions
# F H W frames, rows, columns of a latent

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dit.batch import ConditionLevels, PackedBatch
from dit.config import ModelConfig, RunConfig
from dit.models.family import ConditionRules, InputKind, SampleInput
from dit.models.patch_layout import PatchLayout
from dit.models.positions import patchify
from dit.models.registry import family_of
from dit.objectives.objective import SamplingPath, per_token
from dit.sampling.ode_solvers import StepLevels, initial_noise

_NEAR = 1e-6  # tolerance with which Diffusers' pipeline compares levels
_NAME = "condition_{}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """A picture, or a clip of 8n + 1 frames, that a video shows from a certain frame on."""

    latent_CFHW: Tensor
    """The condition's latent, whitened, with the rows and columns of the video's."""
    frame: int = 0
    """Frame of the video at which the condition begins, in pixel frames from 0."""
    strength: float = 1.0
    """Strength, above 0 and at most 1: 1 shows the condition unchanged."""

    def own_tokens(self, rules: ConditionRules) -> Tensor | None:
        """The latent frames [C, F, H, W] that become additional tokens.

        None for a condition that begins at frame 0.
        """
        return self.latent_CFHW[:, : rules.prefix_frames] if self.frame else None

    def mixed_in(self, rules: ConditionRules) -> tuple[int, Tensor]:
        """(latent frame at which to begin, latents [C, F, H, W]) to mix into the noise."""
        if self.frame == 0:
            return 0, self.latent_CFHW
        prefix = rules.prefix_frames
        return self.frame // rules.temporal_stride + prefix, self.latent_CFHW[:, prefix:]


def own_latents(conditions: Sequence[Condition], rules: ConditionRules) -> dict[str, Tensor]:
    """The latent frames of `conditions` that become additional tokens.

    The keys are names of inputs, `condition_0`, `condition_1` and so on.
    """
    found = [one.own_tokens(rules) for one in conditions]
    there = [latent for latent in found if latent is not None]
    return {_NAME.format(number): latent for number, latent in enumerate(there)}


def layout_with_room(config: RunConfig, conditions: Sequence[Sequence[Condition]]) -> PatchLayout:
    """The layout of samples with an optional input for each condition that adds tokens.

    `conditions` has those of each sample; the sample with the most such conditions decides.
    """
    rules, layout = family_of(config.model).conditions(config.model), PatchLayout.of(config)
    if rules is None:
        return layout
    most, kind = max(len(own_latents(each, rules)) for each in conditions), InputKind.REFERENCE
    options: dict[str, Any] = {"kind": kind, "width": config.model.in_channels, "required": False}
    more = [SampleInput(name=_NAME.format(n), **options) for n in range(most)]
    return replace(layout, inputs=(*layout.inputs, *more))


@dataclass(frozen=True, kw_only=True, slots=True)
class ConditionTokens:
    """The effect of conditions on each token of a pack; a token of strength 0 has no condition."""

    given_TC: Tensor
    """What conditions add to the initial state, [T, C]."""
    noise_T1: Tensor
    """Factor of the noise in the initial state, [T, 1]."""
    strength_T1: Tensor
    rows: tuple[tuple[int, float], ...]
    """(index of a sample, strength) of each level that conditions append to the pack's noise
    levels."""

    def to(self, device: torch.device) -> ConditionTokens:
        each = (self.given_TC, self.noise_T1, self.strength_T1)
        given_TC, noise_T1, strength_T1 = (x.to(device) for x in each)
        return replace(self, given_TC=given_TC, noise_T1=noise_T1, strength_T1=strength_T1)

    def told(self, level_N: Tensor, path: SamplingPath) -> Tensor:
        """Timesteps [R] of the R rows that conditions append to the table of noise levels.

        `level_N` has the timesteps of the samples. A row has the timestep of its sample, but at
        most that of the noise level 1 - strength.
        """
        most = torch.tensor([1 - strength for _, strength in self.rows], dtype=torch.float64)
        most_R = path.network_level(most).to(level_N)
        return torch.minimum(level_N[[sample for sample, _ in self.rows]], most_R)


def placed(
    batch: PackedBatch,
    negative: PackedBatch,
    conditions: Sequence[Sequence[Condition]],
    model: ModelConfig,
    layout: PatchLayout,
) -> tuple[PackedBatch, PackedBatch, ConditionTokens | None]:
    """A pack, and the pack of its negative prompts, with the samples' conditions applied to both.

    Both already have the tokens of `own_latents`, at the positions of references. The third value
    is the conditions' effect on tokens; None without conditions.
    """
    rules = family_of(model).conditions(model)
    if rules is None or not any(conditions):
        return batch, negative, None
    batch, tokens = _placed(batch, conditions, rules, layout)
    return batch, _placed(negative, conditions, rules, layout)[0], tokens


def _placed(
    batch: PackedBatch,
    conditions: Sequence[Sequence[Condition]],
    rules: ConditionRules,
    layout: PatchLayout,
) -> tuple[PackedBatch, ConditionTokens]:
    latent_TC = batch.latent_TC.float()
    given_TC, noise_T1 = torch.zeros_like(latent_TC), torch.ones(len(latent_TC), 1)
    strength_T1, position_TA = torch.zeros_like(noise_T1), batch.position_TA.clone()

    def mix(first: int, tokens_TC: Tensor, strength: float) -> slice:
        rows = slice(first, first + len(tokens_TC))
        noise_T1[rows] *= 1 - strength
        given_TC[rows] = torch.lerp(given_TC[rows], tokens_TC, strength)
        strength_T1[rows] = strength
        return rows

    is_target_T = batch.is_target_T.clone()
    for n, of_sample in enumerate(conditions):
        start, (_, height, width) = batch.starts[n], batch.grids[n]
        owning = [one.own_tokens(rules) for one in of_sample]
        cut = [None if one is None else _cut(one, layout) for one in owning]
        at = start + batch.num_tokens[n] - sum(len(each[1]) for each in cut if each)
        for one, own in zip(of_sample, cut, strict=True):
            first, latent_CFHW = one.mixed_in(rules)
            _, tokens_TC = _cut(latent_CFHW, layout)
            mix(start + first // layout.patch_temporal * height * width, tokens_TC, one.strength)
            if own is not None:
                rows = mix(at, own[1], one.strength)
                fps = float(batch.fps_N[n])
                position_TA[rows] = rules.positions(own[0], frame=one.frame, fps=fps)
                is_target_T[rows] = True
                at = rows.stop
    told = sorted({(n, one.strength) for n, each in enumerate(conditions) for one in each})
    level_row_T = batch.level_row_T.clone()
    for row, (n, strength) in enumerate(told, start=batch.num_levels):
        is_this_T = (batch.segment_T == n) & (strength_T1[:, 0] == torch.tensor(strength))
        level_row_T[is_this_T] = row
    changed = replace(
        batch, position_TA=position_TA, level_row_T=level_row_T, is_target_T=is_target_T
    ).with_method(ConditionLevels(rows=len(told)))
    tokens = ConditionTokens(
        given_TC=given_TC, noise_T1=noise_T1, strength_T1=strength_T1, rows=tuple(told)
    )
    return changed, tokens


def _cut(latent_CFHW: Tensor, layout: PatchLayout) -> tuple[tuple[int, int, int], Tensor]:
    return patchify(latent_CFHW.float(), layout.patch_temporal, layout.patch_spatial)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConditionedSteps:
    """What conditions change at the steps of a sampler."""

    tokens: ConditionTokens
    batch: PackedBatch
    seeds: Sequence[int]
    noise: float
    """At each step tokens of strength 1 get noise of this factor times the square of the step's
    level."""
    steps: StepLevels
    noise_SN: Tensor
    """Noise levels of the schedule for each of the S steps and N samples."""

    def start(self, noise_TC: Tensor) -> Tensor:
        """The initial state of the sampler, from standard normal noise."""
        return self.tokens.noise_T1 * noise_TC + self.tokens.given_TC

    def seen(self, state_TC: Tensor, step: int) -> Tensor:
        """The network's input at step number `step`: tokens of strength 1 get a little noise."""
        if self.noise == 0:
            return state_TC
        t_T1 = per_token(self.noise_SN[step], self.batch)
        drawn_TC = step_noise(self.batch, self.seeds, step)
        noisy_TC = self.tokens.given_TC + self.noise * drawn_TC * t_T1.square().float()
        is_hard_T1 = self.tokens.strength_T1 > 1 - _NEAR
        return torch.where(is_hard_T1, noisy_TC.to(state_TC), state_TC)

    def stepped(self, raw_TC: Tensor, step: int) -> Tensor:
        """Network output `raw_TC`, with zeros for tokens that do not move at this step.

        A token of strength s does not move while the noise level is above 1 - s.
        """
        t_T1 = per_token(self.noise_SN[step], self.batch).float()
        moves_T1 = (self.tokens.strength_T1 == 0) | (t_T1 - _NEAR < 1 - self.tokens.strength_T1)
        return raw_TC.masked_fill(~moves_T1, 0)

    def end(self, latent_TC: Tensor) -> Tensor:
        """The generated latents `latent_TC`, with the last step's noise on conditions."""
        return self.seen(latent_TC, self.steps.steps - 1)


def step_noise(batch: PackedBatch, seeds: Sequence[int], step: int) -> Tensor:
    """Standard normal noise [T, C] for step number `step`, determined by each sample's seed."""
    mixed = (np.random.SeedSequence((seed % 2**64, step)) for seed in seeds)
    drawn = [int(one.generate_state(1, np.uint64)[0]) >> 1 for one in mixed]
    return initial_noise(batch, drawn)
