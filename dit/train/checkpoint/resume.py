"""A run and its checkpoints: where it goes on from, and when it is saved."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile

import torch.distributed as dist

from dit.config import EmaKind, RunConfig, Weights
from dit.config.loading import changes
from dit.data import DataError, PackLoader, places_of
from dit.distributed.collective_errors import on_all_ranks
from dit.distributed.watchdog.monitor import heartbeat
from dit.folder_lock import FolderInUseError, only_writer
from dit.train.checkpoint.paths import CheckpointError, find_checkpoint, manifest_of, saved_config
from dit.train.checkpoint.state_dict import (
    DataState,
    data_positions,
    interval_sums,
    load_checkpoint,
    start_from,
)
from dit.train.metrics.run_logger import RunLogger
from dit.train.train_state import TrainState


def resume(run: TrainState) -> None:
    """Continues from checkpoint.save, else from checkpoint.load, where they hold a checkpoint.

    With checkpoint.finetune, a run that has none of its own yet takes the weights of the latter.

    Raises:
        CheckpointError: there are no weights to take, or a checkpoint is of no use.
    """
    c = run.config.checkpoint
    if c.save and (own := find_checkpoint(Path(c.save))):
        _go_on(run, own, own=True)
    elif c.load and (other := find_checkpoint(Path(c.load))):
        if c.finetune:
            start_from(other, run.learner, config=run.config)
            run.notes += _about_start(other, run.config)
        else:
            _go_on(run, other, own=False)
    elif c.finetune:
        raise CheckpointError(
            f"checkpoint.finetune=true, and checkpoint.load={c.load} holds no checkpoint; give a"
            " run folder or a checkpoints/step_... folder"
        )
    elif c.load:
        run.notes.append(f"checkpoint.load={c.load} holds no checkpoint: starting at step 0")


def _go_on(run: TrainState, path: Path, *, own: bool) -> None:
    """`own` says that the checkpoint is of this run."""
    run.progress = load_checkpoint(path, run.learner, config=run.config)
    run.saved_step = run.progress.step
    run.notes += [f"continuing after step {run.progress.step}", *_about_change(path, run.config)]
    if other := run.gauges.go_on(interval_sums(path)):
        run.notes.append(
            f"{' and '.join(other)} have other parts than in the checkpoint (validation.quantiles,"
            " dataset.task_encoder_seq_length): at the next log step they are of the steps from"
            f" {run.progress.step + 1} on"
        )
    if run.folder is not None:
        run.notes += _about_room(path, run.folder)
    if _begins_data_anew(run, path, own=own):
        run.progress = run.progress.with_other_data()
        run.notes.append(
            "the data begin anew, since checkpoint.load_data_position=false; weights, optimizer,"
            " schedule and average go on"
        )
    elif run.loader is not None:
        _place_loader(run.loader, path)
        run.notes += [run.loader.moved] if run.loader.moved else []


def _place_loader(loader: PackLoader, path: Path) -> None:
    """Brings the loader to where those of a checkpoint stood.

    Raises:
        CheckpointError: they read other data, or cannot be brought to these ranks.
    """
    places = places_of(saved_config(path).dataset)
    try:
        loader.load_state_dict(data_positions(path), places=places)
    except DataError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _begins_data_anew(run: TrainState, path: Path, *, own: bool) -> bool:
    """Whether the position in the data is left; the same on all ranks, which call it.

    A run that has begun its data anew goes on with them when it is started again.
    """
    if run.config.checkpoint.load_data_position:
        return False
    if not own or saved_config(path).checkpoint.load_data_position:
        return True
    return not on_all_ranks(lambda: run.loader is None or _fits(run.loader, path))[0]


def _fits(loader: PackLoader, path: Path) -> bool:
    try:
        return loader.fits(data_positions(path))
    except (CheckpointError, DataError):  # of another version: not of these data either
        return False


def _about_change(path: Path, config: RunConfig) -> list[str]:
    """What is not as it was, of what may change when a run goes on."""
    saved, lines = saved_config(path), []
    if changed := changes(saved, config):
        lines.append(f"changed since then: {', '.join(changed)}")
    if saved.ema.kind is EmaKind.NONE and config.ema.kind is not EmaKind.NONE:
        lines.append("the checkpoint has no average of the weights: it starts from them")
    if manifest_of(path) is None:
        lines.append("the checkpoint is of an earlier version, without checksums: not verified")
    return lines


def _about_room(path: Path, folder: Path) -> list[str]:
    """That the next checkpoint will not fit, where it is as large as this one."""
    manifest, free = manifest_of(path), shutil.disk_usage(folder).free
    needed = sum(sealed.bytes for sealed in manifest.files.values()) if manifest else 0
    if free >= needed:
        return []
    return [
        f"checkpoint.save={folder} has {free / 1e6:,.1f} MB free, and a checkpoint takes about"
        f" {needed / 1e6:,.1f} MB: free space before the next one"
    ]


def _about_start(path: Path, config: RunConfig) -> list[str]:
    averaged = config.checkpoint.finetune_weights is Weights.EMA
    kind = "average of the weights" if averaged else "weights"
    return [
        f"starting at step 0 from the {kind} of {path}",
        f"other than there: {', '.join(changes(saved_config(path), config))}",
    ]


def save(run: TrainState, record: RunLogger, *, val_loss: float = math.inf) -> None:
    """Saves this step unless it is saved; returns once the next step may change everything.

    `val_loss` is that of this step, infinite where there is none.
    """
    if run.saver is None or run.saved_step == run.progress.step:
        return
    finish_save(run, record)
    heartbeat("save of a checkpoint")
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


def finish_save(run: TrainState, record: RunLogger) -> None:
    """Waits for the save that is under way, if there is one, and exports it; all ranks call it."""
    if run.saver is None:
        return
    heartbeat("end of a save")
    saved = run.saver.finish()
    if saved is not None:
        record.say(f"saved {saved.path} in {saved.seconds:.1f} s")
        if run.export is not None:
            began = time.perf_counter()
            heartbeat("export of a checkpoint")
            place = run.export(saved.path)
            record.say(f"exported to {place} in {time.perf_counter() - began:.1f} s")


def close_saver(run: TrainState, record: RunLogger) -> None:
    """Ends the saver's threads. After an error on one of several ranks a save stays unfinished."""
    if run.saver is None:
        return
    try:
        if dist.get_world_size() == 1:
            finish_save(run, record)
    finally:
        run.saver.close()


@contextmanager
def run_folder(config: RunConfig) -> Iterator[Path | None]:
    """`checkpoint.save`, made where it is missing, and kept from other runs; all ranks call it.

    None where nothing is to be written.

    Raises:
        FolderInUseError: another run writes to it.
        ValueError: it cannot be written.
    """
    if not config.checkpoint.save:
        yield None
        return
    folder = Path(config.checkpoint.save)
    _make(folder)
    with ExitStack() as held:
        refusal = _hold(folder, held) if dist.get_rank() == 0 else ""
        heard: list[str] = [refusal]
        dist.broadcast_object_list(heard, src=0)
        if heard[0]:  # on all ranks, since none can go on without the first
            raise FolderInUseError(heard[0])
        yield folder


def _make(folder: Path) -> None:
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"checkpoint.save={folder} cannot be written ({error}); choose a folder that"
            " every process may write to"
        ) from error


def _hold(folder: Path, held: ExitStack) -> str:
    """Keeps other runs out of the folder until `held` closes; returns why it cannot."""
    try:
        held.enter_context(only_writer(folder, named=f"checkpoint.save={folder}"))
    except (FolderInUseError, OSError) as error:
        return str(error)
    return ""
