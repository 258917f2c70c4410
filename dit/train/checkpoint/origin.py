"""Where the weights that a run started from came from, and the digest of their files.

Each checkpoint of the run has it as origin.json:

{"path": "wan/transformer", "digest": "…", "files": {"config.json": {"bytes": 1, "sha256": "…"}}}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from dit.checkpoint_paths import (
    CheckpointError,
    FileDigest,
    damaged,
    file_digest,
    parse_digest,
    saved_bytes,
)
from dit.distributed.collective_errors import RankError, on_all_ranks
from dit.distributed.watchdog import heartbeat
from dit.parsing import parse_json

ORIGIN = "origin.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Files that weights were read from."""

    path: str  # of their folder
    files: Mapping[str, FileDigest]  # by name, in this folder

    @property
    def digest(self) -> str:
        """SHA-256 of what `sha256sum` prints for the files, sorted by name; not of their path."""
        lines = (f"{self.files[name].sha256}  {name}\n" for name in sorted(self.files))
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def to_json(self) -> str:
        files = {name: asdict(self.files[name]) for name in sorted(self.files)}
        content = {"path": self.path, "digest": self.digest, "files": files}
        return json.dumps(content, indent=1) + "\n"


def read_origin(folder: Path, names: Sequence[str]) -> Origin:
    """The origin of weights in files of `folder`; all ranks call it, and each reads some of them.

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
        raise CheckpointError(f"{folder} cannot be read ({error})") from error
    files = {name: digest for found in of_ranks for name, digest in found.items()}
    return Origin(path=str(folder.resolve()), files=files)


def saved_origin(path: Path) -> Origin | None:
    """The origin that a checkpoint keeps; None where its run drew its first weights.

    Raises:
        CheckpointError: the file is damaged.
    """
    if not (path / ORIGIN).is_file():
        return None
    content = saved_bytes(path, ORIGIN)
    try:
        match parse_json(content):
            case {"path": str(place), "files": dict(files)} if files:
                digests = {name: parse_digest(name, entry) for name, entry in files.items()}
                return Origin(path=place, files=digests)
        raise ValueError("it lacks path or files")
    except ValueError as error:
        raise damaged(path / ORIGIN, error) from error
