"""The loaders' states of a checkpoint, each of whose files is read once.

With the numbers of data ranks and loader processes that saved it, each data rank reads its own
file, and the others only report that theirs belong to the same step. With other numbers, and after
an earlier version, the files are divided: each data rank reads some of them, and all get all,
because resharding needs what every reader has left.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dit.checkpoint_paths import CheckpointError, damaged, remedy, saved_config
from dit.data import DataError, LoaderLayout, PackLoader, places_of
from dit.data.loader_state import FORMAT

Position = dict[str, Any]
"""A loader state as plain values."""

_LARGE: Position = {"readers": b"", "tallies": []}
"""What a loader needs of its own state alone, and what stands for it in those of other ranks."""


def loader_file(data_rank: int) -> str:
    """Name of the file with the loader state of a data-parallel rank."""
    return f"loader_{data_rank:05d}.pt"


def data_positions(path: Path, layout: LoaderLayout, *, rank: int | None) -> list[Position]:
    """The loader states of all ranks that saved, in their order; all processes call it.

    `rank` is the data-parallel rank for which this process reads; None if another process reads. On
    the `layout` that saved them, the states of other ranks come without their readers.

    Raises:
        CheckpointError: a file is missing or damaged; on all processes.
    """
    own: dict[int, Position] = {}

    def read_own() -> dict[int, Position]:
        if rank is not None and (path / loader_file(rank)).is_file():
            own[rank] = _read(path / loader_file(rank))
        return {rank: {**state, **_large(state)} for rank, state in own.items()}

    outlines = _exchange(read_own)
    if set(outlines) == set(range(layout.ranks)) and all(
        (state.get("ranks"), state.get("workers"), state.get("format"))
        == (layout.ranks, layout.workers, FORMAT)
        for state in outlines.values()
    ):
        return [own.get(n, outlines[n]) for n in range(layout.ranks)]

    def read_share() -> dict[int, Position]:
        if rank is None:
            return {}
        numbers = range(rank, _saved_ranks(path, outlines), layout.ranks)
        return {n: own[n] if n in own else _read(path / loader_file(n)) for n in numbers}

    states = _exchange(read_share)
    return [states[n] for n in sorted(states)]


def read_positions(path: Path) -> list[Position]:
    """Positions in the data of all processes that saved `path`, each with all its readers.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    first = _read(path / loader_file(0))
    ranks = _saved_ranks(path, {0: first})
    return [first, *(_read(path / loader_file(rank)) for rank in range(1, ranks))]


def restore_position(loader: PackLoader, states: list[Position], path: Path) -> None:
    """Continues from the positions of a checkpoint.

    Raises:
        CheckpointError: it was made with other data, or these ranks cannot divide it.
    """
    try:
        loader.load_state_dict(states, places=places_of(saved_config(path).dataset))
    except DataError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _large(state: Position) -> Position:
    return {name: empty for name, empty in _LARGE.items() if name in state}


def _saved_ranks(path: Path, outlines: dict[int, Position]) -> int:
    """The number of data ranks that saved; 1 if the first file is missing."""
    ranks = outlines.get(0, {}).get("ranks", 1)
    if type(ranks) is not int:
        raise damaged(path / loader_file(0), ValueError(f"ranks is {ranks!r}"))
    return max(ranks, 1)


def _read(file: Path) -> Position:
    if not file.is_file():
        path = file.parent
        raise CheckpointError(f"{path} has no {file.name}; {remedy(path.parent, path.name)}")
    try:
        position = torch.load(file, weights_only=True)
    except Exception as error:
        raise damaged(file, error) from error
    if not isinstance(position, dict):
        raise damaged(file, ValueError(f"it holds a {type(position).__name__}"))
    return position


def _exchange(work: Callable[[], dict[int, Position]]) -> dict[int, Position]:
    """The results of `work` on all processes together; its error is raised on all of them."""
    mine: tuple[dict[int, Position], str] = ({}, "")
    try:
        mine = (work(), "")
    except CheckpointError as error:
        mine = ({}, str(error))
    of_all = [mine] * dist.get_world_size()
    dist.all_gather_object(of_all, mine)
    if error := next((text for _, text in of_all if text), ""):
        raise CheckpointError(error)
    return {number: state for states, _ in of_all for number, state in states.items()}
