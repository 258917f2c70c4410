"""Writes checkpoints, in the background if configured; a checkpoint appears once it is complete.

1. begin    each rank copies its shard of the state to host memory
2. write    each rank writes its own files, in threads, while training goes on
3. finish   all ranks together, once every file is on disk: index, manifest, rename, LATEST

Until the rename the folder is called .partial_step_N: no resume uses it, and the next save removes
it.
"""

from __future__ import annotations

import json
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

from dit.checkpoint_paths import (
    ADAPTERS,
    LATEST,
    LOWEST_VAL,
    NULL_TEXT,
    PARTIAL,
    STEP,
    CheckpointError,
    FileDigest,
    saved_checkpoints,
    sync_and_digest,
    write_manifest,
)
from dit.config import RunConfig
from dit.config_loading import save_config
from dit.distcp import DistcpFile, DistcpSave, plan_files
from dit.distributed.collective_errors import error_in_words, on_all_ranks, on_first_rank
from dit.distributed.data_parallel import gathered_weights
from dit.distributed.watchdog import is_lost_peer
from dit.models.parameter_groups import frozen_weights
from dit.safe_writing import sync_folder
from dit.train.checkpoint.data_position import loader_file
from dit.train.checkpoint.starting_point import ORIGIN, Origin
from dit.train.checkpoint.state_dict import INTERVAL, DataState, TrainProgress, share_of_state
from dit.train.model_and_optimizer import ModelAndOptimizer

_NOT_OF_THE_DISK = (torch.AcceleratorError, torch.OutOfMemoryError)


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedCheckpoint:
    """A complete checkpoint on disk."""

    path: Path
    seconds: float  # from `begin` to the end


@dataclass(frozen=True, kw_only=True, slots=True)
class _WrittenFile:
    """A file that is complete on disk."""

    name: str
    digest: FileDigest
    results: list[WriteResult] = field(default_factory=list)  # for the index of .distcp files


@dataclass(frozen=True, kw_only=True, slots=True)
class _PendingSave:
    """A checkpoint whose files are being written."""

    final: Path
    partial: Path
    distcp: DistcpSave
    jobs: list[Future[_WrittenFile]]  # the .distcp files in their order, then the loader's position
    data: DataState
    best: bool
    began: float
    bytes: int  # of all ranks, approximately


class Saver:
    """Writes the checkpoints of a run, one at a time."""

    def __init__(self, folder: Path, config: RunConfig, *, adapters: str | None = None):
        """Prepares saves to the run folder `folder`.

        `adapters` is the text of `lora.json`; None if the run trains no adapters.
        """
        self.checkpoints = folder / "checkpoints"
        self.config, self._adapters = config, adapters
        self._frozen = frozen_weights(config)
        self.origin: Origin | None = None  # files of the weights that the run started from
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="checkpoint")
        self._pending: _PendingSave | None = None
        self._removal: Future[None] | None = None

    def begin(
        self,
        model: ModelAndOptimizer,
        *,
        progress: TrainProgress,
        data: DataState,
        best: bool = False,
        critic: ModelAndOptimizer | None = None,
    ) -> None:
        """Copies the state of this step, and starts to write it; all ranks call it.

        The next step may begin when it returns. `best` states that no earlier checkpoint had a
        lower validation loss. The state of a `critic` is saved in the same checkpoint.

        Raises:
            CheckpointError: a rank could not write; older checkpoints are unchanged.
        """
        assert self._pending is None, "finish the pending save first"
        began = time.perf_counter()
        final = self.checkpoints / f"{STEP}{progress.step:08d}"
        partial = final.with_name(f"{PARTIAL}{final.name}")
        with self._explain_errors(partial):
            on_first_rank(lambda: self._make_folder(partial))
            of_critic = critic.chunks if critic is not None else []
            with gathered_weights(model.chunks), gathered_weights(of_critic):
                state = share_of_state(model, frozen=self._frozen, critic=critic)
                state |= asdict(progress)
                distcp = plan_files(state, partial)
            size = sum(on_all_ranks(lambda: sum(file.bytes for file in distcp.files)))
        jobs = [self._threads.submit(_write_distcp, file) for file in distcp.files]
        if data.position is not None:
            position = BytesIO()
            torch.save(data.position, position)
            file = partial / loader_file(model.groups.dp.rank())
            jobs.append(self._threads.submit(_write_bytes, file, position))
        self._pending = _PendingSave(
            final=final,
            partial=partial,
            distcp=distcp,
            jobs=jobs,
            data=data,
            best=best,
            began=began,
            bytes=size,
        )

    @property
    def pending(self) -> str | None:
        """Name of the checkpoint that is being written, or None."""
        return self._pending.final.name if self._pending is not None else None

    @property
    def writing(self) -> bool:
        """Whether this rank is still writing files of the pending checkpoint."""
        return self._pending is not None and not all(job.done() for job in self._pending.jobs)

    def finish(self) -> SavedCheckpoint | None:
        """Waits for the files of all ranks, then publishes and returns the checkpoint.

        All ranks call it. It returns None if no save is pending.

        Raises:
            CheckpointError: a rank could not write; older checkpoints are unchanged.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        with self._explain_errors(pending.partial, size=pending.bytes):
            of_ranks = on_all_ranks(lambda: _digests(pending))
            known = {name: digest for files in of_ranks for name, digest in files.items()}
            written = [job.result() for job in pending.jobs]
            distcp = pending.distcp
            distcp.write_index([file.results for file in written[: len(distcp.files)]])
            on_first_rank(lambda: self._publish(pending, known))
        return SavedCheckpoint(path=pending.final, seconds=time.perf_counter() - pending.began)

    def close(self) -> None:
        """Ends this rank's threads after their work; a pending save is left unfinished."""
        if self._pending is None and self._removal is not None:
            self._removal.result()  # `shutdown` would cancel a removal that has not begun
        self._threads.shutdown(wait=self._pending is None, cancel_futures=True)

    def _make_folder(self, partial: Path) -> None:
        self.clear()
        partial.mkdir(parents=True)

    def clear(self) -> None:
        """Removes the remains of unfinished saves; the first rank calls it.

        Files that cannot be removed yet, such as files on NFS that the mirror reads, are removed by
        a later call.
        """
        if self._removal is not None:
            self._removal.result()
        _remove([*self.checkpoints.glob(f"{PARTIAL}*")])
        for name in (LATEST, LOWEST_VAL):
            self._new(name).unlink(missing_ok=True)

    def _describe(self, partial: Path, data: DataState) -> None:
        save_config(self.config, partial / "config.yaml")
        # Not `save_file`: only the owner may read its files.
        null = {name: value.contiguous() for name, value in data.null.items()}
        (partial / NULL_TEXT).write_bytes(to_bytes(null))
        (partial / INTERVAL).write_bytes(to_bytes(dict(data.interval)))
        if self._adapters is not None:
            (partial / ADAPTERS).write_text(self._adapters)
        if self.origin is not None:
            (partial / ORIGIN).write_text(self.origin.to_json())
        if data.card is not None:
            (partial / "dataset_card.json").write_text(json.dumps(data.card, indent=1))

    def _publish(self, pending: _PendingSave, known: dict[str, FileDigest]) -> None:
        """Publishes a checkpoint whose tensors are written, and removes the oldest ones.

        The last files and the manifest are written; then the folder is renamed, and LATEST points
        to it.
        """
        self._describe(pending.partial, pending.data)
        write_manifest(pending.partial, known)
        final = pending.final
        names = [LATEST, LOWEST_VAL] if pending.best else [LATEST]
        for name in names:  # written before anything is renamed, since the disk may be full
            self._new(name).write_text(final.name)
            sync_and_digest(self._new(name))
        old = [final] if final.exists() else []  # from before a return to an earlier checkpoint
        renamed = [_rename_for_removal(path) for path in old]
        pending.partial.rename(final)
        sync_folder(self.checkpoints)
        for name in names:
            self._new(name).replace(self.checkpoints / name)
        # Checkpoints of later steps are also from before such a return: they stay until replaced.
        done = [p for p in saved_checkpoints(self.checkpoints) if p.name <= final.name]
        keep, best = self.config.checkpoint.keep_last, self._best()
        old = [path for path in (done[:-keep] if keep else []) if path.name != best]
        renamed += [_rename_for_removal(path) for path in old]
        self._removal = self._threads.submit(_remove, renamed)

    def _new(self, name: str) -> Path:
        return self.checkpoints / f".{name}.new"

    @contextmanager
    def _explain_errors(self, path: Path, *, size: int = 0) -> Iterator[None]:
        """A context that turns errors of a save into `CheckpointError`, and drops the failed save.

        `size` is the approximate size of the checkpoint in bytes.
        """
        try:
            yield
        except (CheckpointException, OSError, RuntimeError) as error:  # torch's, at a full disk
            if is_lost_peer(error) or isinstance(error, _NOT_OF_THE_DISK):
                raise
            if torch.distributed.get_rank() == 0:
                with suppress(OSError):  # this error would hide why the save has failed
                    self.clear()
            raise CheckpointError(
                f"{path} cannot be written ({error_in_words(error)}); is the disk full? Free space,"
                f" or choose another checkpoint.save. {self._disk_space(size)}Older checkpoints are"
                " unchanged, and this one is removed: the same command continues from them"
            ) from error

    def _disk_space(self, size: int) -> str:
        """Sentence with the size of a checkpoint and the free space; empty if these are unknown."""
        try:
            free = shutil.disk_usage(self.checkpoints).free
            for last in saved_checkpoints(self.checkpoints)[-1:]:
                size = max(size, sum(file.stat().st_size for file in last.iterdir()))
        except OSError:
            return ""
        needed = f"A checkpoint needs about {size / 1e6:,.1f} MB, and " if size else ""
        return f"{needed}{free / 1e6:,.1f} MB are free there now. "

    def _best(self) -> str:
        pointer = self.checkpoints / LOWEST_VAL
        return pointer.read_text(errors="replace").strip() if pointer.is_file() else ""


def save_checkpoint(
    folder: Path,
    model: ModelAndOptimizer,
    *,
    progress: TrainProgress,
    config: RunConfig,
    data: DataState,
) -> Path:
    """Writes RUN/checkpoints/step_N and returns its path once it is complete; all ranks call it.

    Raises:
        CheckpointError: a rank could not write; older checkpoints are unchanged.
    """
    saver = Saver(folder, config)
    try:
        saver.begin(model, progress=progress, data=data)
        saved = saver.finish()
    finally:
        saver.close()
    assert saved is not None
    return saved.path


def _write_distcp(file: DistcpFile) -> _WrittenFile:
    results = file.write()
    return _WrittenFile(name=file.path.name, digest=sync_and_digest(file.path), results=results)


def _write_bytes(file: Path, content: BytesIO) -> _WrittenFile:
    file.write_bytes(content.getbuffer())
    return _WrittenFile(name=file.name, digest=sync_and_digest(file))


def _digests(pending: _PendingSave) -> dict[str, FileDigest]:
    wait(pending.jobs)
    written = [job.result() for job in pending.jobs]
    return {file.name: file.digest for file in written}


def _rename_for_removal(path: Path) -> Path:
    """Renames a checkpoint before deletion, so that a kill leaves no incomplete checkpoint."""
    return path.rename(path.with_name(f"{PARTIAL}removed_{path.name}"))


def _remove(folders: list[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
