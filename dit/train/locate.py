"""Which checkpoint a path means, whether it is whole, and what to do where it is not."""

from __future__ import annotations

from pathlib import Path
from textwrap import shorten

from dit.config import RunConfig
from dit.configuring import read_config

LATEST = "LATEST"
STEP = "step_"
# Megatron-Core's own, beside the .distcp files whose names .metadata knows; and ours.
_CORE = ("metadata.json", ".metadata", "common.pt")
_WHOLE = (*_CORE, "config.yaml", "null_text.safetensors")


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged, or of another model."""


def find_checkpoint(path: Path) -> Path | None:
    """The checkpoint that `path` means: a run folder, a checkpoint, or a LATEST file.

    None where the folder holds none (yet).

    Raises:
        CheckpointError: it is not complete, or LATEST names one that is not there.
    """
    if any((path / name).is_file() for name in _CORE):
        return _complete(path)
    for folder in (path.parent,) if path.name == LATEST else (path, path / "checkpoints"):
        pointer = folder / LATEST
        if pointer.is_file():
            name = pointer.read_text(errors="replace").strip()
            if not name or not (folder / name).is_dir():
                raise CheckpointError(
                    f"{pointer} names {name!r}, which is not there; {other_than(folder, name)}"
                )
            return _complete(folder / name)
        # A run that was killed between its first checkpoint and its pointer to it.
        if steps := sorted(folder.glob(f"{STEP}*")):
            return _complete(steps[-1])
    return None


def _complete(path: Path) -> Path:
    missing = [name for name in _WHOLE if not (path / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{path} has no {', '.join(missing)}; {other_than(path.parent, path.name)}"
        )
    return path


def other_than(folder: Path, name: str) -> str:
    """What to do about a checkpoint that is of no use."""
    others = sorted(p.name for p in folder.glob(f"{STEP}*") if p.name != name)
    if others:
        return f"write {others[-1]} into {folder / LATEST} to go on from there"
    return "no other checkpoint is beside it: start a new run with another checkpoint.save"


def saved_config(path: Path) -> RunConfig:
    """Configuration of the run that saved a checkpoint.

    Raises:
        CheckpointError: it cannot be read.
    """
    file = path / "config.yaml"
    try:
        return read_config(file)
    except (ValueError, OSError) as error:
        raise damaged(file, error) from error


def damaged(path: Path, cause: BaseException) -> CheckpointError:
    """The error for a checkpoint, or a file of it, that `cause` kept from being read."""
    reason = shorten(f"{type(cause).__name__} {cause}", width=160, placeholder="...")
    place = path if path.is_dir() else path.parent
    return CheckpointError(
        f"{path} cannot be read, a file is missing or damaged ({reason});"
        f" {other_than(place.parent, place.name)}"
    )
