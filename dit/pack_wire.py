"""Sends packs between processes: all tensors of a pack as one flat tensor of bytes, its `row`.

1. flatten_pack, unflatten_pack    convert a pack to its outline and its row of bytes, and back
   pack_to, to_device              copy to a device, without waiting for the copy
2. PackBuffers                     shared memory, in which loader workers write their rows

Sent one by one, each tensor would need a message or a piece of shared memory, which takes a
millisecond.
"""

from __future__ import annotations

import copyreg
import mmap
import os
import weakref
from contextlib import suppress
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from dit.batch import PackedBatch

# Packs of a worker that the trainer has not received: torch has two made ahead, one is being made.
_AHEAD = 3
_HEAD = 64  # bytes before a row; the first one says whether the row is taken

# Patches of these are written two numbers at once, so no tensor of odd length may precede them.
_LATENTS = ("latent_TC", "LatentVariance.logvar_TC")

BufferSlot = tuple[int, int]
"""(torch's worker id, buffer index). It is torch's id, because Energon's changes on resume."""


def flatten_pack(pack: PackedBatch) -> tuple[PackedBatch, Tensor]:
    """(outline, row): `pack` with tensors on `meta`, and the bytes of all its tensors, uint8.

    `row` is a view if the tensors are consecutive in memory already, else a copy.
    """
    tensors = widest_first(pack.tensors)
    outlines = {name: torch.empty_like(t, device="meta") for name, t in tensors.items()}
    row = _shared_row(list(tensors.values()))
    if row is None:
        parts = [t.contiguous().view(-1).view(torch.uint8) for t in tensors.values()]
        row = torch.cat(parts)
    return pack.with_tensors(outlines), row


def unflatten_pack(outline: PackedBatch, row: Tensor) -> PackedBatch:
    """The pack with this `outline`, whose tensors are views of `row`: undoes `flatten_pack`."""
    return outline.with_tensors(views_of(row, widest_first(outline.tensors)))


def pack_to(pack: PackedBatch, device: torch.device) -> PackedBatch:
    """`pack` with its tensors on `device`, by one copy instead of one for each tensor.

    From pinned memory the copy may still run after the return.
    """
    outline, row = flatten_pack(pack)
    return unflatten_pack(outline, row.to(device, non_blocking=True))


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copies a small new tensor from the host to `device` without waiting for the copy.

    `non_blocking` is not enough: a copy to a GPU from memory that is not pinned may wait for all
    queued work.
    """
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)


def num_bytes(pack: PackedBatch) -> int:
    """Size in bytes of all tensors of `pack`, which may be an outline."""
    return sum(t.nbytes for t in pack.tensors.values())


def pin_pack(pack: PackedBatch) -> PackedBatch:
    """`pack` in pinned memory, from which copies to a GPU overlap with its work."""
    outline, row = flatten_pack(pack)
    return unflatten_pack(outline, row.pin_memory())


def widest_first(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` in the order in which they lie in a row, the largest element size first.

    So each begins at a multiple of its element size. Tensors of the same element size are in the
    order of the fields of a pack, and tensors of methods follow, sorted by name; but variances of
    latents come directly after the latents.
    """
    order = {one.name: (number, "") for number, one in enumerate(fields(PackedBatch))}

    def place(named: tuple[str, Tensor]) -> tuple[int, bool, tuple[int, str]]:
        name, tensor = named
        at = order.get(name.partition(".")[0], (len(order), name))
        return -tensor.element_size(), name not in _LATENTS, at

    return dict(sorted(tensors.items(), key=place))


def views_of(row: Tensor, outlines: dict[str, Tensor]) -> dict[str, Tensor]:
    """Views of the bytes in `row` with dtypes and shapes of `outlines`, in this order."""
    parts = row.split([t.nbytes for t in outlines.values()])
    return {
        name: part.view(t.dtype).view(t.shape)
        for (name, t), part in zip(outlines.items(), parts, strict=True)
    }


def _shared_row(tensors: list[Tensor]) -> Tensor | None:
    """The row of bytes of which `tensors` are consecutive views; None if they are not."""
    storage = tensors[0].untyped_storage()
    start = at = tensors[0].storage_offset() * tensors[0].element_size()
    for t in tensors:
        here = t.untyped_storage().data_ptr() == storage.data_ptr()
        if not here or t.storage_offset() * t.element_size() != at or not t.is_contiguous():
            return None
        at += t.nbytes
    row = torch.empty(0, dtype=torch.uint8, device=tensors[0].device)
    return row.set_(storage, start, (at - start,), (1,))


def _reduce(pack: PackedBatch) -> tuple[Any, ...]:
    sizes = {name: (t.dtype, tuple(t.shape)) for name, t in widest_first(pack.tensors).items()}
    # The sizes take the places of the tensors, in mappings too.
    outline: Any = pack.with_tensors(sizes)  # type: ignore[arg-type]
    values = {one.name: getattr(outline, one.name) for one in fields(pack)}
    return _unpickled, (values, sizes, flatten_pack(pack)[1])


def _unpickled(
    values: dict[str, Any], sizes: dict[str, tuple[torch.dtype, tuple[int, ...]]], row: Tensor
) -> PackedBatch:
    outlines = {n: torch.empty(size, dtype=d, device="meta") for n, (d, size) in sizes.items()}
    return PackedBatch(**values).with_tensors(views_of(row, outlines))


# A pickled pack has one tensor: torch refuses to save views of one memory with different types.
copyreg.pickle(PackedBatch, _reduce)  # type: ignore[arg-type]  # typeshed asks for a wider argument


class PackBuffers:
    """Shared-memory buffers for each loader process, created before the processes start.

    torch would allocate new shared memory for each pack and send it as a file: for 5 MB that takes
    as long as reading and decoding half of the pack's samples. These buffers are reused. They are
    in no file system, so the size of a container's /dev/shm is no limit.
    """

    def __init__(self, workers: int, *, size: int, held: int):
        """Reserves rows of at most `size` bytes, for a trainer that holds `held` packs at a time.

        `workers` is the number of loader processes. The first write allocates the memory.
        """
        self._slots: list[list[Tensor]] = []
        if workers:
            slots = _AHEAD + -(-held // workers)
            each = -(-(_HEAD + size) // mmap.PAGESIZE) * mmap.PAGESIZE
            # Addresses or files may be limited. Packs are then sent by torch.
            with suppress(OSError):
                rows = _shared_memory(workers * slots * each).split(each)
                self._slots = [[*rows[i : i + slots]] for i in range(0, len(rows), slots)]

    def free(self, size: int) -> Tensor:
        """Memory [size], uint8, for a new pack: a free row, or memory of this process only."""
        process = get_worker_info()
        for slot in self._slots[process.id] if process is not None and self._slots else ():
            if not slot[0] and _HEAD + size <= len(slot):
                return slot[_HEAD : _HEAD + size]
        return private_bytes(size)

    def placed(self, pack: PackedBatch) -> tuple[PackedBatch, BufferSlot | None]:
        """Marks the row that holds `pack` as taken; returns (outline of the pack, slot of the row).

        It runs in a worker. A pack that is in no row is returned whole, with None.
        """
        process = get_worker_info()
        if process is None or not self._slots:
            return pack, None
        outline, row = flatten_pack(pack)
        for number, slot in enumerate(self._slots[process.id]):
            if row.data_ptr() == slot.data_ptr() + _HEAD:
                slot[0] = 1
                return outline, (process.id, number)
        # A pack that lost samples has been copied out of its row, which the next pack may take
        # before this one is sent.
        return unflatten_pack(outline, row), None

    def received(self, outline: PackedBatch, slot: BufferSlot) -> PackedBatch:
        """The pack with this `outline` in `slot`, which becomes free when its tensors are freed."""
        process, number = slot
        memory = self._slots[process][number]
        numbers: Any = memory.numpy()  # numpy's types do not say that it is a buffer
        view = memoryview(numbers)[_HEAD : _HEAD + num_bytes(outline)]
        weakref.finalize(view, memory.__setitem__, 0, 0).atexit = False
        row = torch.frombuffer(view, dtype=torch.uint8)  # holds the view for as long as it lives
        # Copies to a GPU overlap with its work where they are from pinned memory.
        return unflatten_pack(outline, row.pin_memory() if torch.cuda.is_available() else row)


def private_bytes(size: int) -> Tensor:
    """Memory [size], uint8, of this process only."""
    return torch.empty(size, dtype=torch.uint8)


def _shared_memory(size: int) -> Tensor:
    """Memory [size], uint8, that is shared with the processes that this one forks."""
    if not hasattr(os, "memfd_create"):
        return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    file = os.memfd_create("packs")  # Linux would count other shared memory before it is used
    try:
        os.truncate(file, size)
        return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
    finally:
        os.close(file)
