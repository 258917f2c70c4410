"""A whole run: read, step, average, validate, write down, save; until the end or a signal."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from enum import IntEnum
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from dit.batch import PackedBatch
from dit.config import RunConfig
from dit.data import (
    PackLoader,
    build_train_loader,
    check_data,
    dataset_card,
    deaths_in_words,
    null_text,
)
from dit.distributed.collective_errors import from_first
from dit.distributed.pack_broadcast import Replica
from dit.distributed.process_groups import device, process_groups
from dit.distributed.watchdog.monitor import heartbeat
from dit.objectives import make_objective, training_problem
from dit.train.checkpoint.async_save import Saver
from dit.train.checkpoint.resume import close_saver, finish_save, resume, run_folder, save
from dit.train.metrics.interval_metrics import IntervalMetrics
from dit.train.metrics.run_logger import RunLogger
from dit.train.metrics.step_metrics import (
    DATA,
    SKIPPED_FILE,
    Skip,
    StepMetrics,
    skip,
    spent,
    sum_step_metrics,
    timing,
    values_of,
)
from dit.train.model_and_optimizer import build_model_and_optimizer
from dit.train.optimizer import learning_rate
from dit.train.step import forward_backward, optimizer_step
from dit.train.train_state import Export, Samples, TrainState
from dit.train.validation import validation_packs, validation_round

Values = dict[str, Any]


class ExitCode(IntEnum):
    """How a run ended, for whoever started it."""

    DONE = 0
    ERROR = 1
    STOPPED = 75  # by SIGTERM or Ctrl-C, after a checkpoint; EX_TEMPFAIL: start it again


def pretrain(
    config: RunConfig,
    *,
    export: Export | None = None,
    open_samples: Callable[[TrainState], Samples] | None = None,
) -> ExitCode:
    """Trains as configured, from the newest checkpoint where there is one.

    `export` is called with each new checkpoint, what `open_samples` makes of the run at each
    validation. The process group is up (`start_processes`).
    """
    with ExitStack() as ends:
        run = _prepare(config, ends)
        run.export = export
        run.samples = open_samples(run) if open_samples is not None else None
        record = RunLogger(run)
        requests = ends.enter_context(StopRequests())
        ends.enter_context(deaths_in_words())
        ends.callback(record.close)
        if run.loader is not None:
            ends.callback(run.loader.close)
        ends.callback(run.replica.close)
        ends.callback(close_saver, run, record)
        return _train(run, record, requests)


def measure_steps(
    config: RunConfig, *, warm_up: int, steps: int, around: AbstractContextManager
) -> list[Values]:
    """What would be written down of `steps` steps, made inside `around` after a warm-up.

    Nothing is saved or validated, and Ctrl-C ends it as any program.
    """
    with ExitStack() as ends:
        run, never = _prepare(config, ends), StopRequests()
        ends.enter_context(deaths_in_words())
        if run.loader is not None:
            ends.callback(run.loader.close)
        ends.callback(run.replica.close)
        for _ in range(warm_up):
            _step(run, never)
        with around:
            return [_step(run, never)[0] for _ in range(steps)]


def _prepare(config: RunConfig, ends: ExitStack) -> TrainState:
    """Builds every part, and loads the checkpoint; the run folder is this run's until `ends`."""
    if config.train.deterministic:
        torch.use_deterministic_algorithms(True)
        os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"  # Transformer Engine's attention
    heartbeat("opening of the data")
    groups = process_groups()
    replica, ranks = Replica(groups), (groups.dp.rank(), groups.dp.size())
    # Data first: what is wrong with them shows before anything is built or written.
    from_first(lambda: check_data(config))
    loader = None
    if replica.reads:
        loader = build_train_loader(config, rank=ranks[0], world_size=ranks[1])
    folder = ends.enter_context(run_folder(config))
    learner, objective = build_model_and_optimizer(config, groups), make_objective(config.objective)
    run = TrainState(
        config=config,
        folder=folder,
        replica=replica,
        loader=loader,
        validation=validation_packs(
            config, replica, indices=range(ranks[0], config.train.eval_iters, ranks[1])
        ),
        learner=learner,
        gauges=IntervalMetrics(config, learner, objective),
        objective=objective,
        null_text_LE=null_text(config).to(device()),
        card=dataset_card(config),
    )
    if run.folder is not None:
        run.saver = Saver(run.folder, config)
        if dist.get_rank() == 0:
            run.saver.clear()  # the space is wanted before anything is written
    heartbeat("load of the checkpoint")
    resume(run)
    dist.barrier()  # nothing is written before every rank is ready
    return run


def _train(run: TrainState, record: RunLogger, requests: StopRequests) -> ExitCode:
    c = run.config
    if c.validation.at_start and run.progress.step == 0:
        found, drawn = validation_round(run)
        record.start(found)
        record.samples(drawn)
    while run.progress.step < c.train.train_iters:
        values, skipped, sums = _step(run, requests)
        if not sums.writing:
            finish_save(run, record)
        step = run.progress.step
        due = c.train.eval_interval and (step % c.train.eval_interval == 0 or _is_last(run))
        found, drawn = validation_round(run) if due else ({}, None)
        record.step(values | found, skipped)
        record.samples(drawn)
        too_many = run.progress.skipped_in_a_row >= c.train.max_skipped_steps
        stop = sums.stops > 0
        if step % c.checkpoint.save_interval == 0 or stop or _is_last(run) or too_many:
            record.refusals()
            save(run, record, val_loss=found.get("val_loss_ema", found.get("val_loss", math.inf)))
        if too_many:
            finish_save(run, record)
            raise _too_many_skips(run, skipped)
        if stop:
            finish_save(run, record)
            record.say("stopped on request; the same command continues")
            return ExitCode.STOPPED
    finish_save(run, record)
    record.say(f"done after step {run.progress.step}")
    return ExitCode.DONE


def _too_many_skips(run: TrainState, last: Skip | None) -> FloatingPointError:
    where = f"; {run.folder / SKIPPED_FILE} has those of every step" if run.folder else ""
    return FloatingPointError(
        f"{run.progress.skipped_in_a_row} steps in a row were skipped, as many as"
        f" train.max_skipped_steps allows. Step {run.progress.step}: {last}{where}. Look at these"
        " samples, or lower optimizer.lr; the run goes on from its checkpoint of this step"
    )


def _is_last(run: TrainState) -> bool:
    return run.progress.step >= run.config.train.train_iters


def _packs(run: TrainState) -> list[PackedBatch]:
    """This replica's packs of the next step, after which those of the one after it set out."""
    c, loader = run.config, run.loader
    count = c.train.global_batch_size // run.data_ranks.size()
    if run.replica.coming is None:
        packs = run.replica.share(_read(loader, count), device())
    else:
        packs = run.replica.arrive(device())
        if loader is not None:
            loader.catch_up()
    # Without workers this process cannot read and compute at once.
    ahead = c.dataset.num_workers > 0 and not run.replica.alone
    if ahead and run.progress.step + 1 < c.train.train_iters:
        run.replica.set_out(loader.ahead(count) if loader is not None else ())
    return packs


def _read(loader: PackLoader | None, count: int) -> Iterator[PackedBatch]:
    assert loader is not None
    for _ in range(count):
        heartbeat("read of packs")
        yield next(loader)


def _step(
    run: TrainState, requests: StopRequests
) -> tuple[dict[str, Any], Skip | None, StepMetrics]:
    """One step; returns what is written down, why it was skipped, and its sums over all ranks.

    After a skipped one data and `step` go on; learning rate, Adam and average stay.
    """
    c, began = run.config, time.perf_counter()
    step, number = run.progress.step + 1, run.progress.updates + 1
    rate = learning_rate(c, number)
    heartbeat("read of packs", step=step)
    spent()  # what validation and saving have left
    with timing(DATA):
        packs = _packs(run)
    items = [
        training_problem(
            run.objective,
            pack,
            seed=c.rng.seed,
            step=step,
            null_text_LE=run.null_text_LE,
            text_dropout=c.objective.text_dropout,
        )
        for pack in packs
    ]
    report = forward_backward(run.learner, items, config=c)
    sums = sum_step_metrics(run, [batch for batch, _ in items], report, stop=requests.received)
    run.gauges.before_update(step)
    done = optimizer_step(run.learner, config=c, number=number, loss=sums.loss)
    run.progress = run.progress.after(
        samples=int(sums.samples), of_datasets=sums.of_datasets, skipped=done.skipped
    )
    if run.loader is not None:
        run.gauges.saw(packs)
    skipped = None
    if not done.skipped:
        run.gauges.add(items, report)
    else:
        present = [key for pack in packs for key in pack.keys] if run.loader else []
        skipped = skip(step, loss=sums.loss, bad=report.not_finite, present=present)
    seconds = {"step_time": time.perf_counter() - began} | spent()
    values = values_of(run, sums, done, rate=rate, seconds=seconds)
    return values | run.gauges.read(run.progress, done), skipped, sums


class StopRequests:
    """Inside the context, a signal makes `received` true instead of ending the process."""

    signals = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.received = False
        self.before: list[Any] = []

    def __enter__(self) -> StopRequests:
        self.before = [signal.signal(s, self._note) for s in self.signals]
        return self

    def __exit__(self, *_: object) -> None:
        for s, handler in zip(self.signals, self.before, strict=True):
            signal.signal(s, handler)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.received = True
