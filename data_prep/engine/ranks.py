"""Processes that `torch.distributed.run` has launched, sharing one output folder.

Each takes its blocks of the plan, writes its own shards and its own ledger. They only ever wait for
each other; what they know of each other lies in the folder.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

_PATIENCE = timedelta(days=30)  # the slowest rank may take long; a dead one ends them all


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """Which of how many processes this is."""

    rank: int = 0
    world: int = 1
    local: int = 0

    def meet(self) -> None:
        """Waits until all are here."""
        if self.world > 1:
            from torch import distributed

            distributed.barrier()

    def leave(self) -> None:
        """Ends what `join` began, and no process group of anybody else's."""
        if self.world > 1:
            from torch import distributed

            distributed.destroy_process_group()


ALONE = Ranks()


def join() -> Ranks:
    """The ranks that the launcher's variables describe; one alone where there is no launcher."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return ALONE
    from torch import distributed

    distributed.init_process_group("gloo", timeout=_PATIENCE)
    return Ranks(rank=distributed.get_rank(), world=world, local=int(os.environ["LOCAL_RANK"]))
