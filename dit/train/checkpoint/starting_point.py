"""The checkpoint from which a run starts, and checks of the folder for its own checkpoints.

Each checkpoint of the run has an origin.json, with the source of its first weights and the digests
of their files:

{"path": "wan/transformer", "digest": "…", "files": {"config.json": {"bytes": 1, "sha256": "…"}}}
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from dit.checkpoint_paths import (
    CheckpointError,
    FileDigest,
    damaged,
    file_digest,
    find_checkpoint,
    parse_digest,
    saved_bytes,
)
from dit.config import CheckpointConfig
from dit.data.datasets import META
from dit.distributed.collective_errors import RankError, on_all_ranks
from dit.distributed.watchdog import heartbeat
from dit.local_path import is_address
from dit.parsing import parse_json
from dit.system_errors import explained


def named_checkpoint(place: str | Path, *, named: str) -> Path:
    """The checkpoint at `place`, a local path or the address of an object store.

    A checkpoint in an object store (checkpoint.mirror) is first copied to this machine. `named`
    says in error messages where `place` is from, as in `checkpoint.load=runs/a`.

    Raises:
        CheckpointError: there is no checkpoint, or it is incomplete.
    """
    if isinstance(place, str) and is_address(place):
        from dit.train.checkpoint.object_store import fetched_checkpoint

        found = fetched_checkpoint(place)
    else:
        found = Path(place)
    path = find_checkpoint(found) if found is not None else None
    if path is None:
        raise CheckpointError(
            f"{named} holds no checkpoint; give a run folder, a checkpoints/step_... folder or a"
            " LATEST file"
        )
    return path


@dataclass(frozen=True, kw_only=True, slots=True)
class StartingPoint:
    """The checkpoint from which a run starts, and what the run takes from it."""

    checkpoint: Path | None = None  # None: weights are random, or those of another file
    goes_on: bool = False  # the run continues the checkpoint's steps; else it takes only weights
    own: bool = False  # the checkpoint was saved by this run

    @property
    def continued(self) -> Path | None:
        """The checkpoint whose steps the run continues; None if the run starts at step 0."""
        return self.checkpoint if self.goes_on else None


def starting_point(config: CheckpointConfig) -> StartingPoint:
    """The run's own newest checkpoint, or else the checkpoint of `checkpoint.load`.

    `checkpoint.save` may hold no checkpoint yet; `checkpoint.load`, if set, must hold one.

    Raises:
        CheckpointError: the newest checkpoint is incomplete, or `checkpoint.load` holds none.
    """
    save, load = config.save, config.load
    if own := find_checkpoint(Path(save)) if save else None:
        return StartingPoint(checkpoint=own, goes_on=True, own=True)
    if not load or (save and Path(load).resolve() == Path(save).resolve()):
        return StartingPoint()
    other = named_checkpoint(load, named=f"checkpoint.load={load}")
    return StartingPoint(checkpoint=other, goes_on=not config.finetune)


def check_writable(folder: Path) -> None:
    """Checks that `folder`, which need not exist yet, can become a run folder.

    Raises:
        ValueError: `folder` holds shards, or cannot be written.
    """
    if (folder / META).is_dir():
        raise ValueError(
            f"checkpoint.save={folder} is a dataset, and packing it again would remove the run;"
            " choose another folder"
        )
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise unwritable(folder, f"{there} is not a folder that this user may write to")


def unwritable(folder: Path, why: str) -> ValueError:
    """The error for a run folder that cannot be written because of `why`."""
    return ValueError(
        f"checkpoint.save={folder} cannot be written ({why}); choose a folder that every process"
        " may write to"
    )


ORIGIN = "origin.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Path and file digests of the weights from which a run started, for `origin.json`."""

    path: str  # of their folder
    files: Mapping[str, FileDigest]  # by name, from this folder

    @property
    def digest(self) -> str:
        """SHA-256 of the `sha256sum` lines of the files, sorted by name, without paths."""
        lines = (f"{self.files[name].sha256}  {name}\n" for name in sorted(self.files))
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def to_json(self) -> str:
        files = {name: asdict(self.files[name]) for name in sorted(self.files)}
        content = {"path": self.path, "digest": self.digest, "files": files}
        return json.dumps(content, indent=1) + "\n"


def read_origin(folder: Path, names: Sequence[str]) -> Origin:
    """Computes the digests of the files `names` of `folder`; all ranks call it and share the work.

    Raises:
        CheckpointError: a file cannot be read.
    """

    def work() -> dict[str, FileDigest]:
        found = {}
        for name in largest_first[dist.get_rank() :: dist.get_world_size()]:
            heartbeat(f"digest of {name}")
            found[name] = file_digest(folder / name)
        return found

    try:
        largest_first = sorted(names, key=lambda name: -(folder / name).stat().st_size)
        of_ranks = on_all_ranks(work)
    except (OSError, RankError) as error:
        raise CheckpointError(
            f"{folder} cannot be read ({explained(error)}); check the folder and its permissions"
        ) from error
    files = {name: digest for found in of_ranks for name, digest in found.items()}
    return Origin(path=str(folder.resolve()), files=files)


def saved_origin(path: Path) -> Origin | None:
    """The origin stored in the checkpoint `path`; None if the run's first weights were random.

    Raises:
        CheckpointError: the file is damaged.
    """
    if not (path / ORIGIN).is_file():
        return None
    content = saved_bytes(path, ORIGIN)
    try:
        match parse_json(content):
            case {"path": str(place), "files": dict(files)} if files:
                # The names may have a folder, of a second network; no file is opened by them.
                each = {name: parse_digest(Path(name).name, one) for name, one in files.items()}
                return Origin(path=place, files=each)
        raise ValueError("it lacks `path` or `files`")
    except ValueError as error:
        raise damaged(path / ORIGIN, error) from error
