"""Two ranks of one replica, and their packs: `sharing.py [cuda]`; it fails where one is wrong.

They share one device, and so need no more than one GPU. It spares the seconds that Megatron-Core's
groups and a loader take.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from dit.batch import PackedBatch
from dit.distributed.pack_broadcast import Replica
from dit.distributed.process_groups import rendezvous_store, store_connection
from dit.distributed.watchdog import monitor
from dit.pack_wire import flatten_pack, unflatten_pack
from tests.packs import random_pack, tiny_model

DEVICE = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cpu")
WAIT_S = 60


def pack_of(number: int) -> PackedBatch:
    """Each of another size."""
    pack = random_pack([(1, 4, 4), (2, 3, number)], [3, number], model=tiny_model())
    outline, row = flatten_pack(pack)
    # As the loader gives them where there is a GPU.
    return unflatten_pack(outline, row.pin_memory() if DEVICE.type == "cuda" else row)


def read(*numbers: int) -> Iterator[PackedBatch]:
    """As a loader, on the rank that reads."""
    assert dist.get_rank() == 0
    for number in numbers:
        if number == 0:
            raise ValueError("this pack cannot be read")
        yield pack_of(number)


def check(packs: list[PackedBatch], *numbers: int) -> None:
    """They are those packs, to the last bit, and here."""
    assert len(packs) == len(numbers)
    for pack, number in zip(packs, numbers, strict=True):
        expected = pack_of(number)
        assert (pack.keys, pack.grids, pack.pack_id) == (
            expected.keys,
            expected.grids,
            expected.pack_id,
        )
        for name, tensor in expected.tensors.items():
            here = pack.tensors[name]
            assert here.device.type == DEVICE.type and here.dtype == tensor.dtype
            assert torch.equal(here.cpu().view(torch.uint8), tensor.view(torch.uint8)), name


def step(replica: Replica) -> None:
    """What ranks do with each other while packs travel; it needs them to have arrived."""
    for _ in range(20):
        dist.all_reduce(torch.ones(1000))
    assert replica.pending is not None
    replica.pending.thread.join(WAIT_S)
    assert not replica.pending.thread.is_alive(), "packs travel only when they are waited for"


def main() -> None:
    timeout, here, size = (
        timedelta(seconds=WAIT_S),
        int(os.environ["RANK"]),
        int(os.environ["WORLD_SIZE"]),
    )
    store = rendezvous_store(timeout)
    dist.init_process_group("gloo", store=store, rank=here, world_size=size, timeout=timeout)
    replica = Replica(SimpleNamespace(dp=SimpleNamespace(rank=lambda: 0)))  # type: ignore[arg-type]
    assert replica.reads == (dist.get_rank() == 0) and not replica.alone
    check(replica.broadcast(read(1, 2), DEVICE), 1, 2)

    replica.start(read(3, 4, 5))
    step(replica)
    check(arrived(replica), 3, 4, 5)

    replica.start(read(6, 0, 7))
    step(replica)  # is not disturbed
    fails(lambda: replica.wait(DEVICE))
    replica.pending = None
    fails(lambda: replica.broadcast(read(0), DEVICE))
    check(replica.broadcast(read(), DEVICE))
    waiting_is_seen(replica)

    replica.start(read(10))  # and the run ends
    replica.close()
    assert replica.pending is not None and not replica.pending.thread.is_alive()
    dist.barrier()
    dist.destroy_process_group()


def arrived(replica: Replica) -> list[PackedBatch]:
    """On a GPU, without making the host wait for it."""
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    packs = replica.wait(DEVICE)
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    return packs


def fails(act: Any) -> None:
    """On both ranks alike."""
    try:
        act()
    except ValueError as error:
        assert str(error) == "this pack cannot be read"
    else:
        raise AssertionError("no error")


def waiting_is_seen(replica: Replica) -> None:
    """A rank that waits for packs is seen where its thread is: only one of them holds up others."""
    me, others, mine = threading.get_ident(), store_connection(), store_connection()
    wanted = [("in _next_or_error", False), ("in _broadcast_object", True)][dist.get_rank()]

    def look() -> None:
        place, waits = "", None
        while not (place.endswith(wanted[0]) and waits == wanted[1]):
            time.sleep(0.01)
            place, waits = monitor._place(me)
        mine.set(f"seen {dist.get_rank()}", "")

    def held() -> Iterator[PackedBatch]:
        yield pack_of(8)
        others.wait(["seen 0", "seen 1"])
        yield pack_of(9)

    observer = threading.Thread(target=look, daemon=True)
    replica.start(held())
    observer.start()
    check(replica.wait(DEVICE), 8, 9)


if __name__ == "__main__":
    main()
