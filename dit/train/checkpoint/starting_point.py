"""The checkpoint that a run starts from, and the folder that it may be saved into."""

from __future__ import annotations

import os
from pathlib import Path

from dit.checkpoint_paths import CheckpointError, find_checkpoint
from dit.config import RunConfig
from dit.data.datasets import META
from dit.local_path import is_address


def named_checkpoint(place: str | Path, *, named: str) -> Path:
    """The checkpoint that a path means, which errors call by `named`.

    Of one in an object store (checkpoint.mirror) it is a copy on this machine.

    Raises:
        CheckpointError: there is none, or it is not complete.
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


def starting_point(config: RunConfig) -> Path | None:
    """The checkpoint that a run starts from; None where it draws its own weights.

    It is the newest one of the run itself, else that of `checkpoint.load`. Only the run's own
    folder may hold none yet.

    Raises:
        CheckpointError: there is one, of which no checkpoint can be told.
    """
    c = config.checkpoint
    own = find_checkpoint(Path(c.save)) if c.save else None
    if own is not None or not c.load:
        return own
    if c.save and Path(c.load).resolve() == Path(c.save).resolve():
        return None
    return named_checkpoint(c.load, named=f"checkpoint.load={c.load}")


def goes_on_from(config: RunConfig) -> Path | None:
    """The checkpoint whose steps `resume` goes on with; None where the run starts at step 0.

    Raises:
        CheckpointError: as `starting_point`.
    """
    c = config.checkpoint
    own = find_checkpoint(Path(c.save)) if c.save else None
    return own if own or c.finetune else starting_point(config)


def check_writable(folder: Path) -> None:
    """Checks that a run may be saved into a folder, which need not be there yet.

    Raises:
        ValueError: it holds shards, or cannot be written.
    """
    if (folder / META).is_dir():
        raise ValueError(
            f"checkpoint.save={folder} is a dataset, and packing it again would remove the run;"
            " choose another folder"
        )
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise unwritable(folder, f"{there} is no folder that this user may write to")


def unwritable(folder: Path, why: object) -> ValueError:
    """The error for a run folder that cannot be written."""
    return ValueError(
        f"checkpoint.save={folder} cannot be written ({why}); choose a folder that every process"
        " may write to"
    )
