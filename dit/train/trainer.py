"""A whole run: read, step, average, validate, log, save; until the last step or a signal."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dit.batch import PackedBatch
from dit.checkpoint_paths import has_adapters
from dit.config import Recompute, RunConfig
from dit.data import (
    PackLoader,
    build_train_loader,
    check_data,
    dataset_card,
    deaths_in_words,
    fill_line,
    forecast_packs,
    null_inputs,
    passes_line,
    route_lines,
)
from dit.distributed.collective_errors import from_first_rank, on_all_ranks
from dit.distributed.entry import StopSignals, shown_at_once, started_with
from dit.distributed.pack_broadcast import Replica
from dit.distributed.process_groups import device, device_memory, process_groups
from dit.distributed.watchdog import heartbeat
from dit.models.recomputation import choose_recomputation
from dit.objectives.registry import training_objective
from dit.objectives.training_target import training_problem
from dit.progress import counted
from dit.streams import keep_streams
from dit.train.attention_choice import with_attention
from dit.train.checkpoint.async_save import Saver
from dit.train.checkpoint.mirror import Mirror, restored
from dit.train.checkpoint.resume import (
    close_saver,
    finish_all,
    finish_save,
    resume,
    run_folder,
    save,
)
from dit.train.checkpoint.starting_point import starting_point
from dit.train.memory import collect_after, manual_gc, memory_explained
from dit.train.metrics.interval_metrics import IntervalMetrics
from dit.train.metrics.run_logger import RunLogger
from dit.train.metrics.step_metrics import (
    SKIPPED_FILE,
    SkippedStep,
    StepMetrics,
    count_packs,
    gather_skipped_step,
    step_values,
    sum_step_metrics,
)
from dit.train.model_and_optimizer import (
    Initialise,
    build_model_and_optimizer,
    initialise_weights,
    leave_to_checkpoint,
)
from dit.train.optimizer.update import learning_rate
from dit.train.reference_passes import reference_passes
from dit.train.start_checks import check_settings
from dit.train.step import forward_backward, optimizer_step, prepare_update
from dit.train.timers import DATA, elapsed, timed
from dit.train.train_state import Export, InitialWeights, ReadFolder, Samples, TrainState
from dit.train.validation import read_validation_packs, validation_round

Values = dict[str, Any]
_VALIDATING = "validating"


class ExitCode(IntEnum):
    """How a run ended, for the program that started it."""

    DONE = 0
    ERROR = 1
    STOPPED = 75  # by a signal (StopSignals), after a checkpoint; EX_TEMPFAIL: start it again


def pretrain(
    config: RunConfig,
    *,
    export: Export | None = None,
    open_samples: Callable[[TrainState], Samples] | None = None,
    start: InitialWeights | None = None,
    read_folder: ReadFolder | None = None,
) -> ExitCode:
    """Trains as configured, from the newest checkpoint where there is one.

    `export` is called with each new checkpoint; `open_samples` returns what writes the samples of
    each validation; a new run has its weights from `start`, and frozen weights in a Diffusers
    folder are opened by `read_folder`. The process group is initialised (`start_processes`).

    Raises:
        ValueError: checkpoint.load_hf is given, and no `start`.
        FloatingPointError: too many steps in a row were skipped, or all of them.
    """
    explained = memory_explained(config)
    keep_streams()
    with ExitStack() as ends, shown_at_once(), deaths_in_words(), explained as memory:
        run = _prepare(config, ends, start=start, read_folder=read_folder, timed=True)
        memory.model = run.model
        run.export = export
        run.samples = open_samples(run) if open_samples is not None else None
        ends.enter_context(manual_gc(config.train))
        logger = RunLogger(run)
        stop_signals = ends.enter_context(StopSignals())
        ends.callback(logger.close)
        if run.loader is not None:
            ends.callback(run.loader.close)
        ends.callback(run.replica.close)
        ends.callback(close_saver, run, logger)
        return _train(run, logger, stop_signals)


def measure_steps(
    config: RunConfig,
    *,
    warm_up: int,
    steps: int,
    around: AbstractContextManager,
    fill: Initialise | None = None,
    read_folder: ReadFolder | None = None,
) -> list[Values]:
    """The values that `steps` steps inside `around` would log, after `warm_up` other steps.

    Nothing is saved or validated, and Ctrl-C ends the process at once.

    Raises:
        FloatingPointError: every one of them was skipped, which takes less time than an update.
    """
    explained = memory_explained(config)
    with ExitStack() as ends, shown_at_once(), deaths_in_words(), explained as memory:
        run, no_signals = _prepare(config, ends, fill=fill, read_folder=read_folder), StopSignals()
        memory.model = run.model
        if run.loader is not None:
            ends.callback(run.loader.close)
        ends.callback(run.replica.close)
        ends.enter_context(manual_gc(config.train))
        for _ in range(warm_up):
            _step(run, no_signals)
        warm = run.progress.step
        with around:
            values = [_step(run, no_signals)[0] for _ in range(steps)]
        _check_updates(run, since=warm)
        return values


def _prepare(
    config: RunConfig,
    ends: ExitStack,
    *,
    fill: Initialise | None = None,
    start: InitialWeights | None = None,
    read_folder: ReadFolder | None = None,
    timed: bool = False,
) -> TrainState:
    """Builds all parts and loads the checkpoint; `ends` unlocks the run folder.

    `timed` says whether attention may be timed.
    """
    if config.train.deterministic:
        _be_deterministic()
    check_settings(config)
    config, notes = _with_recomputation(config)
    heartbeat("opening of the data")
    groups = process_groups()
    replica, ranks = Replica(groups), (groups.dp.rank(), groups.dp.size())
    # Data first: their errors show before anything is built or written.
    notes += from_first_rank(lambda: check_data(config)).notes
    notes += from_first_rank(lambda: _forecast_notes(config))
    loader = None
    if replica.reads:
        loader = build_train_loader(config, rank=ranks[0], world_size=ranks[1])
    folder = ends.enter_context(run_folder(config))
    notes += from_first_rank(lambda: restored(config))
    # Drawing takes minutes for a large model; all ranks must agree on it.
    found = from_first_rank(lambda: starting_point(config))
    config, lines = with_attention(config, timed=timed)
    notes += lines
    adapted = None
    if config.lora.enabled or has_adapters(found):
        from dit.train.checkpoint.adapters import adapters_at_start

        adapted = adapters_at_start(config, found, read_folder, notes.append)
        fill = adapted.first_values(config, fill)
    heartbeat("build of the model")
    model = build_model_and_optimizer(
        config,
        groups,
        fill=fill or _first_values(config, found, start),
        adapters=adapted.run.adapters if adapted else None,
        frozen=adapted.frozen_shapes if adapted else None,
        load_base=partial(adapted.load_base, config=config, groups=groups) if adapted else None,
    )
    objective = training_objective(config.objective)
    run = TrainState(
        config=config,
        folder=folder,
        replica=replica,
        loader=loader,
        validation=read_validation_packs(config, replica, rank=ranks[0], world_size=ranks[1]),
        model=model,
        interval_metrics=IntervalMetrics(config, model, objective),
        objective=objective,
        null=null_inputs(config, device()),
        card=dataset_card(config),
        notes=notes,
        start=start,
    )
    if run.folder is not None:
        _open_saver(run, run.folder, adapters=adapted.run.as_json() if adapted else None)
    heartbeat("load of the checkpoint")
    resume(run)
    model.at_step(run.progress.step)
    dist.barrier()  # nothing is written before every rank is ready
    return run


def _be_deterministic() -> None:
    torch.use_deterministic_algorithms(True)
    # Nothing here reads memory that it has not written, and each empty tensor would be filled.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"  # Transformer Engine's attention


def _open_saver(run: TrainState, folder: Path, *, adapters: str | None) -> None:
    """`adapters` is their `lora.json`."""
    run.saver = Saver(folder, run.config, adapters=adapters)
    if dist.get_rank() == 0:
        run.saver.clear()  # frees space before anything is written
        run.mirror = Mirror(run.config) if run.config.checkpoint.mirror else None


def _forecast_notes(config: RunConfig) -> list[str]:
    """How often samples are seen, what a token route spares, and what is not as it might be."""
    forecast = forecast_packs(config)
    lines = [line for of in (passes_line, fill_line) if (line := of(config, forecast))]
    return [*lines, *route_lines(config, forecast)]


def _first_values(
    config: RunConfig, found: Path | None, start: InitialWeights | None
) -> Initialise:
    """What fills a new model whose weights are all trained."""
    if found is not None:
        return leave_to_checkpoint
    if start is not None:
        return start.fill
    if config.checkpoint.load_hf is not None:
        raise ValueError(
            f"checkpoint.load_hf={config.checkpoint.load_hf} is read by recipes/pretrain_dit.py"
            " alone; leave it out here"
        )
    return initialise_weights


def _with_recomputation(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """What `recompute_granularity=auto` stands for on these devices, and a line that says so."""
    if config.model.recompute_granularity is not Recompute.AUTO:
        return config, []
    known = [size for size in on_all_ranks(device_memory) if size is not None]
    size = min(known, default=None)  # ranks that share a layer must recompute alike
    chosen = choose_recomputation(config, world_size=dist.get_world_size(), device_memory=size)
    return chosen.config, [f"recomputation {chosen.reason}"]


def _train(run: TrainState, logger: RunLogger, stop_signals: StopSignals) -> ExitCode:
    c, start = run.config, run.progress.step
    if c.validation.at_start and run.progress.step == 0:
        logger.busy(_VALIDATING)
        losses, samples = validation_round(run)
        logger.log_start(losses)
        logger.log_samples(samples)
    while run.progress.step < c.train.train_iters:
        values, skipped, sums = _step(run, stop_signals)
        if not sums.writing:
            finish_save(run, logger)
        step = run.progress.step
        due = c.train.eval_interval and (step % c.train.eval_interval == 0 or _is_last(run))
        if due:
            logger.busy(_VALIDATING)
        losses, samples = validation_round(run) if due else ({}, None)
        logger.log_step(values | losses, skipped)
        logger.log_samples(samples)
        too_many_skips = run.progress.skipped_in_a_row >= c.train.max_skipped_steps
        stop = sums.stops > 0
        if step % c.checkpoint.save_interval == 0 or stop or _is_last(run) or too_many_skips:
            logger.gather_refused()
            val_loss = losses.get("val_loss_ema", losses.get("val_loss", math.inf))
            save(run, logger, val_loss=val_loss)
        if too_many_skips:
            finish_all(run, logger)
            raise _too_many_skips(run, skipped)
        if stop:
            finish_all(run, logger)
            logger.info(f"stopped on request; the same command continues: {started_with()}")
            logger.info_cost()
            return ExitCode.STOPPED
    finish_all(run, logger)
    _check_updates(run, since=start)
    logger.info(f"done after step {run.progress.step}")
    logger.info_cost()
    return ExitCode.DONE


def _too_many_skips(run: TrainState, last: SkippedStep | None) -> FloatingPointError:
    return FloatingPointError(
        f"{run.progress.skipped_in_a_row} steps in a row were skipped, as many as"
        f" train.max_skipped_steps allows. Step {run.progress.step}: {last}{_skipped_file(run)}."
        " Look at these samples, or lower optimizer.lr; the run goes on from its checkpoint of"
        " this step"
    )


def _check_updates(run: TrainState, *, since: int) -> None:
    """Raises FloatingPointError where every step after `since`, or of the run, was skipped."""
    steps = run.progress.step - since or run.progress.step
    if 0 < steps <= run.progress.skipped_in_a_row:
        raise FloatingPointError(
            f"every step was skipped ({counted(steps, 'step')}): no loss and gradient was finite,"
            f" and no weight has changed{_skipped_file(run)}. Look at these samples and at the"
            " weights that the run started from, or lower optimizer.lr"
        )


def _skipped_file(run: TrainState) -> str:
    return f"; {run.folder / SKIPPED_FILE} has those of every step" if run.folder else ""


def _is_last(run: TrainState) -> bool:
    return run.progress.step >= run.config.train.train_iters


def _step(
    run: TrainState, stop_signals: StopSignals
) -> tuple[Values, SkippedStep | None, StepMetrics]:
    """One step; returns the values to log, why it was skipped, and its sums over all ranks.

    A skipped step uses up its data and its number; learning rate, Adam and average do not change.
    """
    c, began = run.config, time.perf_counter()
    step, update_number = run.progress.step + 1, run.progress.updates + 1
    heartbeat("read of packs", step=step)
    run.model.at_step(step)
    elapsed()  # drops the seconds of validation and saving
    with timed(DATA):
        packs = _next_packs(run)
    items = [
        training_problem(
            run.objective,
            pack,
            seed=c.rng.seed,
            step=step,
            null=run.null,
            options=c.objective,
            route=c.model.token_route,
        )
        for pack in packs
    ]
    references = reference_passes(run, packs, items, step=step)
    # Before the device has the work of the step: behind it, the device would wait for the host.
    counts = count_packs(run, [batch for batch, _ in items], references)
    if run.loader is not None:
        run.interval_metrics.add_packs(packs)
    rank_loss = forward_backward(run.model, items, config=c, references=references)
    run.interval_metrics.before_update(step)
    sums = sum_step_metrics(
        run, counts, rank_loss, prepare_update(run.model), stop=stop_signals.received
    )
    update = optimizer_step(
        run.model, config=c, number=update_number, loss=sums.loss, grad_norm=sums.grad_norm
    )
    run.progress = run.progress.after(
        samples=int(sums.samples), of_datasets=sums.of_datasets, skipped=update.skipped
    )
    skipped = None
    if not update.skipped:
        run.interval_metrics.add_losses(items, rank_loss)
    else:
        present = [key for pack in packs for key in pack.keys] if run.loader else []
        skipped = gather_skipped_step(
            step, loss=sums.loss, not_finite=rank_loss.not_finite, present=present
        )
    collect_after(step, c.train)
    rate, seconds = learning_rate(c, update_number), time.perf_counter() - began
    values = step_values(run, sums, update, rate=rate, seconds={"step_time": seconds} | elapsed())
    values |= run.model.modules[0].step_values()
    return values | run.interval_metrics.read(run.progress, update), skipped, sums


def _next_packs(run: TrainState) -> list[PackedBatch]:
    """This replica's packs of the next step; begins to read those of the step after it."""
    c, loader = run.config, run.loader
    count = c.train.global_batch_size // run.data_ranks.size()
    if run.replica.pending is None:
        packs = run.replica.broadcast(_read(loader, count), device())
    else:
        packs = run.replica.wait(device())
        if loader is not None:
            loader.catch_up()
    # A rank without others has nobody to send to, but a GPU wants its packs in pinned memory.
    worth_it = not run.replica.alone or device().type == "cuda"
    # Without workers this process cannot read and compute at once.
    ahead = c.dataset.num_workers > 0 and worth_it
    if ahead and run.progress.step + 1 < c.train.train_iters:
        run.replica.start(loader.ahead(count) if loader is not None else ())
    return packs


def _read(loader: PackLoader | None, count: int) -> Iterator[PackedBatch]:
    assert loader is not None
    for _ in range(count):
        heartbeat("read of packs")
        yield next(loader)
