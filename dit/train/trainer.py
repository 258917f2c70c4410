"""A whole run, until the last step or a signal: read, step, average, validate, log, save."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from dit.batch import PackedBatch
from dit.config import RunConfig
from dit.data import (
    PackLoader,
    deaths_in_words,
)
from dit.distributed.entry import StopSignals, shown_at_once, started_with
from dit.distributed.process_groups import device
from dit.distributed.watchdog import heartbeat
from dit.progress import counted
from dit.streams import keep_streams
from dit.train.checkpoint.saving import (
    close_saver,
    finish_all,
    finish_save,
    save,
)
from dit.train.memory import collect_after, manual_gc, memory_explained
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
from dit.train.metrics.target import compared_loss, reached_line
from dit.train.model_and_optimizer import (
    Initialise,
)
from dit.train.opening.data import open_data
from dit.train.opening.machine import fit
from dit.train.opening.model import build
from dit.train.opening.restore import restore
from dit.train.opening.start import Given, choose_start
from dit.train.optimizer.update import Update, learning_rate
from dit.train.reference_passes import NetworkTurn, turns
from dit.train.step import forward_backward, optimizer_step, prepare_update
from dit.train.timers import DATA, elapsed, timed
from dit.train.train_state import Export, InitialWeights, ReadFolder, Samples, TrainState
from dit.train.validation import validation_round

Values = dict[str, Any]


class ExitCode(IntEnum):
    """How a run ended, as the exit code of its program."""

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
    """Trains as `config` says, from the newest checkpoint of the run folder if there is one.

    `export` is called with each new checkpoint. `open_samples` returns the function that writes the
    samples of each validation. `start` has the weights of a new run. `read_folder` opens frozen
    weights in a Diffusers folder. The process group must be initialised (`start_processes`).

    Raises:
        ValueError: checkpoint.load_hf is set without `start`.
        FloatingPointError: too many steps in a row were skipped, or all of them.
    """
    explained = memory_explained(config)
    keep_streams()
    with ExitStack() as ends, shown_at_once(), deaths_in_words(), explained as memory:
        given = Given(weights=start, read_folder=read_folder)
        run = _open(config, given, ends, timed=True)
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
    """Takes `warm_up` steps, then `steps` steps inside `around`; returns the values of the latter.

    Nothing is saved or validated, and Ctrl-C ends the process at once. `fill` replaces the first
    values of the weights. `read_folder` opens frozen weights in a Diffusers folder.

    Raises:
        FloatingPointError: every step was skipped, which takes less time than an update.
    """
    explained = memory_explained(config)
    with ExitStack() as ends, shown_at_once(), deaths_in_words(), explained as memory:
        given = Given(read_folder=read_folder, fill=fill)
        run, no_signals = _open(config, given, ends, timed=False), StopSignals()
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


def _open(config: RunConfig, given: Given, ends: ExitStack, *, timed: bool) -> TrainState:
    """Opens a run; `ends` will unlock its folder, and `timed` lets attention kernels be timed."""
    machine = fit(config, timed=timed)
    data = open_data(machine)  # first: its errors show before anything is built or written
    starts = choose_start(machine, given, ends)
    built = build(machine, starts)
    return restore(machine, data, starts, built)


def _train(run: TrainState, logger: RunLogger, stop_signals: StopSignals) -> ExitCode:
    c, start = run.config, run.progress.step
    if c.validation.is_reached_by(run.progress.lowest_val_loss):
        logger.info(reached_line(run))
        return ExitCode.DONE
    if c.validation.at_start and run.progress.step == 0:
        logger.validating()
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
            logger.validating()
        losses, samples = validation_round(run) if due else ({}, None)
        logger.log_step(values | losses, skipped)
        logger.log_samples(samples)
        too_many_skips = run.progress.skipped_in_a_row >= c.train.max_skipped_steps
        stop, at_target = sums.stops > 0, "target_samples" in losses
        ends = stop or at_target or _is_last(run) or too_many_skips
        if step % c.checkpoint.save_interval == 0 or ends:
            logger.gather_refused()
            save(run, logger, val_loss=compared_loss(losses))
        if too_many_skips:
            finish_all(run, logger)
            raise _too_many_skips(run, skipped)
        if at_target:
            break
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
        " Look at these samples, or lower optimizer.lr; started again, the run goes on from its"
        " checkpoint of this step"
    )


def _check_updates(run: TrainState, *, since: int) -> None:
    """Raises FloatingPointError if every step after `since` was skipped.

    If there is no such step, it looks at all steps of the run.
    """
    steps = run.progress.step - since or run.progress.step
    if 0 < steps <= run.progress.skipped_in_a_row:
        raise FloatingPointError(
            f"every step was skipped ({counted(steps, 'step')}), because its loss or gradient was"
            f" not finite: no weight has changed{_skipped_file(run)}. Look at the samples and at"
            " the weights that the run started from, or lower optimizer.lr"
        )


def _skipped_file(run: TrainState) -> str:
    return f"; {run.folder / SKIPPED_FILE} has the samples of every step" if run.folder else ""


def _is_last(run: TrainState) -> bool:
    return run.progress.step >= run.config.train.train_iters


def _step(
    run: TrainState, stop_signals: StopSignals
) -> tuple[Values, SkippedStep | None, StepMetrics]:
    """Takes one step; returns the values to log, the skipped step or None, and sums over all ranks.

    A skipped step uses up its data and its number; learning rate, Adam and EMA do not change.
    """
    c, began, step = run.config, time.perf_counter(), run.progress.step + 1
    heartbeat("read of packs", step=step)
    run.at_step(step)
    elapsed()  # drops the seconds of validation and saving
    with timed(DATA):
        packs = _next_packs(run)
    if run.loader is not None:
        run.interval_metrics.add_packs(packs)
    learned = [
        _learn(run, turn, packs, stop=stop_signals.received)
        for turn in turns(run, packs, step=step)
    ]
    sums = replace(learned[0].sums, flops=sum(one.sums.flops for one in learned))
    skipped = next((one.skipped for one in learned if one.skipped is not None), None)
    run.progress = run.progress.after(
        samples=int(sums.samples), of_datasets=sums.of_datasets, skipped=skipped is not None
    )
    collect_after(step, c.train)
    seconds = {"step_time": time.perf_counter() - began} | elapsed()
    values = step_values(run, sums, seconds=seconds, skipped=skipped is not None)
    for one in learned:
        values |= one.values
    values |= run.model.modules[0].step_values()
    of_network = next((one.update for one in learned if not one.turn.critic), None)
    return values | run.interval_metrics.read(run.progress, of_network), skipped, sums


@dataclass(frozen=True, kw_only=True, slots=True)
class Learned:
    """Outcome of one network's update in a step."""

    turn: NetworkTurn
    sums: StepMetrics
    update: Update
    skipped: SkippedStep | None

    @property
    def values(self) -> Values:
        """The loss, gradient norm and learning rate of the network, for the log."""
        rate = learning_rate(self.turn.config, self.turn.number)
        found = {"loss": self.sums.loss, "grad_norm": self.update.grad_norm, "lr": rate}
        if (ratio := self.turn.config.lora.plus_ratio) is not None:
            found["lr_lora_B"] = rate * ratio
        return {f"{self.turn.prefix}{name}": value for name, value in found.items()}


def _learn(
    run: TrainState, turn: NetworkTurn, packs: Sequence[PackedBatch], *, stop: bool
) -> Learned:
    """Updates the network of `turn`, unless its loss or gradient is not finite."""
    step, items, references = run.progress.step + 1, turn.items, turn.references
    # Counted before the device gets work: later, the device would wait while the host counts.
    counts = count_packs(run, [batch for batch, _ in items], references)
    rank_loss = forward_backward(
        turn.model, items, objective=turn.config.objective, references=references
    )
    if not turn.critic:
        run.interval_metrics.before_update(step)
    squared = prepare_update(turn.model)
    sums = sum_step_metrics(run, counts, rank_loss, squared, stop=stop)
    number = {"number": turn.number, "averaged": turn.averaged}
    update = optimizer_step(
        turn.model, config=turn.config, loss=sums.loss, grad_norm=sums.grad_norm, **number
    )
    skipped = None
    if not update.skipped:
        if not turn.critic:
            run.interval_metrics.add_losses(items, rank_loss)
    else:
        present = [key for pack in packs for key in pack.keys] if run.loader else []
        skipped = gather_skipped_step(
            step, loss=sums.loss, not_finite=rank_loss.not_finite, present=present
        )
    return Learned(turn=turn, sums=sums, update=update, skipped=skipped)


def _next_packs(run: TrainState) -> list[PackedBatch]:
    """This replica's packs of the next step.

    With loader processes, and with other ranks or a GPU to send packs to, the packs of the
    following step are then read in the background.
    """
    c, loader = run.config, run.loader
    count = c.train.global_batch_size // run.data_ranks.size()
    if run.replica.pending is None:
        packs = run.replica.broadcast(_read(loader, count), device())
    else:
        packs = run.replica.wait(device())
        if loader is not None:
            loader.catch_up()
    # A rank that is alone sends no packs to others, but copies them to pinned memory for its GPU.
    worth_it = not run.replica.alone or device().type == "cuda"
    # Without loader processes this process cannot read and compute at the same time.
    ahead = c.dataset.num_workers > 0 and worth_it
    if ahead and run.progress.step + 1 < c.train.train_iters:
        run.replica.start(loader.ahead(count) if loader is not None else ())
    return packs


def _read(loader: PackLoader | None, count: int) -> Iterator[PackedBatch]:
    assert loader is not None
    for _ in range(count):
        heartbeat("read of packs")
        yield next(loader)
