"""Held-out loss: the same packs with the same noise at the same noise levels, every time.

Two evaluations differ by the weights alone. A pack is evaluated at each of `validation.quantiles`
quantiles of the noise levels that training draws, and the losses are kept apart:

    val_loss                mean over all quantiles: an estimate of the training loss
    val_loss_q10            at the quantile 0.1: little noise; q90 is much
    val_loss_image_32       of samples of one kind: images, or videos of up to so many latent
    val_loss_video8_32      frames (a power of two), and the side of the latent, sqrt(rows columns)
                            rounded to a power of two

With an average of the weights each is there again, as val_loss_ema, val_loss_ema_q10, ...; and for
each of `validation.sets`, as val_NAME_loss, ...
"""

# N samples of a pack

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from dit.batch import PackedBatch, Problem
from dit.config import ModelConfig, RunConfig
from dit.data import (
    RejectCounts,
    ValidationPacks,
    build_val_packs,
)
from dit.distributed.model_parallel import FullForward
from dit.distributed.pack_broadcast import Replica
from dit.distributed.process_groups import device
from dit.distributed.watchdog.monitor import heartbeat
from dit.objectives import Objective, validation_problem
from dit.train.metrics.interval_metrics import quantiles
from dit.train.model_and_optimizer import ModelAndOptimizer
from dit.train.step import run_schedule
from dit.train.train_state import DrawnSamples, TrainState

Item = tuple[PackedBatch, Problem]
Sums = dict[str, tuple[float, float]]  # error and what it is to be divided by


@torch.no_grad()
def validate(
    learner: ModelAndOptimizer,
    packs: list[PackedBatch],
    *,
    objective: Objective,
    config: RunConfig,
    name: str = "val_loss",
) -> dict[str, float]:
    """The losses of the module's page, over all ranks' packs; `name` begins their names.

    Noise follows from the seed and the pack, captions are never dropped, and nothing that training
    reads is touched.
    """
    with learner.settled():
        losses = _losses(learner, packs, objective, config, name=name)
        if learner.ema is not None:
            with learner.ema.as_weights(learner.chunks):
                losses |= _losses(learner, packs, objective, config, name=f"{name}_ema")
    return losses


def _losses(
    learner: ModelAndOptimizer,
    packs: list[PackedBatch],
    objective: Objective,
    config: RunConfig,
    *,
    name: str,
) -> dict[str, float]:
    sums: defaultdict[str, torch.Tensor] = defaultdict(lambda: torch.zeros(2).double())
    for chunk in learner.chunks:
        chunk.eval()
    for quantile in quantiles(config.validation.quantiles):
        level = f"_q{100 * quantile:.3g}"
        for items in _problems(packs, objective, config, quantile):
            heartbeat("validation")
            mean = config.objective.loss_mean
            losses = run_schedule(learner.chunks, items, mean=mean, forward_only=True)
            for loss, batch in losses:
                each_N2 = loss.of_samples(batch).cpu()
                sums[name] += each_N2.sum(0)
                sums[name + level] += each_N2.sum(0)
                for grid, one in zip(batch.grids, each_N2, strict=True):
                    sums[f"{name}_{kind(grid, config.model)}"] += one
    for chunk in learner.chunks:
        chunk.train()
    return _over_ranks({key: tuple(both.tolist()) for key, both in sums.items()})


def _problems(
    packs: list[PackedBatch], objective: Objective, config: RunConfig, quantile: float
) -> Iterator[list[Item]]:
    # A few at a time, enough to fill a pipeline, so that memory does not grow with eval_iters.
    at_once = config.model.pipeline_model_parallel_size
    for first in range(0, len(packs), at_once):
        yield [
            (batch, validation_problem(objective, batch, seed=config.rng.seed, quantile=quantile))
            for batch in (pack.to(device()) for pack in packs[first : first + at_once])
        ]


def kind(grid: tuple[int, int, int], model: ModelConfig) -> str:
    """The group of samples with about so many frames and pixels, as a part of a metric's name."""
    frames = grid[0] * model.patch_temporal
    side = math.sqrt(grid[1] * grid[2]) * model.patch_spatial
    sort = "image" if frames == 1 else f"video{2 ** math.ceil(math.log2(frames))}"
    return f"{sort}_{2 ** round(math.log2(side))}"


def _over_ranks(mine: Sums) -> dict[str, float]:
    """Means over all ranks, by name; the ranks' sums are added in their order."""
    every: list[Sums] = [{}] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    names = sorted({name for sums in every for name in sums}, key=lambda n: (len(n), n))
    means = {}
    for name in names:
        errors, counts = zip(*(sums[name] for sums in every if name in sums), strict=True)
        means[name] = sum(errors) / sum(counts)
    return means


def validation_round(run: TrainState) -> tuple[dict[str, Any], DrawnSamples | None]:
    """What is written down of this step's round, with its seconds; the first rank gets samples."""
    began = time.perf_counter()
    found: dict[str, Any] = _losses_of_sets(run)
    validated = time.perf_counter()
    drawn = draw_samples(run)
    if run.validation:
        found |= {"validation_s": validated - began}
    if run.samples is not None:
        found |= {"sampling_s": time.perf_counter() - validated}
    return found | (drawn.quality if drawn else {}), drawn


def _losses_of_sets(run: TrainState) -> dict[str, float]:
    """Of the run's own held-out packs, and of each named set."""
    losses = {}
    for name, packs in run.validation.items():
        losses |= validate(
            run.learner, packs.packs, objective=run.objective, config=run.config, name=name
        )
    return losses


def draw_samples(run: TrainState) -> DrawnSamples | None:
    """Calls `run.samples` with the model, its weights the average where there is one.

    Afterwards weights, random numbers and memory of the device are as before. Returns what the
    first rank gets.
    """
    if run.samples is None:
        return None
    heartbeat("sampling")
    learner, where = run.learner, device()
    with ExitStack() as inside:
        # Loading a decoder may draw initial weights that it then overwrites.
        inside.enter_context(torch.random.fork_rng([where] if where.type == "cuda" else []))
        inside.enter_context(learner.settled())
        if learner.ema is not None:
            inside.enter_context(learner.ema.as_weights(learner.chunks))
        model = FullForward(learner.chunks).eval()
        drawn = run.samples(run, model)
        model.train()
    if where.type == "cuda":
        torch.cuda.empty_cache()
    return drawn


def validation_packs(
    config: RunConfig, replica: Replica, *, indices: Sequence[int]
) -> dict[str, ValidationPacks]:
    """This replica's packs of each validation set, by the name of its loss."""
    if not (config.train.eval_interval and config.train.eval_iters):
        return {}
    found = {"val_loss": _read_packs(config, replica, indices=indices)}
    for one in config.validation.sets:
        only = replace(config.dataset, path=one.path, blend=(), mock=False)
        only = replace(only, use_train_split_for_val=False)
        name = f"val_{one.name}_loss"
        found[name] = _read_packs(replace(config, dataset=only), replica, indices=indices)
    return found


def _read_packs(config: RunConfig, replica: Replica, *, indices: Sequence[int]) -> ValidationPacks:
    """This replica's validation packs, read once."""
    read = ValidationPacks(packs=[], tally=RejectCounts())

    def take() -> Iterator[PackedBatch]:
        nonlocal read
        read = build_val_packs(config, indices=indices)
        yield from read.packs

    packs = replica.share(take(), torch.device("cpu"))
    return replace(read, packs=packs)
