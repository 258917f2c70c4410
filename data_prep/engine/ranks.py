"""Processes launched by `torch.distributed.run` that share one output folder.

Each rank takes its own blocks of the plan, and writes its own shards and its own ledger. Ranks only
wait for each other at barriers; all information goes through files in the folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from dit.launched import check_launch, local_rank, meet, rank, world_size

_PATIENCE = timedelta(days=30)  # a slow rank may take long; if a rank dies, the launcher ends all


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """Rank of this process, number of all ranks, and rank among the processes of this machine."""

    rank: int = 0
    world: int = 1
    local: int = 0

    def barrier(self) -> None:
        """Waits until all ranks have called it."""
        if self.world > 1:
            from torch import distributed

            distributed.barrier()

    def leave(self) -> None:
        """Destroys the process group that `join` created."""
        if self.world > 1:
            from torch import distributed

            distributed.destroy_process_group()


ALONE = Ranks()


def join() -> Ranks:
    """Joins the processes of a launcher and returns this one's rank; `ALONE` without a launcher.

    Raises:
        ValueError: the launcher's environment variables are incomplete or wrong.
        OSError: the other processes do not answer.
    """
    check_launch()
    if world_size() == 1:
        return ALONE
    from torch import distributed

    found = Ranks(rank=rank(), world=world_size(), local=local_rank())
    distributed.init_process_group(
        "gloo", store=meet(), rank=found.rank, world_size=found.world, timeout=_PATIENCE
    )
    return found
