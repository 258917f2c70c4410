"""Memory in which a loader's processes lay packs, and in which the trainer finds them.

torch would ask for new shared memory for each pack and send it on as a file: for 5 MB that takes as
long as to read and decode half of what is in them. Here the same memory is written again and again.
It is in no file system either, so what a container gives to /dev/shm does not bound it.
"""

from __future__ import annotations

import mmap
import os
import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from dit.batch import PackedBatch
from dit.data.pack import private_bytes

# Packs of a process that the trainer has not: two that torch has it make ahead, one in the making.
_AHEAD = 3
_HEAD = 64  # bytes before a row, of which the first says whether the row is taken

BufferSlot = tuple[int, int]
"""Of a row: torch's number of the process, not Energon's, which a resume turns round; its own."""


class PackBuffers:
    """Some rows for each loader process. Made before the processes, which inherit them."""

    def __init__(self, workers: int, *, size: int, held: int):
        """Rows of at most `size` bytes, for a trainer that holds so many packs at a time.

        Memory is taken when it is first written to.
        """
        self._slots: list[list[Tensor]] = []
        if workers:
            slots = _AHEAD + -(-held // workers)
            each = -(-(_HEAD + size) // mmap.PAGESIZE) * mmap.PAGESIZE
            with suppress(OSError):  # addresses or files are limited: packs go torch's way then
                rows = _shared(workers * slots * each).split(each)
                self._slots = [[*rows[i : i + slots]] for i in range(0, len(rows), slots)]

    def free(self, size: int) -> Tensor:
        """For a pack to be laid: a row that is free, or memory of this process alone."""
        process = get_worker_info()
        for slot in self._slots[process.id] if process is not None and self._slots else ():
            if not slot[0] and _HEAD + size <= len(slot):
                return slot[_HEAD : _HEAD + size]
        return private_bytes(size)

    def placed(self, pack: PackedBatch) -> tuple[PackedBatch, BufferSlot | None]:
        """The pack without numbers and its place, which is taken now; whole where it has none.

        Called in a loader's process.
        """
        process = get_worker_info()
        if process is None or not self._slots:
            return pack, None
        outline, row = pack.joined()
        for number, slot in enumerate(self._slots[process.id]):
            if row.data_ptr() == slot.data_ptr() + _HEAD:
                slot[0] = 1
                return outline, (process.id, number)
        # One that lost samples has been copied out of its row, which the next pack may take before
        # this one is sent.
        return outline.filled(row), None

    def received(self, outline: PackedBatch, place: BufferSlot) -> PackedBatch:
        """In the trainer: the pack where it lies. The place is free when its tensors are gone."""
        process, number = place
        slot = self._slots[process][number]
        size = sum(t.nbytes for t in outline.tensors.values())
        numbers: Any = slot.numpy()  # numpy's types do not say that it is a buffer
        view = memoryview(numbers)[_HEAD : _HEAD + size]
        weakref.finalize(view, slot.__setitem__, 0, 0).atexit = False
        row = torch.frombuffer(view, dtype=torch.uint8)  # holds the view for as long as it lives
        # Copies to a GPU overlap with its work where they are from pinned memory.
        return outline.filled(row.pin_memory() if torch.cuda.is_available() else row)


def _shared(size: int) -> Tensor:
    """Memory that is shared with the processes that this one forks."""
    if not hasattr(os, "memfd_create"):
        return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    file = os.memfd_create("packs")  # Linux would count other shared memory before it is used
    try:
        os.truncate(file, size)
        return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
    finally:
        os.close(file)
