"""A run and its checkpoints: where it goes on from, and when it is saved."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from dit.config import EmaKind, RunConfig, Weights
from dit.configuring import changes
from dit.parallel.watch import doing
from dit.train.checkpoint import (
    DataState,
    data_positions,
    interval_sums,
    load_checkpoint,
    start_from,
)
from dit.train.locate import CheckpointError, find_checkpoint, saved_config
from dit.train.manifest import read_manifest
from dit.train.record import Record
from dit.train.run import Run


def resume(run: Run) -> None:
    """Continues from checkpoint.save, else from checkpoint.load, where they hold a checkpoint.

    With checkpoint.finetune, a run that has none of its own yet takes the weights of the latter.

    Raises:
        CheckpointError: there are no weights to take, or a checkpoint is of no use.
    """
    c = run.config.checkpoint
    if c.save and (own := find_checkpoint(Path(c.save))):
        _go_on(run, own)
    elif c.load and (other := find_checkpoint(Path(c.load))):
        if c.finetune:
            start_from(other, run.learner, config=run.config)
            run.notes += _about_start(other, run.config)
        else:
            _go_on(run, other)
    elif c.finetune:
        raise CheckpointError(
            f"checkpoint.finetune=true, and checkpoint.load={c.load} holds no checkpoint; give a"
            " run folder or a checkpoints/step_... folder"
        )
    elif c.load:
        run.notes.append(f"checkpoint.load={c.load} holds no checkpoint: starting at step 0")


def _go_on(run: Run, path: Path) -> None:
    run.progress = load_checkpoint(path, run.learner, config=run.config)
    run.saved_step = run.progress.step
    if run.loader is not None:
        run.loader.load_state_dict(data_positions(path))
    other = run.gauges.go_on(interval_sums(path))
    run.notes += [f"continuing after step {run.progress.step}", *_about_change(path, run.config)]
    if other:
        run.notes.append(
            f"{' and '.join(other)} have other parts than in the checkpoint (validation.quantiles,"
            " dataset.task_encoder_seq_length): at the next log step they are of the steps from"
            f" {run.progress.step + 1} on"
        )
    if run.loader is not None and run.loader.moved:
        run.notes.append(run.loader.moved)


def _about_change(path: Path, config: RunConfig) -> list[str]:
    """What is not as it was, of what may change when a run goes on."""
    saved, lines = saved_config(path), []
    if changed := changes(saved, config):
        lines.append(f"changed since then: {', '.join(changed)}")
    if saved.ema.kind is EmaKind.NONE and config.ema.kind is not EmaKind.NONE:
        lines.append("the checkpoint has no average of the weights: it starts from them")
    if read_manifest(path) is None:
        lines.append("the checkpoint is of an earlier version, without checksums: not verified")
    return lines


def _about_start(path: Path, config: RunConfig) -> list[str]:
    averaged = config.checkpoint.finetune_weights is Weights.EMA
    kind = "average of the weights" if averaged else "weights"
    return [
        f"starting at step 0 from the {kind} of {path}",
        f"other than there: {', '.join(changes(saved_config(path), config))}",
    ]


def save(run: Run, record: Record, *, val_loss: float = math.inf) -> None:
    """Saves this step unless it is saved; returns once the next step may change everything.

    `val_loss` is that of this step, infinite where there is none.
    """
    if run.saver is None or run.saved_step == run.progress.step:
        return
    finish_save(run, record)
    doing("save of a checkpoint")
    began = time.perf_counter()
    data = DataState(
        position=run.loader.state_dict() if run.loader else None,
        card=run.card,
        null_text_LE=run.null_text_LE.cpu(),
        interval=run.gauges.interval(),
    )
    best = val_loss < run.progress.lowest_val_loss
    if best:
        run.progress = replace(run.progress, lowest_val_loss=val_loss)
    run.saver.begin(run.learner, progress=run.progress, data=data, best=best)
    run.saved_step = run.progress.step
    if run.config.checkpoint.async_save:
        held_up = time.perf_counter() - began
        record.say(
            f"step {run.saved_step}: gathered and copied in {held_up:.1f} s; writing in the"
            " background"
        )
    else:
        finish_save(run, record)


def finish_save(run: Run, record: Record) -> None:
    """Waits for the save that is under way, if there is one, and exports it; all ranks call it."""
    if run.saver is None:
        return
    doing("end of a save")
    saved = run.saver.finish()
    if saved is not None:
        record.say(f"saved {saved.path} in {saved.seconds:.1f} s")
        if run.export is not None:
            began = time.perf_counter()
            doing("export of a checkpoint")
            place = run.export(saved.path)
            record.say(f"exported to {place} in {time.perf_counter() - began:.1f} s")


def close_saver(run: Run, record: Record) -> None:
    """Ends the saver's threads. After an error on one of several ranks a save stays unfinished."""
    if run.saver is None:
        return
    try:
        if dist.get_world_size() == 1:
            finish_save(run, record)
    finally:
        run.saver.close()
