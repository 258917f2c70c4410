"""What the backward pass needs of a layer, kept in host memory until its turn comes.

1. on_host          inside, tensors that autograd saves are copied to the host
2. OffloadedLayer   those of one layer; `fetch` begins to copy all of them back
3. when_reached     calls `fetch` as soon as the backward pass reaches a layer
4. StreamCopies     copies on two streams of their own, one for each way; PlainCopies on a CPU

Kernels of the stream that computes wait for no copy to the host. A layer is fetched while the one
after it is computed backward, so that they rarely wait for a copy from there.

The host's memory is page-locked (`PinnedRows`), so that a GPU copies beside its work. torch's own
(`pin_memory=True`) rounds each tensor up to a power of two, up to twice what is asked for
(at::CachingHostAllocatorImpl::allocate, torch 2.11 to 2.13). Its option against that,
`pinned_max_round_threshold_mb`, there hands out blocks that are too small for what is written to
them (pytorch/pytorch#192722). So rows that stay are locked here.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

_PARTS = 16
"""A row is rounded up to so many parts of the next power of two below, at most 1/16 too long."""


def lock_pages(address: int, size: int) -> None:
    """Lets GPUs read and write `size` bytes from `address` on.

    Raises:
        RuntimeError: the driver cannot lock so much memory.
    """
    runtime: Any = torch.cuda.cudart()
    error = runtime.cudaHostRegister(address, size, 0)
    if int(error):
        raise RuntimeError(
            f"the driver cannot lock {size / 2**30:.2f} GiB of host memory"
            f" ({runtime.cudaGetErrorString(error)}); give the machine or container more memory, or"
            " keep less on the host"
        )


class PinnedRows:
    """Tensors in page-locked memory, which the next ones of about the same size take over.

    A row is free as soon as its tensor and all views of it are gone: who drops a tensor with a copy
    under way orders the next use of the row behind it. Rows are never given back to the system.
    """

    def __init__(self, lock: Callable[[int, int], None] = lock_pages):
        self._lock = lock
        self._free: dict[int, list[mmap.mmap]] = defaultdict(list)
        self.bytes = 0
        """Of all rows, free ones included."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of any values.

        Raises:
            RuntimeError: the driver cannot lock so much memory.
        """
        count = math.prod(shape)
        if not count:
            return torch.empty(tuple(shape), dtype=dtype)
        size = row_bytes(count * dtype.itemsize)
        free = self._free[size]
        row = free.pop() if free else self._new(size)
        held = (ctypes.c_char * size).from_buffer(row)
        weakref.finalize(held, free.append, row).atexit = False
        return torch.frombuffer(held, dtype=dtype, count=count).view(tuple(shape))

    def _new(self, size: int) -> mmap.mmap:
        row = mmap.mmap(-1, size)
        self._lock(ctypes.addressof(ctypes.c_char.from_buffer(row)), size)
        self.bytes += size
        return row


def row_bytes(size: int) -> int:
    """Bytes of a row for `size` bytes: whole pages, and few sizes, so that rows are used again."""
    part = max(mmap.PAGESIZE, 2 ** (size.bit_length() - 1) // _PARTS)
    return -(-size // part) * part


_SMALL = 1 << 16
"""Bytes below which a copy costs more than it frees."""
Arrival = Any
"""What says that a copy has been made: an event of CUDA, None where copies are made at once."""


class PlainCopies:
    """Copies that are made at once, where there is no other memory than the host's."""

    def to_host(self, kept: Tensor) -> tuple[Tensor, Arrival]:
        return kept.clone(), None

    def to_device(
        self, home: Tensor, *, like: tuple[torch.device, tuple[int, ...]], after: Arrival
    ) -> tuple[Tensor, Arrival]:
        del after
        device, stride = like
        # Compiled kernels insist on the strides that they have seen.
        back = torch.empty_strided(home.shape, stride, dtype=home.dtype, device=device)
        return back.copy_(home), None

    def overwrite(self, row: Tensor, home: Tensor) -> Arrival:
        """Copies into memory of the device that what has been queued so far may still read."""
        row.copy_(home)

    def wait(self, back: Tensor, arrival: Arrival) -> None:
        """Lets what is computed from now on wait for a copy."""


class StreamCopies(PlainCopies):
    """Copies on streams of their own."""

    def __init__(self, cuda: Any = torch.cuda):
        self.cuda = cuda
        self.out, self.back = cuda.Stream(), cuda.Stream()
        self.rows = PinnedRows()

    def to_host(self, kept: Tensor) -> tuple[Tensor, Arrival]:
        home = self.rows.empty(kept.shape, kept.dtype)
        # It computes `kept`, and has waited for copies from what was in this row before.
        self.out.wait_stream(self.cuda.current_stream())
        with self.cuda.stream(self.out):
            home.copy_(kept, non_blocking=True)
        self._used_by(kept, self.out)
        return home, self.out.record_event()

    def to_device(
        self, home: Tensor, *, like: tuple[torch.device, tuple[int, ...]], after: Arrival
    ) -> tuple[Tensor, Arrival]:
        device, stride = like
        self.back.wait_event(after)
        with self.cuda.stream(self.back):
            back = torch.empty_strided(home.shape, stride, dtype=home.dtype, device=device)
            back.copy_(home, non_blocking=True)
        return back, self.back.record_event()

    def overwrite(self, row: Tensor, home: Tensor) -> Arrival:
        self.back.wait_stream(self.cuda.current_stream())
        with self.cuda.stream(self.back):
            row.copy_(home, non_blocking=True)
        return self.back.record_event()

    def wait(self, back: Tensor, arrival: Arrival) -> None:
        stream = self.cuda.current_stream()
        stream.wait_event(arrival)
        self._used_by(back, stream)

    def _used_by(self, tensor: Tensor, stream: Any) -> None:
        """Its memory has no other use before what is queued on `stream` has run."""
        tensor.record_stream(stream)


@cache
def copies_of(device: torch.device) -> PlainCopies:
    """How copies are made between the host and a device."""
    return StreamCopies() if device.type == "cuda" else PlainCopies()


class _Away:
    """A saved tensor that is on the host."""

    def __init__(self, kept: Tensor, copies: PlainCopies):
        self.copies, self.like = copies, (kept.device, kept.stride())
        self.home, self.left = copies.to_host(kept)
        self.returned: tuple[Tensor, Arrival] | None = None

    def fetch(self) -> None:
        if self.returned is None:
            self.returned = self.copies.to_device(self.home, like=self.like, after=self.left)

    def take(self) -> Tensor:
        self.fetch()
        assert self.returned is not None
        # Not kept, so that its memory is free after use; a second backward pass fetches it anew.
        (back, arrival), self.returned = self.returned, None
        self.copies.wait(back, arrival)
        return back


class OffloadedLayer:
    """The saved tensors of one layer that are on the host."""

    def __init__(self) -> None:
        self.tensors: list[_Away] = []

    def fetch(self) -> None:
        """Begins to copy them back; nothing waits for it."""
        for one in self.tensors:
            one.fetch()


@contextmanager
def on_host(
    layer: nn.Module, shared: Any, *, copies: PlainCopies | None = None
) -> Iterator[OffloadedLayer]:
    """Inside, tensors that autograd saves for the backward pass go to pinned host memory.

    The weights of `layer` and the tensors of `shared` stay on the device, which holds them anyway.
    """
    staying = {_storage(t) for t in (*layer.parameters(), *_tensors(shared))}
    offloaded = OffloadedLayer()

    def pack(kept: Tensor) -> Tensor | _Away:
        if kept.nbytes < _SMALL or _storage(kept) in staying:
            return kept
        away = _Away(kept, copies or copies_of(kept.device))
        offloaded.tensors.append(away)
        return away

    def unpack(kept: Tensor | _Away) -> Tensor:
        return kept.take() if isinstance(kept, _Away) else kept

    with saved_tensors_hooks(pack, unpack):
        yield offloaded


def when_reached(hidden: Any, fetch: Callable[[], None]) -> None:
    """Calls `fetch` when the backward pass reaches these hidden states, one tensor or several."""
    row = hidden[0] if isinstance(hidden, tuple) else hidden

    def hook(_: Tensor) -> None:
        fetch()

    # Torch refuses hooks on tensors that no backward pass will reach.
    if row.requires_grad:
        row.register_hook(hook)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(of: Any) -> Iterator[Tensor]:
    """The tensors of a dataclass, and of those in it."""
    if isinstance(of, Tensor):
        yield of
    elif is_dataclass(of):
        for field in fields(of):
            yield from _tensors(getattr(of, field.name))
