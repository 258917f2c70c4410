"""Forward passes without gradients, whose predictions the loss of a step uses.

The packs of a step run once more, with null captions or without adapters. The predictions stay on
the last pipeline stage, where the loss is computed; `references` describes their use.
"""

# C patch features, T packed tokens of this context rank, N samples

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dit.batch import PackedBatch, Parts
from dit.config import ObjectiveConfig, RunConfig, TargetSchedule
from dit.distributed.data_parallel import own_passes
from dit.distributed.model_parallel import Item, rank_part, run_pipeline
from dit.distributed.watchdog import heartbeat
from dit.models.layers.adaptable import adapters_off
from dit.objectives.pack_draws import dropped_captions
from dit.objectives.training_target import training_problem
from dit.pack_wire import to_device
from dit.sizing.flops import pack_forward_flops
from dit.train.loss import mean_errors, token_errors
from dit.train.references import References
from dit.train.timers import FORWARD, timed

if TYPE_CHECKING:
    from dit.train.model_and_optimizer import ModelAndOptimizer
    from dit.train.train_state import TrainState


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkTurn:
    """A network that is trained in a step, and its regression problems."""

    model: ModelAndOptimizer
    config: RunConfig  # of this network
    items: Sequence[Item]
    references: References | None
    number: int  # number of the run's updates, including this one, for the learning rate
    averaged: int  # number of this network's updates, including this one, for its EMA
    critic: bool = False

    @property
    def prefix(self) -> str:
        """Prefix of logged names: empty for the run's main network."""
        return "critic_" if self.critic else ""


def turns(run: TrainState, packs: Sequence[PackedBatch], *, step: int) -> Iterator[NetworkTurn]:
    """Yields the networks that are trained in a step, one after the other; all ranks call it.

    The problems of each network are created after the update of the one before.
    """
    number = run.progress.updates + 1
    own: Any = {"model": run.model, "config": run.config, "number": number, "averaged": number}
    if run.critic is None:
        items, references = training_items(run, packs, step=step)
        yield NetworkTurn(**own, items=items, references=references)
        return
    from dit.train.distill.distribution_matching import critic_items, student_items

    c = run.config.distill
    due = step % c.student_every == 0
    if not (due and c.critic_alone):
        items, references = critic_items(run, packs, step=step)
        of_critic = {"model": run.critic, "config": run.config.of_critic, "critic": True}
        yield NetworkTurn(**(own | of_critic), items=items, references=references)
    if due:
        items, references = student_items(run, packs, step=step)
        own["averaged"] = step // c.student_every
        yield NetworkTurn(**own, items=items, references=references)


def training_items(
    run: TrainState, packs: Sequence[PackedBatch], *, step: int
) -> tuple[list[Item], References | None]:
    """(items, references): each pack of a step with its problem, and predictions for the loss.

    All ranks call it. The references are None if the loss needs none; in a distillation they have
    only FLOPs.
    """
    c = run.config
    if c.distill.method is not None:
        from dit.train.distill.average_velocity import average_velocity

        return average_velocity(run, packs, step=step)
    told: Any = {"null": run.null, "options": c.objective, "route": c.model.token_route}
    items = [
        training_problem(run.objective, pack, seed=c.rng.seed, step=step, **told) for pack in packs
    ]
    return items, reference_passes(run, packs, items, step=step)


@torch.no_grad()
def reference_passes(
    run: TrainState, packs: Sequence[PackedBatch], items: Sequence[Item], *, step: int
) -> References | None:
    """Predictions that the loss of a step uses, or None if it uses none; all ranks call it.

    `packs` are the packs of the step as read; `items` are the same packs after their random draws,
    with their problems. A sample with a dropped caption keeps its target, because its predictions
    with and without caption are the same. Adapters have no dropout in these passes.
    """
    options, seed, chunks = run.config.objective, run.config.rng.seed, run.model.chunks
    if options.passes_without_gradient == 0:
        return None
    factors, uncaptioned = list[Tensor](), list[Item]()
    if options.cfg_target is not None:
        every = replace(options, text_dropout=1.0)  # the same levels, noise and given frames
        for pack, (batch, problem) in zip(packs, items, strict=True):
            dropped = dropped_captions(pack, seed=seed, step=step, options=options)
            parts = batch.method(Parts)
            dropped = [dropped[sample] for sample in parts.of] if parts else dropped
            factors.append(cfg_factors(problem.noise_N, dropped, options=options))
            # Without the token route: samplers compute guidance from all tokens in all layers.
            uncaptioned.append(
                training_problem(
                    run.objective, pack, seed=seed, step=step, null=run.null, options=every
                )
            )
    passes = [batch for batch, _ in uncaptioned]
    with ExitStack() as inside:
        for chunk in chunks:
            chunk.eval()
            inside.callback(chunk.train)
        inside.enter_context(own_passes(chunks))
        without_caption = _predictions(chunks, uncaptioned)
        unadapted, errors = list[Tensor](), list[Tensor]()
        if options.drift_weight > 0 or options.preference is not None:
            for chunk in chunks:
                inside.enter_context(adapters_off(chunk))
            # With the token route, like the pass with adapters, to which they are compared.
            passes += [batch for batch, _ in items]
            if options.preference is None:
                unadapted = _predictions(chunks, items)
            else:
                errors = _errors(chunks, items, options)
    model = run.config.model.at_step(step)
    return References(
        flops=sum(pack_forward_flops(model, batch) for batch in passes),
        factor_N=factors,
        uncaptioned_TC=without_caption,
        unadapted_TC=unadapted,
        error_N=errors,
    )


def cfg_factors(noise_N: Tensor, dropped: Sequence[bool], *, options: ObjectiveConfig) -> Tensor:
    """The factor w of each sample, [N]; 1 if its caption is dropped, so that its target stays."""
    assert options.cfg_target is not None
    more_N = torch.full_like(noise_N, options.cfg_target - 1)
    if options.cfg_target_schedule is TargetSchedule.LEVEL:
        more_N = more_N * noise_N
    return 1 + more_N.masked_fill(to_device(torch.tensor(dropped), noise_N.device), 0)


def _predictions(chunks: Sequence[nn.Module], items: Sequence[Item]) -> list[Tensor]:
    """The network's predictions for `items`, each [T, C] in float32, on the last pipeline stage."""
    if not items:
        return []
    module: Any = chunks[0].module

    def forward(waiting: Iterator[Item], model: nn.Module) -> tuple[Tensor, None]:
        heartbeat("pass without gradients")
        batch, problem = next(waiting)
        with timed(FORWARD):
            return model(problem.input_TC, problem.level_M, batch), None

    mine = [rank_part(module, item) for item in items]
    return [one.float() for one in run_pipeline([*chunks], mine, forward, forward_only=True)]


def _errors(
    chunks: Sequence[nn.Module], items: Sequence[Item], options: ObjectiveConfig
) -> list[Tensor]:
    """The mean error of each sample in each of `items`, float64 [N], on the last pipeline stage."""
    module: Any = chunks[0].module

    def forward(waiting: Iterator[Item], model: nn.Module) -> tuple[Tensor, Any]:
        heartbeat("pass without gradients")
        batch, problem = next(waiting)
        with timed(FORWARD):
            prediction_TC = model(problem.input_TC, problem.level_M, batch)

        def reduce(prediction_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            error_T = token_errors(batch, problem, prediction_TC, options)
            error_N = mean_errors(batch, error_T, context=module.groups.cp)
            # The schedule divides the first value by the second; nothing reads the quotient.
            nothing = prediction_TC.new_zeros(())
            return nothing, torch.ones_like(nothing, dtype=torch.int), error_N

        return prediction_TC, reduce

    mine = [rank_part(module, item) for item in items]
    return run_pipeline([*chunks], mine, forward, forward_only=True)
