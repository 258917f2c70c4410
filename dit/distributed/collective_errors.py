"""One outcome on all ranks, whatever happened on each."""

from __future__ import annotations

from collections.abc import Callable
from textwrap import shorten
from typing import Any, TypeVar

import torch.distributed as dist

from dit.distributed.process_groups import device

T = TypeVar("T")


class RankError(RuntimeError):
    """What one of the ranks met, in words; raised on all of them."""


def on_all_ranks(work: Callable[[], T]) -> list[T]:
    """What `work` gives on each rank, in order of the ranks; all ranks call it.

    Without it, the ranks without an error would wait for the one that has left with its own.

    Raises:
        RankError: `work` raised an OSError, RuntimeError or ValueError on one of them.
    """
    mine: tuple[T | None, str] = (None, "")
    try:
        mine = (work(), "")
    except (OSError, RuntimeError, ValueError) as error:
        mine = (None, error_in_words(error))
    outcomes: list[tuple[T, str]] = [mine] * dist.get_world_size()  # type: ignore[list-item]
    dist.all_gather_object(outcomes, mine)
    wrong = next((text for _, text in outcomes if text), "")
    if wrong:
        raise RankError(wrong)
    return [result for result, _ in outcomes]


def error_in_words(error: BaseException) -> str:
    """What went wrong, on one line; torch hides a full disk behind an error about offsets."""
    known = error.__context__ if isinstance(error.__context__, OSError) else error
    text = str(known) if isinstance(known, RankError) else f"{type(known).__name__} {known}"
    return shorten(text, width=160, placeholder="...")


def on_first_rank(work: Callable[[], object]) -> None:
    """As `on_all_ranks`, where only the first rank has something to do."""
    on_all_ranks(work if dist.get_rank() == 0 else lambda: None)


def from_first(work: Callable[[], T]) -> T:
    """What `work` gives on the first rank, or the ValueError that it raises there, on all."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = work()
        except ValueError as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0, device=device())
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]
