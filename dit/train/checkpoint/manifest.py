"""manifest.json of a checkpoint: its format, and the size and checksum of each of its files.

{"format": 1, "software": "megatron-dit 0.1.0", "files": {"common.pt": {"bytes": 1, "sha256": "…"}}}

The checksums are those of `sha256sum`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dit.json_text import parse_json

MANIFEST = "manifest.json"
FORMAT = 1
"""Goes up when this version writes what earlier ones would misread; without a manifest it is 0."""
_LONGEST = 255  # bytes of a name, as file systems have it
SOFTWARE = f"megatron-dit {version('megatron-dit')}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sealed:
    """A file as it was when its checkpoint was written."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What belongs to a checkpoint."""

    format: int
    software: str  # that wrote it
    files: Mapping[str, Sealed]


def sum_up(file: Path) -> Sealed:
    """Size and checksum of a file."""
    with file.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
        return Sealed(bytes=handle.tell(), sha256=digest)


def seal(file: Path) -> Sealed:
    """As `sum_up`, and the file outlives a loss of power."""
    with file.open("rb") as handle:
        os.fsync(handle.fileno())
    return sum_up(file)


def write_manifest(folder: Path, known: Mapping[str, Sealed]) -> None:
    """Lists every file in `folder`; those that are not `known` are sealed here."""
    names = sorted({file.name for file in folder.iterdir()} | known.keys())
    files = {name: asdict(known.get(name) or seal(folder / name)) for name in names}
    content = {"format": FORMAT, "software": SOFTWARE, "files": files}
    (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n")
    seal(folder / MANIFEST)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint; None where it was saved before there were any.

    Raises:
        ValueError: it is damaged.
    """
    file = folder / MANIFEST
    if not file.is_file():
        return None
    match parse_json(file.read_bytes()):
        case {"format": int(form), "software": str(software), "files": dict(files)} if files:
            sealed = {name: _sealed(name, entry) for name, entry in files.items()}
            return Manifest(format=form, software=software[:_LONGEST], files=sealed)
    raise ValueError("it lacks format, software or files")


def _sealed(name: str, entry: Any) -> Sealed:
    """Raises ValueError where it is no entry of a file in the checkpoint's own folder."""
    if not is_file_name(name):
        raise ValueError(f"{name[:_LONGEST]!r} is no name of a file beside it")
    match entry:
        case {"bytes": int(size), "sha256": str(digest)}:
            return Sealed(bytes=size, sha256=digest)
    raise ValueError(f"{name} lacks bytes or sha256")


def is_file_name(name: str) -> bool:
    """Whether a name that a file gives stays in that file's folder."""
    plain = name == Path(name).name and name not in ("", ".", "..") and "\0" not in name
    return plain and len(os.fsencode(name)) <= _LONGEST


def changed_files(folder: Path, manifest: Manifest, *, part: slice = slice(None)) -> list[str]:
    """Names of the files, or of a `part` of them by falling size, that are not as they were."""
    largest_first = sorted(manifest.files, key=lambda name: -manifest.files[name].bytes)
    return [name for name in largest_first[part] if sum_up(folder / name) != manifest.files[name]]
