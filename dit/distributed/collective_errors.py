"""Collective calls that raise an error of one rank on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from textwrap import shorten
from typing import Any, TypeVar

from dit.parsing import cause

T = TypeVar("T")


class RankError(RuntimeError):
    """An error of one rank, raised on all ranks."""


def on_all_ranks(work: Callable[[], T]) -> list[T]:
    """The results of `work` on all ranks, in the order of ranks; all ranks call it.

    Without it, ranks that succeed would wait for a rank that has left with an error.

    Raises:
        RankError: `work` raised an OSError, RuntimeError or ValueError on a rank.
    """
    import torch.distributed as dist  # late: other code uses this file without torch

    mine: tuple[T | None, str] = (None, "")
    try:
        mine = (work(), "")
    except (OSError, RuntimeError, ValueError) as error:
        mine = (None, error_in_words(error))
    outcomes: list[tuple[T, str]] = [mine] * dist.get_world_size()  # type: ignore[list-item]
    if len(outcomes) > 1:  # alone, no collective: it would fail on a device without free memory
        dist.all_gather_object(outcomes, mine)
    first_error = next((text for _, text in outcomes if text), "")
    if first_error:
        raise RankError(first_error)
    return [result for result, _ in outcomes]


def on_first_rank(work: Callable[[], object]) -> None:
    """Runs `work` on the first rank while all others wait; all ranks call it.

    Raises:
        RankError: as `on_all_ranks`.
    """
    import torch.distributed as dist

    on_all_ranks(work if dist.get_rank() == 0 else lambda: None)


def from_first_rank(work: Callable[[], T]) -> T:
    """The result of `work` on the first rank, sent to all ranks; all ranks call it.

    Raises:
        ValueError: on every rank, if `work` raised it. Other errors are raised on the first rank
            alone.
    """
    import torch.distributed as dist

    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = work()
        except ValueError as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def error_in_words(error: BaseException) -> str:
    """`error` as one line of at most 400 characters.

    It says that the disk is full where torch reports an error of offsets instead.
    """
    known = error.__context__ if isinstance(error.__context__, OSError) else error
    text = str(known) if isinstance(known, RankError) else cause(known)
    return shorten(text, width=400, placeholder="...")
