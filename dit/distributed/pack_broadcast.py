"""The ranks that share one replica of the model: one of them reads, all get the same packs.

1. _send       the rank that reads: a pack without its numbers, then these as one row of bytes
2. _receive    the others
3. share       both, while everyone waits
4. set_out     both, in the background: packs of the next step, during this one
   arrive      what set out
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
from dit.distributed.watchdog.monitor import heartbeat, standing_in

_TIMEOUT = timedelta(days=1)
"""Of a wait for packs. The watch names and ends whoever keeps the others waiting, much sooner."""
_PATIENCE_S = 5.0
"""For packs that are under way when a run ends."""


class Replica:
    """Tensor, context and pipeline ranks of one data-parallel rank.

    Packs are handed out before a schedule starts. Inside, a stage that waits for packs and one that
    waits for hidden states would wait for each other.

    They travel through the hosts' memory, over connections of their own: nothing on a GPU waits for
    them or is in their way, in whatever order ranks do other things. Each rank copies them to its
    device at the start of their step.
    """

    def __init__(self, groups: ProcessGroupCollection):
        """Collective: every rank of the run makes its own."""
        mine = groups.dp.rank()
        known = [mine] * dist.get_world_size()
        dist.all_gather_object(known, mine)
        replicas = [[r for r, d in enumerate(known) if d == data] for data in sorted(set(known))]
        self.alone = len(replicas[mine]) == 1
        """Whether there is nobody to share with."""
        if not self.alone:
            group, _ = dist.new_subgroups_by_enumeration(replicas, timeout=_TIMEOUT, backend="gloo")
            assert isinstance(group, dist.ProcessGroup)
            self.group = group
        self.source = replicas[mine][0]
        self.reads = dist.get_rank() == self.source
        """Whether this rank is the one that reads."""
        self.coming: Background[PackedBatch] | None = None
        """Packs that have set out and not arrived."""

    def share(self, packs: Iterable[PackedBatch], device: torch.device) -> list[PackedBatch]:
        """The packs of the rank that reads, on `device`; the others do not look at theirs.

        Raises:
            Exception: what `packs` raised, on every rank.
        """
        assert self.coming is None, "packs are under way"
        return [pack.to(device) for pack in self._travel(packs)]

    def set_out(self, packs: Iterable[PackedBatch]) -> None:
        """Begins to share `packs`, which are taken by another thread."""
        assert self.coming is None, "other packs are under way"
        self.coming = Background(self._travel(packs))

    def arrive(self, device: torch.device) -> list[PackedBatch]:
        """Ends what `set_out` began, as `share`."""
        assert self.coming is not None, "no packs are under way"
        packs = []
        for pack in self.coming:
            heartbeat("read of packs")  # a sign of life
            packs.append(pack.to(device))
        self.coming = None
        return packs

    def close(self) -> None:
        """Lets packs arrive that are not needed any more: a thread must not outlive its process."""
        if self.coming is not None:
            self.coming.thread.join(_PATIENCE_S)

    def _travel(self, packs: Iterable[PackedBatch]) -> Iterator[PackedBatch]:
        if self.alone:
            return iter(packs)
        return self._send(iter(packs)) if self.reads else self._receive()

    def _send(self, packs: Iterator[PackedBatch]) -> Iterator[PackedBatch]:
        while isinstance(pack := _attempt(packs), PackedBatch):
            outline, row = pack.joined()
            self._tell(outline)
            dist.broadcast(row, src=self.source, group=self.group)
            yield pack
        self._tell(pack)
        if pack is not None:
            raise pack

    def _receive(self) -> Iterator[PackedBatch]:
        while isinstance(outline := self._tell(), PackedBatch):
            size = sum(t.nbytes for t in outline.tensors.values())
            # Pinned, else the host would wait for the copy to the device.
            row = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
            dist.broadcast(row, src=self.source, group=self.group)
            yield outline.filled(row)
        if outline is not None:
            raise outline

    def _tell(self, what: Any = None) -> Any:
        """What the rank that reads says: a pack without numbers, an error, or None at the end."""
        said = [what]
        dist.broadcast_object_list(said, src=self.source, group=self.group)
        return said[0]


def _attempt(packs: Iterator[PackedBatch]) -> PackedBatch | Exception | None:
    try:
        return next(packs, None)
    except Exception as error:  # noqa: BLE001  # raised by the caller, as on the other ranks
        return error


T = TypeVar("T")


class Background(Iterator[T], Generic[T]):
    """What `items` gives, made by a thread and kept until it is asked for.

    An error of `items` is raised in its place, where it is asked for.
    """

    def __init__(self, items: Iterator[T]):
        self._made: SimpleQueue[tuple[T] | Exception] = SimpleQueue()
        # A process that ends does not wait for it: it may wait for another that has died.
        self.thread = Thread(target=self._make, args=(items,), daemon=True)
        self.thread.start()

    def _make(self, items: Iterator[T]) -> None:
        try:
            for item in items:
                self._made.put((item,))
            self._made.put(StopIteration())
        except Exception as error:  # noqa: BLE001  # raised where it is asked for
            self._made.put(error)

    def __next__(self) -> T:
        with standing_in(self.thread):
            made = self._made.get()
        if isinstance(made, Exception):
            raise made
        return made[0]
