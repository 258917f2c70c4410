"""Finds a checkpoint, checks that its files are unchanged, and reads its small files.

manifest.json holds the version of the checkpoint's format, and the size and SHA-256 of each file:

{"format": 1, "software": "megatron-dit 0.1.0", "files": {"common.pt": {"bytes": 1, "sha256": "…"}}}
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from dit.config import RunConfig
from dit.config_loading import read_config
from dit.distributed.collective_errors import RankError, error_in_words, on_all_ranks
from dit.parsing import has_aliases, parse_json
from dit.system_errors import explained

if TYPE_CHECKING:
    from torch import Tensor


MANIFEST = "manifest.json"
ADAPTERS = "lora.json"
FORMAT = 1
"""Version of the checkpoint format. It increases when earlier versions of this program would
misread new checkpoints; a checkpoint without manifest has version 0."""
_LONGEST_NAME = 255  # bytes; the limit of file systems
SOFTWARE = f"megatron-dit {version('megatron-dit')}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileDigest:
    """Size and SHA-256 of a file when its checkpoint was written."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Format, software version and file digests of a checkpoint."""

    format: int
    software: str  # the version that wrote it
    files: Mapping[str, FileDigest]


def file_digest(file: Path) -> FileDigest:
    """Size and SHA-256 of `file`."""
    with file.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
        return FileDigest(bytes=handle.tell(), sha256=digest)


def sync_and_digest(file: Path) -> FileDigest:
    """Writes a file through to the disk, so that it survives a power cut; returns its digest."""
    with file.open("rb") as handle:
        os.fsync(handle.fileno())
    return file_digest(file)


def write_manifest(folder: Path, known: Mapping[str, FileDigest]) -> None:
    """Writes the manifest of all files in `folder`; digests that are not `known` are computed."""
    names = sorted({file.name for file in folder.iterdir()} | known.keys())
    files = {name: asdict(known.get(name) or sync_and_digest(folder / name)) for name in names}
    content = {"format": FORMAT, "software": SOFTWARE, "files": files}
    (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n")
    sync_and_digest(folder / MANIFEST)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of the checkpoint `folder`; None if this program's first versions wrote it.

    Raises:
        ValueError: the manifest is damaged.
    """
    file = folder / MANIFEST
    if not file.is_file():
        return None
    return parse_manifest(file.read_bytes())


def parse_manifest(content: bytes) -> Manifest:
    """Parses `content`, the bytes of manifest.json.

    Raises:
        ValueError: the content is not a valid manifest.
    """
    match parse_json(content):
        case {"format": int(form), "software": str(software), "files": dict(files)} if files:
            digests = {name: parse_digest(name, entry) for name, entry in files.items()}
            return Manifest(format=form, software=software[:_LONGEST_NAME], files=digests)
    raise ValueError("the manifest lacks 'format', 'software' or 'files'")


def parse_digest(name: str, entry: Any) -> FileDigest:
    """The digest of the file `name` from its `entry` in manifest.json.

    Raises:
        ValueError: the entry is damaged, or `name` is not in the checkpoint's own folder.
    """
    if not is_file_name(name):
        raise ValueError(f"{name[:_LONGEST_NAME]!r} is not the name of a file in the same folder")
    match entry:
        case {"bytes": int(size), "sha256": str(digest)}:
            return FileDigest(bytes=size, sha256=digest)
    raise ValueError(f"the manifest's entry of {name} lacks 'bytes' or 'sha256'")


def is_file_name(name: str) -> bool:
    """Whether `name`, read from a file, is a plain file name without a folder."""
    plain = name == Path(name).name and name not in ("", ".", "..") and "\0" not in name
    return plain and len(os.fsencode(name)) <= _LONGEST_NAME


def changed_files(folder: Path, manifest: Manifest, *, part: slice = slice(None)) -> list[str]:
    """Names of files whose size or SHA-256 differs from the manifest.

    `part` selects the files that are read, from all files sorted by falling size.
    """
    largest_first = sorted(manifest.files, key=lambda name: -manifest.files[name].bytes)
    return [
        name for name in largest_first[part] if file_digest(folder / name) != manifest.files[name]
    ]


def verify(path: Path) -> None:
    """Compares every file of the checkpoint `path` with its checksum, if it has a manifest.

    All ranks call it, and each reads some of the files.

    Raises:
        CheckpointError: the manifest is damaged, or a file is missing or has changed since it was
            saved.
    """
    import torch.distributed as dist

    manifest = manifest_of(path)
    if manifest is None:
        return
    part = slice(dist.get_rank(), None, dist.get_world_size())
    try:
        by_rank = on_all_ranks(lambda: changed_files(path, manifest, part=part))
    except RankError as error:
        raise damaged(path, error) from error
    if names := [name for of_rank in by_rank for name in of_rank]:
        raise changed(path, names)


LATEST = "LATEST"
LOWEST_VAL = "LOWEST_VAL"
_LONGEST_POINTER = 300  # bytes that are read of LATEST or LOWEST_VAL
POINTERS = (LATEST, LOWEST_VAL)
STEP = "step_"
PARTIAL = ".partial_"
"""Prefix of the folder of a checkpoint that is not yet, or no longer, complete."""
# Files of Megatron-Core, beside the .distcp files that .metadata names.
_CORE_FILES = ("metadata.json", ".metadata")
NULL_TEXT = "null_text.safetensors"
_REQUIRED = (*_CORE_FILES, "config.yaml", NULL_TEXT)  # in every checkpoint of a run


class CheckpointError(ValueError):
    """A checkpoint is missing or damaged, or belongs to another model."""


def find_checkpoint(path: Path) -> Path | None:
    """The checkpoint at `path`: a run folder, a checkpoint, or a file LATEST or LOWEST_VAL.

    For a run folder, or its folder `checkpoints`, the result is the checkpoint that LATEST names;
    without LATEST, the checkpoint of the last step. None if there is no checkpoint (yet).

    Raises:
        CheckpointError: the checkpoint is incomplete, or LATEST names a missing one.
    """
    if any((path / name).is_file() for name in (*_CORE_FILES, MANIFEST)):
        return _complete(path)
    named = path.name in POINTERS
    for folder in (path.parent,) if named else (path, path / "checkpoints"):
        pointer = folder / (path.name if named else LATEST)
        if pointer.is_file():
            return _complete(folder / _named_by(pointer))
        # The run was killed between its first checkpoint and the pointer to it.
        if steps := saved_checkpoints(folder):
            return _complete(steps[-1])
    return None


def step_of(path: Path) -> int | None:
    """The training step in the name of the checkpoint folder `path`; None for other names."""
    step = path.name.removeprefix(STEP)
    return int(step) if path.name.startswith(STEP) and step.isdecimal() else None


def saved_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, in the order of their steps.

    Copies that a user made, such as step_00000100_good, are left out.
    """
    return sorted(path for path in folder.glob(f"{STEP}*") if step_of(path) is not None)


def _named_by(pointer: Path) -> str:
    """Name of the checkpoint that `pointer`, a file LATEST or LOWEST_VAL, names.

    Raises:
        CheckpointError: `pointer` does not name a folder that lies beside it.
    """
    with pointer.open("rb") as stream:
        name = stream.read(_LONGEST_POINTER + 1).decode(errors="replace").strip()
    if not is_file_name(name):
        raise CheckpointError(
            f"{pointer} names {name!r}, and must name a folder next to it;"
            f" {remedy(pointer.parent, name)}"
        )
    if not (pointer.parent / name).is_dir():
        raise CheckpointError(
            f"{pointer} names {name!r}, which is not there; {remedy(pointer.parent, name)}"
        )
    return name


_NEWER = "install that version, or a newer one"


def _complete(path: Path) -> Path:
    if fault := _fault(path):
        advice = "" if fault.endswith(_NEWER) else f"; {remedy(path.parent, path.name)}"
        raise CheckpointError(f"{path} {fault}{advice}")
    return path


def _fault(path: Path) -> str:
    """The reason why the checkpoint `path` is unusable, by names and sizes of its files; or ""."""
    try:
        manifest = read_manifest(path)
    except (ValueError, OSError) as error:
        return f"has a damaged {MANIFEST} ({explained(error)})"
    if manifest is not None and manifest.format > FORMAT:
        return (
            f"has format {manifest.format}, of {manifest.software}, and this is {SOFTWARE}, which"
            f" reads formats up to {FORMAT}; {_NEWER}"
        )
    names = manifest.files if manifest is not None else _REQUIRED
    # Imported checkpoints have no null text. A file that is not listed would not be verified.
    wanted = [name for name in _REQUIRED if name != NULL_TEXT or (path / name).exists()]
    if unlisted := [name for name in wanted if name not in names]:
        return f"has a damaged {MANIFEST} (it does not list {', '.join(unlisted)})"
    if missing := [name for name in names if not (path / name).is_file()]:
        return f"has no {', '.join(missing)}"
    return "" if manifest is None else _wrong_sizes(path, manifest)


def _wrong_sizes(path: Path, manifest: Manifest) -> str:
    sizes = {name: (path / name).stat().st_size for name in manifest.files}
    wrong = [
        f"{name} of {sizes[name]} instead of {entry.bytes} bytes"
        for name, entry in manifest.files.items()
        if sizes[name] != entry.bytes
    ]
    return f"is damaged, with {', '.join(wrong)}" if wrong else ""


def remedy(folder: Path, name: str) -> str:
    """Advice on how to go on without the unusable checkpoint `name` in `folder`."""
    others = [p for p in saved_checkpoints(folder) if p.name != name and not _fault(p)]
    if others:
        return f"write {others[-1].name} into {folder / LATEST} to go on from there"
    return "no other checkpoint is beside it: start a new run with another checkpoint.save"


def manifest_of(path: Path) -> Manifest | None:
    """The manifest of the checkpoint `path`; None if this program's first versions wrote it.

    Raises:
        CheckpointError: the manifest is damaged.
    """
    try:
        return read_manifest(path)
    except (ValueError, OSError) as error:
        raise damaged(path / MANIFEST, error) from error


def has_adapters(path: Path | None) -> bool:
    """Whether the checkpoint `path` holds only LoRA adapters, without the frozen weights."""
    return path is not None and (path / ADAPTERS).is_file()


def saved_config(path: Path) -> RunConfig:
    """Configuration of the run that saved the checkpoint `path`.

    Raises:
        CheckpointError: config.yaml is damaged, or another version of this program wrote it.
    """
    file = path / "config.yaml"
    manifest = manifest_of(path)
    content = saved_bytes(path, file.name)
    if not content.strip():
        raise damaged(file, ValueError("it is empty"))
    if _has_aliases(content):  # nested ones stand for more values than any memory holds
        raise damaged(file, ValueError("it has aliases, which no run writes"))
    try:
        return _read_config(file, content)
    except (ValueError, OSError, RecursionError) as error:
        if manifest is None:
            raise damaged(file, error) from error
        raise CheckpointError(
            f"{file} was saved by {manifest.software}, and this is {SOFTWARE}, which cannot read"
            f" it: {explained(error)}. Install {manifest.software}"
        ) from error


_has_aliases = functools.lru_cache(maxsize=8)(has_aliases)  # a resume asks six times


@functools.lru_cache(maxsize=8)
def _read_config(file: Path, _content: bytes) -> RunConfig:
    """The configuration in `file`, which is read again only if its content has changed."""
    return read_config(file)


def saved_bytes(path: Path, name: str) -> bytes:
    """Content of the small file `name` of a checkpoint, checked against its manifest if it has one.

    Raises:
        CheckpointError: the file is missing or has changed.
    """
    manifest = manifest_of(path)
    try:
        if manifest is not None and file_digest(path / name) != manifest.files.get(name):
            raise changed(path, [name])
        return (path / name).read_bytes()
    except OSError as error:
        raise damaged(path / name, error) from error


def check_index(path: Path) -> None:
    """Verifies the checksums of the files that list the tensors, before they are read.

    Two of these files are pickles, in which one flipped bit may request more memory than the
    machine has.

    Raises:
        CheckpointError: one of the files has changed.
    """
    for name in (*_CORE_FILES, "common.pt"):  # the last is not in all of Megatron-Core 0.19
        if (path / name).is_file():
            saved_bytes(path, name)


def saved_card(path: Path) -> dict[str, Any] | None:
    """`dataset_card.json` of the checkpoint `path`, parsed; None if it has no such file.

    Raises:
        CheckpointError: the file is damaged.
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
        raise damaged(file, ValueError(f"it holds a {type(card).__name__}, not a JSON object"))
    return card


def saved_null_inputs(path: Path) -> dict[str, Tensor]:
    """Network inputs that replace those of a dropped caption, as the checkpoint `path` stores them.

    Raises:
        CheckpointError: the file is damaged.
    """
    import safetensors.torch

    content = saved_bytes(path, NULL_TEXT)
    try:
        return safetensors.torch.load(content)
    except (SafetensorError, KeyError, ValueError) as error:
        raise damaged(path / NULL_TEXT, error) from error


def changed(path: Path, names: list[str]) -> CheckpointError:
    """The error for files `names` whose checksums are not those of the manifest."""
    return CheckpointError(
        f"{path} is damaged: {', '.join(sorted(names))} changed after it was saved (checksums"
        f" differ from {MANIFEST}); {remedy(path.parent, path.name)}"
    )


def damaged(path: Path, cause: BaseException) -> CheckpointError:
    """The error for a checkpoint, or a file of it, that cannot be read because of `cause`."""
    place = path if path.is_dir() else path.parent
    return CheckpointError(
        f"{path} cannot be read, because a file is missing or damaged ({error_in_words(cause)});"
        f" {remedy(place.parent, place.name)}"
    )
