"""Processes launched by `torch.distributed.run` that share one output folder.

Each rank takes its own blocks of the plan, and writes its own shards and its own ledger. Ranks only
wait for each other at barriers; all information goes through files in the folder.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

_PATIENCE = timedelta(days=30)  # a slow rank may take long; a dead one ends all by the launcher


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """The rank of this process, and the number of ranks."""

    rank: int = 0
    world: int = 1
    local: int = 0

    def barrier(self) -> None:
        """Waits until all ranks are here."""
        if self.world > 1:
            from torch import distributed

            distributed.barrier()

    def leave(self) -> None:
        """Ends the process group that `join` began."""
        if self.world > 1:
            from torch import distributed

            distributed.destroy_process_group()


ALONE = Ranks()


def join() -> Ranks:
    """The ranks by the environment variables of the launcher; `ALONE` without a launcher."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return ALONE
    from torch import distributed

    distributed.init_process_group("gloo", timeout=_PATIENCE)
    return Ranks(rank=distributed.get_rank(), world=world, local=int(os.environ["LOCAL_RANK"]))
