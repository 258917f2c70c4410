"""`distill.method=dmd`: distribution matching, DMD2 (arXiv:2405.14867) without a GAN loss.

1. made            latents that the student predicts, at a drawn step of its rollout or from noisy
                   data
2. critic_items    the critic learns these latents by plain flow matching
3. student_items   noise is added to the latents; the student moves from the critic's prediction
                   towards the teacher's

The student's rollout and the passes of critic and teacher have no gradient. The gradient of 3 is
known before the student's pass with gradients. That pass is a regression to the predicted latent
minus this gradient, so the usual training step computes it, with the same result on every layout.
"""

# C patch features, T packed tokens, N samples

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dit.batch import PackedBatch
from dit.distributed.data_parallel import own_passes
from dit.distributed.model_parallel import Item
from dit.objectives.noise import draw_noise
from dit.objectives.objective import TrainingObjective
from dit.objectives.pack_draws import Draw
from dit.objectives.registry import training_objective
from dit.objectives.timestep_sampling import draw_quantiles
from dit.objectives.training_target import draw_problem
from dit.objectives.trajectory import NoisyPack, distribution_gradient, regression_to
from dit.pack_wire import to_device
from dit.train.distill.rollouts import (
    OF_CRITIC,
    OF_STUDENT,
    Passes,
    RolloutDraws,
    RolloutStart,
    begin,
    no_dropout,
    rollout,
)
from dit.train.distill.teacher import taught
from dit.train.references import References

if TYPE_CHECKING:
    from dit.train.train_state import TrainState


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """Latents that the student predicts for a pack, and the states that it predicts from."""

    start: RolloutStart
    noisy: NoisyPack  # noisy latents where the drawn steps begin
    raw_TC: Tensor  # the student's raw output for `noisy`
    latent_TC: Tensor  # float64: the latents that `raw_TC` predicts; the data's on given tokens


@torch.no_grad()
def critic_items(
    run: TrainState, packs: Sequence[PackedBatch], *, step: int
) -> tuple[list[Item], References]:
    """(items, references) of a step: each pack with the critic's regression problem, and FLOPs.

    All ranks call it. The references have the FLOPs of the passes without gradients, and nothing
    else.
    """
    passes, items = Passes.of(run, step=step), list[Item]()
    every = made(passes, packs, OF_CRITIC)
    for one in every:
        batch, context = one.noisy.batch, one.start.context
        batch = replace(batch, latent_TC=one.latent_TC.float())
        noise_rng = context.rng(Draw.CRITIC_NOISE, batch.latent_TC.device)
        rngs = {"levels_rng": context.rng(Draw.CRITIC_LEVEL), "noise_rng": noise_rng}
        items.append((batch, draw_problem(judged_levels(run), batch, **rngs)))
    return items, References(factor_N=[], flops=passes.flops)


@torch.no_grad()
def student_items(
    run: TrainState, packs: Sequence[PackedBatch], *, step: int
) -> tuple[list[Item], References]:
    """(items, references) of a step: each pack with the student's regression problem, and FLOPs.

    All ranks call it. The references have the FLOPs of the passes without gradients, and nothing
    else.
    """
    assert run.critic is not None
    passes, items = Passes.of(run, step=step), list[Item]()
    every = made(passes, packs, OF_STUDENT)
    judged = [_judged(passes, one) for one in every]
    critic, uncaptioned = run.critic.chunks, [one.start.uncaptioned for one in every]
    with no_dropout(critic), own_passes(critic):
        fakes = passes.answers(critic, judged, [None] * len(judged))
    with _teacher(run) as teacher, own_passes(teacher):
        reals = passes.guided(teacher, judged, uncaptioned)
    for one, noisy, fake_TC, real_TC in zip(every, judged, fakes, reals, strict=True):
        gradient_TC = distribution_gradient(
            noisy.batch,
            one.latent_TC,
            real_TC=noisy.latent(passes.path, real_TC),
            fake_TC=noisy.latent(passes.path, fake_TC),
        )
        problem = regression_to(one.noisy, passes.path, one.raw_TC, -gradient_TC)
        every_N = torch.ones_like(problem.noise_N, dtype=torch.bool)
        items.append((one.noisy.batch, replace(problem, made_N=every_N)))
    return items, References(factor_N=[], flops=passes.flops)


@contextmanager
def _teacher(run: TrainState) -> Iterator[Sequence]:
    with no_dropout(run.model.chunks), taught(run) as teacher:
        yield teacher


def made(passes: Passes, packs: Sequence[PackedBatch], draws: RolloutDraws) -> list[Made]:
    """Latents that the student predicts for `packs`, at the steps that `draws` selects."""
    chunks, path = passes.run.model.chunks, passes.path
    with no_dropout(chunks), own_passes(chunks):
        starts = [begin(passes, pack, draws) for pack in packs]
        noisy = rollout(passes, starts)
        answers = passes.answers(chunks, noisy, [None] * len(noisy))
    found = []
    for start, there, raw_TC in zip(starts, noisy, answers, strict=True):
        target_T1, own_TC = there.batch.is_target_T[:, None], there.batch.latent_TC.double()
        latent_TC = torch.where(target_T1, there.latent(path, raw_TC), own_TC)
        found.append(Made(start=start, noisy=there, raw_TC=raw_TC, latent_TC=latent_TC))
    return found


def judged_levels(run: TrainState) -> TrainingObjective:
    """The objective of critic and teacher: the run's, with the noise levels of `distill.levels`."""
    c = run.config
    return training_objective(replace(c.objective, level_range=c.distill.levels))


def _judged(passes: Passes, one: Made) -> NoisyPack:
    """The student's latents with new noise, as inputs of teacher and critic."""
    batch, context = one.noisy.batch, one.start.context
    where = batch.latent_TC.device
    quantile_N = draw_quantiles(batch.num_samples, context.rng(Draw.STUDENT_LEVEL))
    level_N = judged_levels(passes.run).levels(quantile_N, batch.latent_tokens).double()
    noise_TC = draw_noise(batch, context.rng(Draw.STUDENT_NOISE, where)).double()
    return NoisyPack.of(passes.path, batch, one.latent_TC, to_device(level_N, where), noise_TC)
