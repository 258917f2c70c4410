"""Validation: held-out losses of the weights and their average (EMA), then samples.

Every validation takes the same packs with the same noise at the same noise levels, so that two of
them differ only by the weights. A pack is evaluated at each of `validation.quantiles` quantiles of
the noise levels that training draws, and the losses are reported separately:

    val_loss                mean over all quantiles: an estimate of the training loss
    val_loss_q10            at the quantile 0.1, which has little noise; q90 has much
    val_loss_sound          of the tokens of sound, in networks with sound; all others are of
                            frames
    val_loss_image_32       over images; the side of their latents, sqrt(rows columns), is 32 if
                            rounded to a power of two
    val_loss_video8_32      over videos with such latents and at most 8 latent frames (a power of
                            two)

With `validation.fixed_levels` each sample is evaluated once, at its own noise level, and a loss is
the mean over samples of the mean over a sample's tokens:

    val_loss                over all samples
    val_loss_k3             over samples at the level 3 / 8

With an average of the weights there are also val_loss_ema, val_loss_ema_q10, ...; and for each of
`validation.sets` there are val_NAME_loss, ... A first validation at or below `validation.target`
ends the run, and logs with its losses

    target_samples          samples that the run has seen until then
    target_s                seconds of its steps and validations, over all its starts
"""

# N samples of a pack

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from dit.batch import FixedLevels, NullInputs, PackedBatch
from dit.config import LossMean, ModelConfig, RunConfig, ValidationConfig
from dit.data import ValidationPacks, validation_groups
from dit.data.preflight import validation_sets
from dit.data.rejections import RefusedSample
from dit.distributed.collective_errors import from_first_rank
from dit.distributed.data_parallel import gathered_weights, own_passes
from dit.distributed.model_parallel import FullForward, Item
from dit.distributed.pack_broadcast import Replica
from dit.distributed.process_groups import device
from dit.distributed.watchdog import heartbeat
from dit.models.layers.adaptable import FROZEN, adapters_off
from dit.objectives.objective import TrainingObjective
from dit.objectives.training_target import (
    fixed_level_problem,
    validation_pack,
    validation_problem,
)
from dit.pack_wire import pack_to
from dit.sizing.flops import work_of_packs
from dit.stored_samples import LEVELS
from dit.train.loss import Loss
from dit.train.metrics.interval_metrics import quantiles
from dit.train.metrics.target import compared_loss
from dit.train.model_and_optimizer import ModelAndOptimizer
from dit.train.step import run_schedule
from dit.train.train_state import DrawnSamples, TrainState

Sums = dict[str, tuple[float, float]]  # error and its divisor, by the name of a loss


def read_validation_packs(
    config: RunConfig, replica: Replica, *, rank: int, world_size: int
) -> dict[str, ValidationPacks]:
    """Packs that this replica reads for each validation set, by the name of the set's loss.

    All ranks call it. The samples of a pack depend on all samples before them: the first rank
    determines them from the headers of the tar files, and each replica reads its own packs.
    """
    indices = range(rank, config.train.eval_iters, world_size)
    sets = validation_sets(config).items()
    return {name: _read_packs(one, replica, indices) for name, one in sets}


def _read_packs(config: RunConfig, replica: Replica, indices: Sequence[int]) -> ValidationPacks:
    # Called only on ranks that read.
    opened = cache(
        lambda: validation_groups(config, work=work_of_packs(config.model, config.dataset))
    )
    plan = from_first_rank(lambda: opened().plan(config.train.eval_iters))
    late: list[RefusedSample] = []

    def own() -> Iterator[PackedBatch]:
        for pack in opened().read(plan.of(indices)):
            heartbeat("read of packs")
            yield pack
        late.extend(opened().late)

    packs = replica.broadcast(own(), torch.device("cpu"))
    every: list[list[RefusedSample]] = [late] * dist.get_world_size()
    dist.all_gather_object(every, late)
    return plan.packs(packs, late=chain(*every))


def validation_round(run: TrainState) -> tuple[dict[str, Any], DrawnSamples | None]:
    """Validates at this step; returns (losses with the seconds taken, generated samples).

    The samples are None on all ranks but the first. All ranks call it.
    """
    began = time.perf_counter()
    values: dict[str, Any] = {}
    for name, packs in run.validation.items():
        values |= validate(
            run.model,
            packs.packs,
            objective=run.objective,
            config=run.config,
            name=name,
            null=run.null,
        )
    if run.progress.step and run.config.validation.is_reached_by(compared_loss(values)):
        values |= {"target_samples": run.progress.consumed_samples}
    validated = time.perf_counter()
    samples = draw_samples(run)
    if run.validation:
        values |= {"validation_s": validated - began}
    if run.samples is not None:
        values |= {"sampling_s": time.perf_counter() - validated}
    return values | (samples.quality if samples else {}), samples


@torch.no_grad()
def validate(
    model: ModelAndOptimizer,
    packs: list[PackedBatch],
    *,
    objective: TrainingObjective,
    config: RunConfig,
    name: str = "val_loss",
    null: NullInputs | None = None,
) -> dict[str, float]:
    """Losses of the weights, and of their EMA if there is one, over the packs of all ranks.

    Returns a dict whose keys begin with `name`; those of the EMA with `name` and `_ema`. Noise,
    numbers of given frames, and the captions that `null` replaces depend on the seed and the pack;
    drawn latents (`validation.latents`) on the seed and the sample. Images are never dropped. The
    state of training does not change.
    """
    with gathered_weights(model.chunks):
        problems = partial(_problems, packs, objective, config, null)
        losses = _losses(model, problems, config, name=name)
        if model.ema is not None:
            with model.ema.as_weights(model.chunks):
                losses |= _losses(model, problems, config, name=f"{name}_ema")
    return losses


def _losses(
    model: ModelAndOptimizer,
    problems: Callable[[float | None], Iterator[list[Item]]],
    config: RunConfig,
    *,
    name: str,
) -> dict[str, float]:
    fixed, options = config.validation.fixed_levels, config.objective
    if fixed:
        options = replace(options, loss_mean=LossMean.SAMPLE)
    sums: defaultdict[str, torch.Tensor] = defaultdict(lambda: torch.zeros(2).double())
    for chunk in model.chunks:
        chunk.eval()
    with own_passes(model.chunks):
        for quantile in [None] if fixed else quantiles(config.validation.quantiles):
            for items in problems(quantile):
                heartbeat("validation")
                losses = run_schedule(model.chunks, items, options=options, forward_only=True)
                for loss, batch in losses:
                    groups = _groups(batch, config.model, config.validation)
                    for ending, both in _sums_of(loss, batch, groups, quantile):
                        sums[f"{name}{ending}"] += both
    for chunk in model.chunks:
        chunk.train()
    return _mean_over_ranks({key: tuple(both.tolist()) for key, both in sums.items()})


def _sums_of(
    loss: Loss, batch: PackedBatch, groups: list[tuple[str, ...]], quantile: float | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """(suffix of a loss's name, (error, divisor) [2]) for a pack as a whole and for parts of it.

    The parts are its quantile of the noise level, each other token stream, and groups of samples:
    `groups` names, for each sample, those to which it belongs.
    """
    each_N2 = loss.of_samples(batch).cpu()
    yield "", each_N2.sum(0)
    if quantile is not None:
        yield f"_q{100 * quantile:.3g}", each_N2.sum(0)
    for stream in loss.others:
        yield f"_{stream}", loss.of_stream(stream, batch).sum(0).cpu()
    for names, one in zip(groups, each_N2, strict=True):
        yield from ((f"_{name}", one) for name in names)


def _groups(
    batch: PackedBatch, model: ModelConfig, validation: ValidationConfig
) -> list[tuple[str, ...]]:
    """Names of the groups of samples to which each sample of `batch` belongs."""
    kinds = [kind(grid, model) for grid in batch.grids]
    levels = batch.method(FixedLevels) if validation.fixed_levels else None
    if levels is None:
        return [(one,) for one in kinds]
    return [(one, f"k{k}") for one, k in zip(kinds, levels.indices, strict=True)]


def _problems(
    packs: list[PackedBatch],
    objective: TrainingObjective,
    config: RunConfig,
    null: NullInputs | None,
    quantile: float | None,
) -> Iterator[list[Item]]:
    """Regression problems of a few packs at a time, at one quantile or each at its fixed level."""
    c = config.validation
    told = {"options": config.objective, "latents": c.latents}
    told |= {"null": null, "text_dropout": c.text_dropout}
    # A few at a time, enough to fill a pipeline, so that memory does not grow with eval_iters.
    at_once, seed = config.model.pipeline_model_parallel_size, config.rng.seed
    for first in range(0, len(packs), at_once):
        moved = (pack_to(pack, device()) for pack in packs[first : first + at_once])
        drawn = (validation_pack(one, seed=seed, **told) for one in moved)
        problem = partial(fixed_level_problem, levels=LEVELS)
        if quantile is not None:
            problem = partial(validation_problem, quantile=quantile)
        yield [(batch, problem(objective, batch, seed=seed)) for batch in drawn]


def kind(grid: tuple[int, int, int], model: ModelConfig) -> str:
    """Kind of a sample in the names of metrics, such as image_32 or video8_32.

    `grid` is its size in patches. The kind has its latent frames and the side of its latent in
    cells, both rounded to powers of two.
    """
    frames = grid[0] * model.patch_temporal
    side = math.sqrt(grid[1] * grid[2]) * model.patch_spatial
    medium = "image" if frames == 1 else f"video{2 ** math.ceil(math.log2(frames))}"
    return f"{medium}_{2 ** round(math.log2(side))}"


def _mean_over_ranks(mine: Sums) -> dict[str, float]:
    """Mean of each loss over all ranks, by name; sums are added in the order of the ranks.

    A loss of no token is left out, such as that of the sound of clips without one.
    """
    every: list[Sums] = [{}] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    # Short names first: the loss of all before those of its parts.
    names = sorted({name for sums in every for name in sums}, key=lambda n: (len(n), n))
    means = {}
    for name in names:
        errors, counts = zip(*(sums[name] for sums in every if name in sums), strict=True)
        if total := sum(counts):
            means[name] = sum(errors) / total
    return means


def draw_samples(run: TrainState) -> DrawnSamples | None:
    """Calls `run.samples` with the model, whose weights are the EMA if there is one.

    A frozen adapter (`lora.frozen_adapter`) is off. Weights, random numbers and device memory are
    restored afterwards, so training is not affected. Only the first rank gets the result.
    """
    if run.samples is None:
        return None
    heartbeat("sampling")
    chunks, ema, where = run.model.chunks, run.model.ema, device()
    with ExitStack() as inside:
        # Loading a decoder may draw initial weights that it then overwrites.
        inside.enter_context(torch.random.fork_rng([where] if where.type == "cuda" else []))
        inside.enter_context(gathered_weights(chunks))
        if ema is not None:
            inside.enter_context(ema.as_weights(chunks))
        model = FullForward(chunks).eval()
        inside.enter_context(adapters_off(model, [FROZEN]))
        samples = run.samples(run, model)
        model.train()
    if where.type == "cuda":
        torch.cuda.empty_cache()
    return samples
