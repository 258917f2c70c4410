"""`distill.method=opd`: on-policy distillation by average velocity.

1. rollout    the student's own Euler trajectory to the noise level at which a drawn step begins
2. teacher    the teacher's guided Euler trajectory, in smaller steps, from that state to the noise
              level at which the drawn step ends
3. problem    the teacher's mean velocity in 2 is the target of the student at the end of 1

If every step is learned, the student's trajectory ends where the teacher's would. With one step of
the teacher (`distill.teacher_steps=1`) the target is the teacher's velocity, which is the mean
matching of DiffusionOPD (arXiv:2605.15055): Euler's error of large steps stays, and only guidance
is learned.
"""

# C patch features, T packed tokens, N samples, S + 1 levels of S steps

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from dit.batch import PackedBatch
from dit.distributed.data_parallel import own_passes
from dit.distributed.model_parallel import Item
from dit.objectives.training_target import problem_of_velocity
from dit.objectives.trajectory import NoisyPack, levels_of_steps, mean_velocity
from dit.pack_wire import to_device
from dit.train.distill.rollouts import OF_STUDENT, Passes, RolloutStart, begin, no_dropout, rollout
from dit.train.distill.teacher import taught
from dit.train.references import References

if TYPE_CHECKING:
    from dit.train.train_state import TrainState


@torch.no_grad()
def average_velocity(
    run: TrainState, packs: Sequence[PackedBatch], *, step: int
) -> tuple[list[Item], References]:
    """(items, references) of a step: each pack with the student's regression problem, and FLOPs.

    All ranks call it. The references have only the FLOPs of the passes without gradients. The
    latents of packs are read only at clean tokens.
    """
    passes = Passes.of(run, step=step)
    with no_dropout(run.model.chunks):
        starts = [begin(passes, pack, OF_STUDENT) for pack in packs]
        # First all passes of the student, then those of the teacher: a rank with fewer passes of
        # one network waits for the others before it goes on to the next.
        with own_passes(run.model.chunks):
            noisy = rollout(passes, starts)
        with taught(run) as teacher, own_passes(teacher):
            ends = _ends(passes, teacher, noisy, starts)
    items, last = [], run.config.distill.steps - 1
    for begun, start, end in zip(starts, noisy, ends, strict=True):
        told = {"state_TC": start.state_TC, "velocity_TC": mean_velocity(start, end)}
        problem = problem_of_velocity(run.objective, start.batch, start.level_N, **told)
        # The mean velocity leads to a latent only in the last step.
        made_N = to_device(begun.step_N == last, start.level_N.device)
        items.append((start.batch, replace(problem, made_N=made_N)))
    return items, References(factor_N=[], flops=passes.flops)


def _ends(
    passes: Passes,
    teacher: Sequence[nn.Module],
    noisy: Sequence[NoisyPack],
    starts: Sequence[RolloutStart],
) -> list[NoisyPack]:
    """The teacher's noisy latents at the end of the drawn step of each of `starts`."""
    steps, ends = passes.run.config.distill.teacher_steps, [*noisy]
    uncaptioned = [start.uncaptioned for start in starts]
    for number in range(1, steps + 1):
        answers = passes.guided(teacher, ends, uncaptioned)
        for index, (start, raw_TC) in enumerate(zip(starts, answers, strict=True)):
            first_N, last_N = (levels_of_steps(start.level_SN, start.step_N + k) for k in (0, 1))
            level_N = to_device(torch.lerp(first_N, last_N, number / steps), raw_TC.device)
            ends[index] = ends[index].moved(passes.path, raw_TC, level_N)
    return ends
