"""What one process finds out for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from dit.distributed.process_groups import device

T = TypeVar("T")


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
