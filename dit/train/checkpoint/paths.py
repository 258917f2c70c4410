"""Which checkpoint a path means, whether it is whole, and what to do where it is not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from dit.config import RunConfig
from dit.config.loading import read_config
from dit.distributed.collective_errors import error_in_words
from dit.json_text import parse_json
from dit.train.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    SOFTWARE,
    Manifest,
    is_file_name,
    read_manifest,
    sum_up,
)

if TYPE_CHECKING:
    from torch import Tensor

LATEST = "LATEST"
LOWEST_VAL = "LOWEST_VAL"
_LONGEST = 300  # bytes of a pointer that are read
_POINTERS = (LATEST, LOWEST_VAL)
STEP = "step_"
# Megatron-Core's own, beside the .distcp files whose names .metadata knows; and ours.
_CORE = ("metadata.json", ".metadata")
_NULL_TEXT = "null_text.safetensors"
_WHOLE = (*_CORE, "config.yaml", _NULL_TEXT)  # of every checkpoint of a run


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged, or of another model."""


def find_checkpoint(path: Path) -> Path | None:
    """The checkpoint that `path` means: a run folder, a checkpoint, or a file that names one.

    None where the folder holds none (yet).

    Raises:
        CheckpointError: it is not complete, or LATEST names one that is not there.
    """
    if any((path / name).is_file() for name in (*_CORE, MANIFEST)):
        return _complete(path)
    named = path.name in _POINTERS
    for folder in (path.parent,) if named else (path, path / "checkpoints"):
        pointer = folder / (path.name if named else LATEST)
        if pointer.is_file():
            return _complete(folder / _named_by(pointer))
        # A run that was killed between its first checkpoint and its pointer to it.
        if steps := sorted(folder.glob(f"{STEP}*")):
            return _complete(steps[-1])
    return None


def _named_by(pointer: Path) -> str:
    """The checkpoint that LATEST or LOWEST_VAL names, which lies beside it.

    Raises:
        CheckpointError: it names none.
    """
    with pointer.open("rb") as stream:
        name = stream.read(_LONGEST + 1).decode(errors="replace").strip()
    if not is_file_name(name):
        raise CheckpointError(
            f"{pointer} names {name!r}, and must hold the name of a folder beside it;"
            f" {other_than(pointer.parent, name)}"
        )
    if not (pointer.parent / name).is_dir():
        raise CheckpointError(
            f"{pointer} names {name!r}, which is not there; {other_than(pointer.parent, name)}"
        )
    return name


def _complete(path: Path) -> Path:
    if fault := _fault(path):
        raise CheckpointError(f"{path} {fault}; {other_than(path.parent, path.name)}")
    return path


def _fault(path: Path) -> str:
    """Why a checkpoint cannot be used, as far as names and sizes tell; empty where it can."""
    try:
        manifest = read_manifest(path)
    except (ValueError, OSError) as error:
        return f"has a damaged {MANIFEST} ({error})"
    if manifest is not None and manifest.format > FORMAT:
        return (
            f"has format {manifest.format}, of {manifest.software}, and this is {SOFTWARE}, which"
            f" reads formats up to {FORMAT}; install a version as new"
        )
    names = manifest.files if manifest is not None else _WHOLE
    # Imports have no null text; one that is there and not listed would go unchecked.
    wanted = [name for name in _WHOLE if name != _NULL_TEXT or (path / name).exists()]
    if unlisted := [name for name in wanted if name not in names]:
        return f"has a damaged {MANIFEST} (it does not list {', '.join(unlisted)})"
    if missing := [name for name in names if not (path / name).is_file()]:
        return f"has no {', '.join(missing)}"
    return "" if manifest is None else _other_sizes(path, manifest)


def _other_sizes(path: Path, manifest: Manifest) -> str:
    sizes = {name: (path / name).stat().st_size for name in manifest.files}
    wrong = [
        f"{name} of {sizes[name]} instead of {entry.bytes} bytes"
        for name, entry in manifest.files.items()
        if sizes[name] != entry.bytes
    ]
    return f"is damaged, with {', '.join(wrong)}" if wrong else ""


def other_than(folder: Path, name: str) -> str:
    """What to do about a checkpoint that is of no use."""
    others = sorted(p for p in folder.glob(f"{STEP}*") if p.name != name and not _fault(p))
    if others:
        return f"write {others[-1].name} into {folder / LATEST} to go on from there"
    return "no other checkpoint is beside it: start a new run with another checkpoint.save"


def manifest_of(path: Path) -> Manifest | None:
    """The manifest of a checkpoint; None where it was saved before there were any.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        return read_manifest(path)
    except (ValueError, OSError) as error:
        raise damaged(path / MANIFEST, error) from error


def saved_config(path: Path) -> RunConfig:
    """Configuration of the run that saved a checkpoint.

    Raises:
        CheckpointError: it is damaged, or of another version of this program.
    """
    file = path / "config.yaml"
    manifest = manifest_of(path)
    if not saved_bytes(path, file.name).strip():
        raise damaged(file, ValueError("it is empty"))
    try:
        return read_config(file)
    except (ValueError, OSError, RecursionError) as error:
        if manifest is None:
            raise damaged(file, error) from error
        raise CheckpointError(
            f"{file} was saved by {manifest.software}, and this is {SOFTWARE}, which cannot read"
            f" it; install the other version. {error}"
        ) from error


def saved_bytes(path: Path, name: str) -> bytes:
    """Content of a small file of a checkpoint, as it was saved.

    Raises:
        CheckpointError: it is lost, or its checksum is another.
    """
    manifest = manifest_of(path)
    try:
        if manifest is not None and sum_up(path / name) != manifest.files.get(name):
            raise changed(path, [name])
        return (path / name).read_bytes()
    except OSError as error:
        raise damaged(path / name, error) from error


def saved_card(path: Path) -> dict[str, Any] | None:
    """`dataset_card.json` of the data of a checkpoint; None where it has none.

    Raises:
        CheckpointError: it is damaged.
    """
    file = path / "dataset_card.json"
    if not file.is_file():
        return None
    content = saved_bytes(path, file.name)
    try:
        card = parse_json(content)
    except ValueError as error:
        raise damaged(file, error) from error
    if not isinstance(card, dict):
        raise damaged(file, ValueError(f"it holds a {type(card).__name__}"))
    return card


def saved_null_text(path: Path) -> Tensor:
    """[L0, E]: embedding of the empty string, as the data of a checkpoint have it.

    Raises:
        CheckpointError: it is damaged.
    """
    import safetensors.torch

    content = saved_bytes(path, "null_text.safetensors")
    try:
        return safetensors.torch.load(content)["text"]
    except (SafetensorError, KeyError, ValueError) as error:
        raise damaged(path / "null_text.safetensors", error) from error


def changed(path: Path, names: list[str]) -> CheckpointError:
    """The error for a checkpoint of which these files have not the checksums of its manifest."""
    return CheckpointError(
        f"{path} is damaged: {', '.join(sorted(names))} changed after it was saved (the checksum"
        f" is another); {other_than(path.parent, path.name)}"
    )


def damaged(path: Path, cause: BaseException) -> CheckpointError:
    """The error for a checkpoint, or a file of it, that `cause` kept from being read."""
    place = path if path.is_dir() else path.parent
    return CheckpointError(
        f"{path} cannot be read, a file is missing or damaged ({error_in_words(cause)});"
        f" {other_than(place.parent, place.name)}"
    )
