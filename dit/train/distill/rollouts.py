"""Rollouts: the student samples from noise without gradients; networks predict at its states.

1. begin      noise at the first level, and a drawn step of the student for each sample
2. rollout    the student's steps to the noise level at which the drawn step begins
3. Passes     predictions of a network for noisy packs, and their FLOPs
"""

# C patch features, T packed tokens, N samples, S + 1 levels of S steps

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from dit.batch import PackedBatch
from dit.config import Rollout, Sampler
from dit.distributed.model_parallel import whole_outputs
from dit.objectives.noise import draw_noise
from dit.objectives.objective import SamplingPath
from dit.objectives.pack_draws import Draw, DrawContext
from dit.objectives.registry import sampling_path
from dit.objectives.training_target import drawn_pack
from dit.objectives.trajectory import NoisyPack, draw_steps, levels_of_steps
from dit.pack_wire import to_device
from dit.sizing.flops import pack_forward_flops
from dit.train.timers import FORWARD, timed

if TYPE_CHECKING:
    from dit.train.train_state import TrainState


class RolloutDraws(NamedTuple):
    """Random streams of a rollout: for its noise, and for the drawn step."""

    noise: Draw
    step: Draw


OF_STUDENT = RolloutDraws(noise=Draw.NOISE, step=Draw.STUDENT_STEP)
OF_CRITIC = RolloutDraws(noise=Draw.CRITIC_ROLLOUT, step=Draw.CRITIC_STEP)


@dataclass(kw_only=True, slots=True)
class Passes:
    """Forward passes without gradients within a training step, and their FLOPs so far."""

    run: TrainState
    path: SamplingPath
    step: int
    flops: int = 0

    @classmethod
    def of(cls, run: TrainState, *, step: int) -> Passes:
        return cls(run=run, path=sampling_path(run.config.objective), step=step)

    def answers(
        self,
        chunks: Sequence[nn.Module],
        noisy: Sequence[NoisyPack],
        batches: Sequence[PackedBatch | None],
    ) -> list[Tensor]:
        """Raw outputs [T, C] of the network `chunks` for each of `noisy`; adds their FLOPs.

        `batches` has for each of `noisy` a pack with the texts to use instead, or None for its own.
        """
        items = [
            (one.batch if batch is None else batch, one.asked(self.path, batch))
            for one, batch in zip(noisy, batches, strict=True)
        ]
        model = self.run.config.model.at_step(self.step)
        self.flops += sum(pack_forward_flops(model, batch) for batch, _ in items)
        with timed(FORWARD):
            return whole_outputs(chunks, items, doing="pass without gradients")

    def guided(
        self,
        chunks: Sequence[nn.Module],
        noisy: Sequence[NoisyPack],
        uncaptioned: Sequence[PackedBatch],
    ) -> list[Tensor]:
        """The teacher's raw outputs [T, C] for `noisy`, guided against the `uncaptioned` packs.

        With a guidance scale of 1 there are no passes for the uncaptioned packs.
        """
        scale = self.run.config.teacher_guidance
        if scale == 1:
            return self.answers(chunks, noisy, [None] * len(noisy))
        both = self.answers(chunks, [*noisy, *noisy], [*[None] * len(noisy), *uncaptioned])
        with_TC, without_TC = both[: len(noisy)], both[len(noisy) :]
        return [u + scale * (v - u) for v, u in zip(with_TC, without_TC, strict=True)]


@contextmanager
def no_dropout(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """A context without dropout in `chunks`; after it they are in training mode."""
    for chunk in chunks:
        chunk.eval()
    try:
        yield
    finally:
        for chunk in chunks:
            chunk.train()


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutStart:
    """A pack where the student's rollout begins, with all random draws of the rollout."""

    noisy: NoisyPack
    uncaptioned: PackedBatch
    context: DrawContext
    level_SN: Tensor  # float64 on the CPU: levels of the student's steps
    step_N: Tensor  # on the CPU: the drawn step of each sample
    rng: torch.Generator  # for the noise at the first level and, with LCM, at later levels


def begin(passes: Passes, pack: PackedBatch, draws: RolloutDraws) -> RolloutStart:
    """Draws noise and a step of the student for the samples of `pack`.

    The noisy latents are noise at the first level; with `distill.rollout=data` they are noisy data
    at the level where the drawn step begins.
    """
    c, path, where = passes.run.config, passes.path, pack.latent_TC.device
    told = {"seed": c.rng.seed, "step": passes.step, "null": passes.run.null}
    batch, context = drawn_pack(pack, **told, options=c.objective)
    uncaptioned, _ = drawn_pack(pack, **told, options=replace(c.objective, text_dropout=1.0))
    rng = context.rng(draws.noise, where)
    noise_TC = draw_noise(batch, rng).double()
    level_SN = path.schedule(batch.latent_tokens, num_steps=c.distill.steps)
    step_N = draw_steps(batch.num_samples, context.rng(draws.step), steps=c.distill.steps)
    level_N, state_TC = to_device(level_SN[0], where), path.start(noise_TC)
    if c.distill.rollout is Rollout.DATA:
        level_N = to_device(levels_of_steps(level_SN, step_N), where)
        state_TC = NoisyPack.of(path, batch, batch.latent_TC.double(), level_N, noise_TC).state_TC
    return RolloutStart(
        noisy=NoisyPack(batch=batch, state_TC=state_TC, level_N=level_N),
        uncaptioned=uncaptioned,
        context=context,
        level_SN=level_SN,
        step_N=step_N,
        rng=rng,
    )


def rollout(passes: Passes, starts: Sequence[RolloutStart]) -> list[NoisyPack]:
    """The student's noisy latents at the level where the drawn step of each sample begins."""
    c, noisy = passes.run.config.distill, [start.noisy for start in starts]
    for number in range(1, c.steps if c.rollout is Rollout.SIMULATE else 1):
        # Packs whose samples have all arrived take no further pass.
        going = [
            index for index, start in enumerate(starts) if bool((start.step_N >= number).any())
        ]
        answers = passes.answers(
            passes.run.model.chunks, [noisy[index] for index in going], [None] * len(going)
        )
        for index, raw_TC in zip(going, answers, strict=True):
            start, now = starts[index], noisy[index]
            end_N = levels_of_steps(start.level_SN, start.step_N.clamp(max=number))
            end_N = to_device(end_N, raw_TC.device)
            if c.sampler is Sampler.LCM:
                noise_TC = draw_noise(now.batch, start.rng).double()
                noisy[index] = now.renoised(passes.path, raw_TC, end_N, noise_TC)
            else:
                noisy[index] = now.moved(passes.path, raw_TC, end_N)
    return noisy
