"""Sends packs to the ranks of a model replica, one of which reads them.

1. _send        the reading rank sends a pack's structure, then its tensors as one row of bytes
2. _receive     the other ranks receive both
3. broadcast    sends and receives while all wait
4. start        sends and receives in the background: packs of the next step during this one
   wait         waits for the packs that `start` began to send
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from dit.batch import PackedBatch
from dit.distributed.watchdog import heartbeat, waiting_for
from dit.pack_wire import flatten_pack, num_bytes, pack_to, unflatten_pack

T = TypeVar("T")

_TIMEOUT = timedelta(days=1)
"""Longest wait for packs; the watchdog finds a process that blocks others much sooner."""
_CLOSE_S = 5.0
"""Seconds to wait, when a run ends, for packs that are still being sent."""


class Replica:
    """The tensor, context and pipeline ranks of one data-parallel rank.

    Packs are sent before a schedule starts: inside it, a stage that waits for packs and one that
    waits for hidden states would wait for each other. Packs go from host memory to host memory over
    separate connections, so they neither delay nor wait for work on a GPU. Each rank copies them to
    its device when their step begins.
    """

    def __init__(self, groups: ProcessGroupCollection):
        """Creates the group of the replica's ranks; all ranks of the run call it together."""
        mine = groups.dp.rank()
        known = [mine] * dist.get_world_size()
        dist.all_gather_object(known, mine)
        replicas = [[r for r, d in enumerate(known) if d == data] for data in sorted(set(known))]
        self.alone = len(replicas[mine]) == 1
        """Whether the replica has only this rank, so that nothing is sent."""
        if not self.alone:
            group, _ = dist.new_subgroups_by_enumeration(replicas, timeout=_TIMEOUT, backend="gloo")
            assert isinstance(group, dist.ProcessGroup)
            self.group = group
        self.source = replicas[mine][0]
        self.reads = dist.get_rank() == self.source
        """Whether this rank reads packs for the others."""
        self.pending: BackgroundIterator[PackedBatch] | None = None
        """Packs that `start` has begun to send and `wait` has not returned yet."""

    def broadcast(self, packs: Iterable[PackedBatch], device: torch.device) -> list[PackedBatch]:
        """The packs of the reading rank, on `device`; on other ranks `packs` is ignored.

        Raises:
            Exception: on every rank, what `packs` raised.
        """
        assert self.pending is None, "packs are under way"
        return [pack_to(pack, device) for pack in self._transfer(packs)]

    def start(self, packs: Iterable[PackedBatch]) -> None:
        """Starts to broadcast `packs`, which a thread reads meanwhile."""
        assert self.pending is None, "other packs are under way"
        self.pending = BackgroundIterator(self._transfer(packs))

    def wait(self, device: torch.device) -> list[PackedBatch]:
        """Waits for the packs of `start`, and returns them on `device`."""
        assert self.pending is not None, "no packs are under way"
        packs = []
        for pack in self.pending:
            heartbeat("read of packs")  # a sign of life
            packs.append(pack_to(pack, device))
        self.pending = None
        return packs

    def close(self) -> None:
        """Waits 5 s at most for packs under way, so that their thread ends before its process."""
        if self.pending is not None:
            self.pending.thread.join(_CLOSE_S)

    def _transfer(self, packs: Iterable[PackedBatch]) -> Iterator[PackedBatch]:
        if self.alone:
            return iter(packs)
        return self._send(iter(packs)) if self.reads else self._receive()

    def _send(self, packs: Iterator[PackedBatch]) -> Iterator[PackedBatch]:
        while isinstance(pack := _next_or_error(packs), PackedBatch):
            outline, row = flatten_pack(pack)
            self._broadcast_object(outline)
            dist.broadcast(row, src=self.source, group=self.group)
            yield pack
        self._broadcast_object(pack)
        if pack is not None:
            raise pack

    def _receive(self) -> Iterator[PackedBatch]:
        while isinstance(outline := self._broadcast_object(), PackedBatch):
            # Pinned, else the host would wait for the copy to the device.
            row = torch.empty(
                num_bytes(outline), dtype=torch.uint8, pin_memory=torch.cuda.is_available()
            )
            dist.broadcast(row, src=self.source, group=self.group)
            yield unflatten_pack(outline, row)
        if outline is not None:
            raise outline

    def _broadcast_object(self, message: Any = None) -> Any:
        """`message` of the reading rank, on all ranks: a pack, an error, or None at the end."""
        messages = [message]
        dist.broadcast_object_list(messages, src=self.source, group=self.group)
        return messages[0]


def _next_or_error(packs: Iterator[T]) -> T | Exception | None:
    try:
        return next(packs, None)
    except Exception as error:  # noqa: BLE001  # raised by the caller, as on the other ranks
        return error


class BackgroundIterator(Iterator[T], Generic[T]):
    """Iterates over `items` in a thread, which buffers them until they are taken.

    An error of `items` is raised when the next item is taken.
    """

    def __init__(self, items: Iterator[T]):
        self._queue: SimpleQueue[tuple[T] | Exception] = SimpleQueue()
        # A daemon thread, because it may wait for a dead process, and must not keep this one alive.
        self.thread = Thread(target=self._run, args=(items,), daemon=True)
        self.thread.start()

    def _run(self, items: Iterator[T]) -> None:
        try:
            for item in items:
                self._queue.put((item,))
            self._queue.put(StopIteration())
        except Exception as error:  # noqa: BLE001  # raised where the next item is taken
            self._queue.put(error)

    def __next__(self) -> T:
        with waiting_for(self.thread):
            item = self._queue.get()
        if isinstance(item, Exception):
            raise item
        return item[0]
