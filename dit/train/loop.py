"""A whole run: read, step, average, validate, write down, save; until the end or a signal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
import torch.distributed as dist

from dit.batch import PackedBatch
from dit.config import RunConfig
from dit.data import (
    Tally,
    ValidationPacks,
    build_train_loader,
    build_val_packs,
    dataset_card,
    deaths_in_words,
    null_text,
)
from dit.model.flops import training_flops
from dit.objective import make_objective, training_problem
from dit.parallel.groups import device, process_groups
from dit.parallel.replica import Replica
from dit.train.build import learning_rate
from dit.train.learner import build_learner, learn
from dit.train.persist import close_saver, finish_save, resume, save
from dit.train.record import Record
from dit.train.run import Run
from dit.train.saving import Saver
from dit.train.signals import StopRequests
from dit.train.step import sum_over_ranks
from dit.train.validation import validate


class ExitCode(IntEnum):
    """How a run ended, for whoever started it."""

    DONE = 0
    ERROR = 1
    STOPPED = 75  # by SIGTERM or Ctrl-C, after a checkpoint; EX_TEMPFAIL: start it again


def pretrain(config: RunConfig) -> ExitCode:
    """Trains as configured, from the newest checkpoint where there is one.

    The process group is up (`start_processes`).
    """
    run = _prepare(config)
    record = Record(run)
    with StopRequests() as requests, deaths_in_words():
        try:
            return _train(run, record, requests)
        finally:
            close_saver(run, record)
            record.close()
            if run.loader is not None:
                run.loader.close()


def _prepare(config: RunConfig) -> Run:
    """Builds every part, and loads the checkpoint."""
    if config.train.deterministic:
        torch.use_deterministic_algorithms(True)
    groups = process_groups()
    replica, ranks = Replica(groups), (groups.dp.rank(), groups.dp.size())
    # Data first: what is wrong with them shows before anything is built or written.
    loader = None
    if replica.reads:
        loader = build_train_loader(config, rank=ranks[0], world_size=ranks[1])
    run = Run(
        config=config,
        folder=_run_folder(config),
        replica=replica,
        loader=loader,
        validation=_validation_packs(
            config, replica, indices=range(ranks[0], config.train.eval_iters, ranks[1])
        ),
        learner=build_learner(config, groups),
        objective=make_objective(config.objective),
        null_text_LE=null_text(config).to(device()),
        card=dataset_card(config),
    )
    if run.folder is not None:
        run.saver = Saver(run.folder, config)
    resume(run)
    dist.barrier()  # nothing is written before every rank is ready
    return run


def _run_folder(config: RunConfig) -> Path | None:
    """`checkpoint.save`, made where it is missing; None where nothing is to be written.

    Raises:
        ValueError: it cannot be written.
    """
    if not config.checkpoint.save:
        return None
    folder = Path(config.checkpoint.save)
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"checkpoint.save={folder} cannot be written ({error}); choose a folder that"
            " every process may write to"
        ) from error
    return folder


def _train(run: Run, record: Record, requests: StopRequests) -> ExitCode:
    c = run.config
    skipped_in_a_row = 0
    while run.progress.step < c.train.train_iters:
        values, stop, writing = _step(run, requests)
        if not writing:
            finish_save(run, record)
        step = run.progress.step
        due = c.train.eval_interval and (step % c.train.eval_interval == 0 or _is_last(run))
        if run.validation is not None and due:
            packs = run.validation.packs
            values |= validate(run.learner, packs, objective=run.objective, config=c)
        record.step(values)
        skipped_in_a_row = skipped_in_a_row + 1 if values["skipped"] else 0
        if step % c.checkpoint.save_interval == 0 or stop or _is_last(run):
            save(run, record)
        if skipped_in_a_row >= c.train.max_skipped_steps:
            save(run, record)
            finish_save(run, record)
            raise FloatingPointError(
                f"{skipped_in_a_row} steps in a row had a gradient that is not finite (the last is"
                f" step {step}); lower optimizer.lr, or look at the data"
            )
        if stop:
            finish_save(run, record)
            record.say("stopped on request; the same command continues")
            return ExitCode.STOPPED
    finish_save(run, record)
    record.say("done")
    return ExitCode.DONE


def _is_last(run: Run) -> bool:
    return run.progress.step >= run.config.train.train_iters


def _validation_packs(
    config: RunConfig, replica: Replica, *, indices: Sequence[int]
) -> ValidationPacks | None:
    """This replica's validation packs, read once; None where the run does not validate."""
    if not (config.train.eval_interval and config.train.eval_iters):
        return None
    tally = Tally()

    def take() -> list[PackedBatch]:
        nonlocal tally
        read = build_val_packs(config, indices=indices)
        tally = read.tally
        return read.packs

    packs = replica.share(take, torch.device("cpu"))
    return ValidationPacks(packs=packs, tally=tally)


def _packs(run: Run) -> list[PackedBatch]:
    """This replica's packs of the next step."""
    count, loader = run.config.train.global_batch_size // run.data_ranks.size(), run.loader

    def take() -> list[PackedBatch]:
        assert loader is not None
        return [next(loader) for _ in range(count)]

    return run.replica.share(take, device())


def _step(run: Run, requests: StopRequests) -> tuple[dict[str, Any], bool, bool]:
    """One optimizer step.

    Returns what is written down, whether a signal asks to stop, and whether any rank is still
    writing a checkpoint.
    """
    c, began = run.config, time.perf_counter()
    step = run.progress.step + 1
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
    report, done = learn(run.learner, items, config=c, step=step)
    total, count, samples, tokens, refused, flops, stops, writing = sum_over_ranks(
        [
            *report.tolist(),
            *(_counts(run, [batch for batch, _ in items]) if run.loader else (0, 0, 0, 0)),
            float(requests.received),
            float(run.saver is not None and run.saver.writing),
        ]
    )
    run.progress = replace(
        run.progress, step=step, consumed_samples=run.progress.consumed_samples + int(samples)
    )
    elapsed = time.perf_counter() - began
    values = {
        "step": step,
        "loss": total / count,
        "grad_norm": done.grad_norm,
        "lr": learning_rate(c, step),
        "consumed_samples": run.progress.consumed_samples,
        "real_tokens": int(tokens),
        "pack_fill": tokens / (c.train.global_batch_size * c.dataset.task_encoder_seq_length),
        "refused": int(refused),
        "step_time_s": elapsed,
        "tokens_per_s": tokens / elapsed,
        "model_tflops": flops / elapsed / dist.get_world_size() / 1e12,
        "skipped": done.skipped,
    }
    return values, stops > 0, writing > 0


def _counts(run: Run, packs: list[PackedBatch]) -> tuple[int, ...]:
    """Samples and tokens of a replica's packs, all samples refused so far, and operations."""
    assert run.loader is not None
    return (
        sum(pack.num_samples for pack in packs),
        sum(pack.real_tokens for pack in packs),
        sum(run.loader.counts().values()),
        sum(training_flops(run.config.model, pack) for pack in packs),
    )
