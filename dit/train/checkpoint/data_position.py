"""Reads the loader states in a checkpoint, and restores them; each file is read once.

If a run resumes with the same numbers of data ranks and loader processes, each data rank reads its
own file, and sends the others only the small keys of its state. With other numbers, or for files of
an earlier version, the data ranks divide the files among them and send each other the whole states,
because resharding needs the remaining samples of every reader.
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
"""State of a loader as plain values."""

_LARGE: Position = {"readers": b"", "tallies": []}
"""Large keys of a loader state, and the empty values that other ranks get in their place."""


def loader_file(data_rank: int) -> str:
    return f"loader_{data_rank:05d}.pt"


def data_positions(path: Path, layout: LoaderLayout, *, rank: int | None) -> list[Position]:
    """Loader states of all data ranks that saved the checkpoint `path`, by rank.

    All processes call it. `rank` is the data-parallel rank for which this process reads; None if
    this process does not read. If the checkpoint was saved with the same `layout`, the states of
    other ranks come without their readers.

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
    """Loader states of all data ranks that saved the checkpoint `path`, each with all its readers.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    first = _read(path / loader_file(0))
    ranks = _saved_ranks(path, {0: first})
    return [first, *(_read(path / loader_file(rank)) for rank in range(1, ranks))]


def restore_position(loader: PackLoader, states: list[Position], path: Path) -> None:
    """Continues `loader` from the `states` in the checkpoint `path`.

    Raises:
        CheckpointError: the checkpoint was saved with other data, or the present ranks cannot
            divide its states.
    """
    try:
        loader.load_state_dict(states, places=places_of(saved_config(path).dataset))
    except DataError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _large(state: Position) -> Position:
    return {name: empty for name, empty in _LARGE.items() if name in state}


def _saved_ranks(path: Path, outlines: dict[int, Position]) -> int:
    """Number of data ranks that saved the checkpoint; 1 if the state of rank 0 is missing."""
    ranks = outlines.get(0, {}).get("ranks", 1)
    if type(ranks) is not int:
        raise damaged(path / loader_file(0), ValueError(f"ranks is {ranks!r}, not an integer"))
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
        raise damaged(file, ValueError(f"it holds a {type(position).__name__}, not a dict"))
    return position


def _exchange(work: Callable[[], dict[int, Position]]) -> dict[int, Position]:
    """Results of `work` on all processes, merged; an error of one is raised on all of them."""
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
