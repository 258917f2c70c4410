"""The folder that a run is written to, which is its own while it lasts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile

import torch.distributed as dist

from dit.config import RunConfig
from dit.folder_lock import FolderInUseError, only_writer


@contextmanager
def run_folder(config: RunConfig) -> Iterator[Path | None]:
    """`checkpoint.save`, made where it is missing, and kept from other runs; all ranks call it.

    None where nothing is to be written.

    Raises:
        FolderInUseError: another run writes to it.
        ValueError: it cannot be written.
    """
    if not config.checkpoint.save:
        yield None
        return
    folder = Path(config.checkpoint.save)
    _make(folder)
    with ExitStack() as held:
        refusal = _hold(folder, held) if dist.get_rank() == 0 else ""
        heard: list[str] = [refusal]
        dist.broadcast_object_list(heard, src=0)
        if heard[0]:  # on all ranks, since none can go on without the first
            raise FolderInUseError(heard[0])
        yield folder


def _make(folder: Path) -> None:
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"checkpoint.save={folder} cannot be written ({error}); choose a folder that"
            " every process may write to"
        ) from error


def _hold(folder: Path, held: ExitStack) -> str:
    """Keeps other runs out of the folder until `held` closes; returns why it cannot."""
    try:
        held.enter_context(only_writer(folder, named=f"checkpoint.save={folder}"))
    except (FolderInUseError, OSError) as error:
        return str(error)
    return ""
