"""Writing a checkpoint, in the background where asked for; nobody sees it before it is whole.

1. begin    all ranks gather what is to be saved; with `checkpoint.async_save` it is copied, too
2. write    each rank its own files, in threads, while training goes on
3. finish   all ranks again, once every file is on disk: index, manifest, rename, LATEST

Until the rename it is called .partial_step_N, which no resume picks and the next save removes.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path

import torch
from safetensors.torch import save as to_bytes
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.storage import WriteResult

from dit.config import RunConfig
from dit.config.loading import save_config
from dit.distributed.collective_errors import error_in_words, on_all_ranks, on_first_rank
from dit.distributed.process_groups import device
from dit.train.checkpoint.distcp import Shard, Shards, gather_shards
from dit.train.checkpoint.paths import (
    LATEST,
    LOWEST_VAL,
    STEP,
    CheckpointError,
    Sealed,
    seal,
    write_manifest,
)
from dit.train.checkpoint.state_dict import INTERVAL, DataState, loader_file, sharded_state
from dit.train.model_and_optimizer import ModelAndOptimizer
from dit.train.train_state import TrainProgress

_PARTIAL = ".partial_"


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A checkpoint that is whole."""

    path: Path
    seconds: float  # since its `begin`


@dataclass(frozen=True, kw_only=True, slots=True)
class _Written:
    """A file that is on disk."""

    name: str
    sealed: Sealed
    results: list[WriteResult] = field(default_factory=list)  # of a shard, for the index


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pending:
    """A checkpoint that is being written."""

    final: Path
    partial: Path
    shards: Shards
    jobs: list[Future[_Written]]  # of the shards, in their order; of the loader's position
    data: DataState
    best: bool
    began: float
    bytes: int  # about, of all ranks


class Saver:
    """Writes the checkpoints of a run, one after the other."""

    def __init__(self, folder: Path, config: RunConfig):
        """`folder` is the run's."""
        self.places = folder / "checkpoints"
        self.config = config
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="checkpoint")
        self._pending: _Pending | None = None
        self._removal: Future[None] | None = None

    def begin(
        self,
        learner: ModelAndOptimizer,
        *,
        progress: TrainProgress,
        data: DataState,
        best: bool = False,
    ) -> None:
        """Takes everything that belongs to this step; all ranks call it, with nothing pending.

        The next step may begin when it returns. `best` says that no checkpoint before had a lower
        validation loss.

        Raises:
            CheckpointError: a rank could not write; older checkpoints are as they were.
        """
        assert self._pending is None, "finish the save that is under way first"
        began = time.perf_counter()
        final = self.places / f"{STEP}{progress.step:08d}"
        partial = final.with_name(f"{_PARTIAL}{final.name}")
        with self._saying_why_not(partial):
            on_first_rank(lambda: self._make(partial))
            with learner.settled():
                state = sharded_state(learner, loading=False)
                state |= asdict(progress)
                hosted = device().type == "cpu" or self.config.optimizer.optimizer_cpu_offload
                clone = self.config.checkpoint.async_save and hosted
                shards = gather_shards(state, partial, clone=clone)
            size = sum(on_all_ranks(lambda: sum(shard.bytes for shard in shards.shards)))
        jobs = [self._threads.submit(_write_shard, shard) for shard in shards.shards]
        if data.position is not None:
            position = BytesIO()
            torch.save(data.position, position)
            file = partial / loader_file(learner.groups.dp.rank())
            jobs.append(self._threads.submit(_write_bytes, file, position))
        self._pending = _Pending(
            final=final,
            partial=partial,
            shards=shards,
            jobs=jobs,
            data=data,
            best=best,
            began=began,
            bytes=size,
        )

    @property
    def writing(self) -> bool:
        """Whether this rank still writes files of the save that is under way."""
        return self._pending is not None and not all(job.done() for job in self._pending.jobs)

    def finish(self) -> Saved | None:
        """Waits for the files of all ranks and makes the checkpoint the newest; all ranks call it.

        None where no save is under way.

        Raises:
            CheckpointError: a rank could not write; older checkpoints are as they were.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        with self._saying_why_not(pending.partial, size=pending.bytes):
            known = _merged(on_all_ranks(lambda: _sealed(pending)))
            written = [job.result() for job in pending.jobs]
            pending.shards.index([w.results for w in written[: len(pending.shards.shards)]])
            on_first_rank(lambda: self._publish(pending, known))
        return Saved(path=pending.final, seconds=time.perf_counter() - pending.began)

    def close(self) -> None:
        """Waits for this rank's threads. A save that is under way stays unfinished."""
        self._threads.shutdown()

    def _make(self, partial: Path) -> None:
        self.clear()
        partial.mkdir(parents=True)

    def clear(self) -> None:
        """Removes what saves have left that did not come to their end; the first rank calls it.

        Raises:
            OSError: it cannot.
        """
        if self._removal is not None:
            self._removal.result()  # else it would find its folders gone
        for left in self.places.glob(f"{_PARTIAL}*"):
            shutil.rmtree(left)
        for name in (LATEST, LOWEST_VAL):
            self._new(name).unlink(missing_ok=True)

    def _describe(self, partial: Path, data: DataState) -> None:
        save_config(self.config, partial / "config.yaml")
        # Not `save_file`, whose files only their owner may read.
        null_text = to_bytes({"text": data.null_text_LE.contiguous()})
        (partial / "null_text.safetensors").write_bytes(null_text)
        (partial / INTERVAL).write_bytes(to_bytes(dict(data.interval)))
        if data.card is not None:
            (partial / "dataset_card.json").write_text(json.dumps(data.card, indent=1))

    def _publish(self, pending: _Pending, known: dict[str, Sealed]) -> None:
        """Makes a whole checkpoint visible, then the newest; then removes what is too old."""
        self._describe(pending.partial, pending.data)
        write_manifest(pending.partial, known)
        final = pending.final
        names = [LATEST, LOWEST_VAL] if pending.best else [LATEST]
        for name in names:  # written before anything is renamed: the disk may be full
            self._new(name).write_text(final.name)
            seal(self._new(name))
        old = [final] if final.exists() else []  # of a run that this one went back from
        out_of_sight = [_hidden(path) for path in old]
        pending.partial.rename(final)
        _sync(self.places)
        for name in names:
            self._new(name).replace(self.places / name)
        # Those of later steps are of such a run, too: they stay until replaced.
        done = sorted(p for p in self.places.glob(f"{STEP}*") if p.name <= final.name)
        keep, best = self.config.checkpoint.keep_last, self._best()
        old = [path for path in (done[:-keep] if keep else []) if path.name != best]
        out_of_sight += [_hidden(path) for path in old]
        self._removal = self._threads.submit(_remove, out_of_sight)

    def _new(self, name: str) -> Path:
        """LATEST or LOWEST_VAL before it takes the place of the one that is there."""
        return self.places / f".{name}.new"

    @contextmanager
    def _saying_why_not(self, path: Path, *, size: int = 0) -> Iterator[None]:
        """Turns what keeps a checkpoint from being written into one error that a user understands.

        What there is of it goes, so that it is not in the way of whatever comes next. `size` is
        about what it needs.
        """
        try:
            yield
        except (CheckpointException, OSError, RuntimeError) as error:  # torch: a full disk is one
            if "gloo" in str(error) or isinstance(error, torch.distributed.DistError):
                raise  # another process has died: the disk has nothing to do with it
            if torch.distributed.get_rank() == 0:
                with suppress(OSError):  # that would hide why the save has failed
                    self.clear()
            raise CheckpointError(
                f"{path} cannot be written ({error_in_words(error)}); is the disk full? Free space,"
                f" or choose another checkpoint.save. {self._room(size)}Older checkpoints are"
                " as they were, and nothing of this one is left: the same command goes on from them"
            ) from error

    def _room(self, size: int) -> str:
        """What a checkpoint needs beside what there is, as far as that is known."""
        try:
            free = shutil.disk_usage(self.places).free
            last = max(self.places.glob(f"{STEP}*"), default=None)
            size = max(size, sum(file.stat().st_size for file in last.iterdir()) if last else 0)
        except OSError:
            return ""
        needed = f"A checkpoint needs about {size / 1e6:,.1f} MB, and " if size else ""
        return f"{needed}{free / 1e6:,.1f} MB are free there now. "

    def _best(self) -> str:
        """Name of the checkpoint with the lowest validation loss; empty where there is none."""
        pointer = self.places / LOWEST_VAL
        return pointer.read_text(errors="replace").strip() if pointer.is_file() else ""


def save_checkpoint(
    folder: Path,
    learner: ModelAndOptimizer,
    *,
    progress: TrainProgress,
    config: RunConfig,
    data: DataState,
) -> Path:
    """Writes RUN/checkpoints/step_N and moves LATEST once it is whole; all ranks call it.

    Raises:
        CheckpointError: a rank could not write; older checkpoints are as they were.
    """
    saver = Saver(folder, config)
    try:
        saver.begin(learner, progress=progress, data=data)
        saved = saver.finish()
    finally:
        saver.close()
    assert saved is not None
    return saved.path


def _write_shard(shard: Shard) -> _Written:
    results = shard.write()
    return _Written(name=shard.file.name, sealed=seal(shard.file), results=results)


def _write_bytes(file: Path, content: BytesIO) -> _Written:
    file.write_bytes(content.getbuffer())
    return _Written(name=file.name, sealed=seal(file))


def _sealed(pending: _Pending) -> dict[str, Sealed]:
    """This rank's files, once all of them are written."""
    wait(pending.jobs)
    written = [job.result() for job in pending.jobs]
    return {w.name: w.sealed for w in written}


def _merged(of_ranks: list[dict[str, Sealed]]) -> dict[str, Sealed]:
    return {name: sealed for files in of_ranks for name, sealed in files.items()}


def _hidden(path: Path) -> Path:
    """Renames a folder, so that no kill leaves half of it under a checkpoint's name."""
    return path.rename(path.with_name(f"{_PARTIAL}removed_{path.name}"))


def _remove(folders: list[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder)


def _sync(folder: Path) -> None:
    """Brings renamings in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
