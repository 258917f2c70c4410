"""Where the processes of a run meet: a store that holds nothing of an earlier start."""

from __future__ import annotations

import secrets
import time
from datetime import timedelta

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

_POLL_S = 0.1


def rendezvous_store(timeout: timedelta) -> Store:
    """The store of this start.

    torch.distributed.run keeps one store through its restarts (pytorch issue 135712): a process
    that is faster than the others would find the addresses of their dead predecessors there. Nor
    does counting restarts tell starts apart, for each node's launcher counts its own. So the first
    rank opens a place with a name that was never used, and a list of its guests; who has read the
    name of an older place is not on the list there.

    Raises:
        TimeoutError: names the ranks that did not come.
    """
    store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
    name = _invite(store, size, timeout) if rank == 0 else _follow(store, rank, timeout)
    return PrefixStore(name, store)


def _invite(store: Store, size: int, timeout: timedelta) -> str:
    name = secrets.token_hex(8)
    store.set("meeting", name)
    arrivals = [f"{name}/{rank}" for rank in range(1, size)]
    try:
        store.wait(arrivals, timeout)
    except DistStoreError as error:
        late = [str(rank) for rank, key in enumerate(arrivals, 1) if not store.check([key])]
        raise _missing(f"rank {', '.join(late)}", timeout) from error
    store.set(f"{name}/guests", b" ".join(store.multi_get(arrivals)).decode())
    return name


def _follow(store: Store, rank: int, timeout: timedelta) -> str:
    me, deadline = secrets.token_hex(8), time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        if store.check(["meeting"]):
            name = store.get("meeting").decode()
            store.set(f"{name}/{rank}", me)
            guests = f"{name}/guests"
            if store.check([guests]) and me in store.get(guests).decode().split():
                return name
        time.sleep(_POLL_S)
    raise _missing("rank 0", timeout)


def _missing(who: str, timeout: timedelta) -> TimeoutError:
    return TimeoutError(
        f"{who} did not come within {timeout.total_seconds():.0f} s"
        " (dist.distributed_timeout_minutes and one more); look at the log of its node, and whether"
        " each node was started with the same --nnodes, --nproc-per-node and --rdzv-endpoint"
    )
