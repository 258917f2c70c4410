"""Reads paths that a person types, on a command line or in a file of settings.

1. `~/` and `~user/` are home folders, as in a shell.
2. An address (`s3://bucket/run`) is refused, because files are read and written on this machine.
   `pathlib` would turn it into a folder `s3:`, and Megatron-Core would use the store.
3. `$NAME` is refused if no file of this name exists: a shell replaces it, a file of settings does
   not. Python's None is refused as well.

A colon alone does not make an address: `C:/runs` and `wan:lora/run1` are folders. Libraries that
take the part before a colon for a file system get absolute paths.
"""

from __future__ import annotations

import os
import re
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Annotated

# Names before `://`, or chains of them as in fsspec (`simplecache::s3://`).
_ADDRESS = re.compile(r"\s*[a-z][a-z0-9+.:-]*://", re.IGNORECASE)
# What `pathlib` and some shells leave of `s3://`, by the names that file layers know.
_ONE_SLASH = re.compile(
    r"\s*(msc|s3a?|s3n|gs|gcs|ais|az|abfss?|adl|wasbs?|oci|oss|file|https?|ftps?|sftp|ssh|hf|hdfs"
    r"|webhdfs|rclone|dss):/",
    re.IGNORECASE,
)
_MSC = "msc://"
_OF_ENERGON = (_MSC, "file://", "rclone://", "dss://")
_VARIABLE = re.compile(r"\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*\})")


class PathError(ArgumentTypeError, ValueError):
    """A text is not a usable path; argparse and other readers show the message."""


def local_path(text: str, *, base: Path = Path()) -> Path:
    """The file or folder of this machine that `text` names, relative to `base`.

    Raises:
        PathError: `text` is an address or None, or has a variable or user that cannot be replaced.
    """
    return base / local_text(text, base=base)


def local_text(text: str, *, base: Path = Path()) -> str:
    """The path that `text` names, as text whose form (such as a leading ./) is kept.

    Where a name on the Hugging Face hub is allowed, it passes unchanged.

    Raises:
        PathError: as `local_path`.
    """
    if is_address(text):
        raise PathError(
            f"{text} is an address, and this is a path of this machine: name a folder here, and"
            " copy from or to the store (checkpoint.mirror copies checkpoints); a folder of that"
            f" name is ./{text.strip()}"
        )
    return _expanded(text, base)


def data_place(text: str) -> str:
    """The location of a dataset: a path of this machine, or an address that Energon can read.

    Raises:
        PathError: as `local_path`, or Energon cannot read the address `text`.
    """
    return _address(text, _OF_ENERGON) if is_address(text) else _expanded(text, Path())


def checkpoint_place(text: str) -> str:
    """The location of a checkpoint to read: a path of this machine, or the address of a mirror.

    Raises:
        PathError: as `local_path`, or `text` is an address other than msc://.
    """
    return _address(text, (_MSC,)) if is_address(text) else _expanded(text, Path())


def store_address(text: str) -> str:
    """`text` as the address of a folder in an object store.

    Raises:
        PathError: `text` is not an address that begins with msc://.
    """
    return _address(not_none(text), (_MSC,))


def _address(text: str, known: tuple[str, ...]) -> str:
    if not text.startswith(known):
        raise PathError(
            f"{text} is an address of an unknown kind: write msc://PROFILE/PATH, with a profile of"
            " that store in the file that MSC_CONFIG names"
        )
    return text


LocalPath = Annotated[str, local_text]
"""Type of a configuration key or option that is a path of this machine; some keys also take a name
on the Hugging Face hub."""
CheckpointPath = Annotated[str, checkpoint_place]
"""Type of an option that names a checkpoint to read."""
DataPath = Annotated[str, data_place]
"""Type of a configuration key that names a dataset."""
StoreAddress = Annotated[str, store_address]
"""Type of a configuration key that names a folder in an object store."""


def is_address(text: str) -> bool:
    """Whether `text` is an address, such as `s3://bucket/run` or `msc:/profile/run`."""
    return bool(_ADDRESS.match(text) or _ONE_SLASH.match(text))


def not_none(text: str) -> str:
    """`text`, unless it is Python's None, which would become a file name.

    Raises:
        PathError: `text` is None in any case of its letters.
    """
    if text.lower() == "none":
        raise PathError(
            f"{text} would be read as the name of a file: write null for no value, or leave it out"
            f" (./{text} is a file of this name)"
        )
    return text


def _expanded(text: str, base: Path) -> str:
    found = os.path.expanduser(not_none(text))
    if os.path.lexists(base / found):
        return found
    if found.startswith("~"):
        user = found.partition("/")[0]
        raise PathError(
            f"{text}: this machine knows no user {user[1:]}, whose home {user} would be; write the"
            f" whole path, or ./{text} for a file of that name"
        )
    if variable := _unreplaced(base / found):
        raise PathError(
            f"{text} does not exist, and nothing replaces {variable} here; write"
            f" {os.path.expandvars(found)}{_unset(variable)}, or make the folder {variable} first"
        )
    return found


def _unreplaced(path: Path) -> str:
    """The last shell variable in `path`; empty if there is none, or if the path up to it exists."""
    parts = path.parts
    for length in range(len(parts), 0, -1):
        if variable := _VARIABLE.search(parts[length - 1]):
            return "" if os.path.lexists(Path(*parts[:length])) else variable[0]
    return ""


def _unset(variable: str) -> str:
    known = os.path.expandvars(variable) != variable
    return "" if known else f" (no variable {variable} is set)"
