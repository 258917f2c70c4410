"""Activations that are offloaded to host memory until the backward pass.

1. on_host          a context in which tensors that autograd saves are copied to the host
2. OffloadedLayer   the offloaded tensors of one layer; `fetch` starts to copy them back
3. settle           called after each layer; frees the previous layer's tensors on the device
4. when_reached     calls `fetch` when the backward pass reaches a layer
5. StreamCopies     copies on two CUDA streams, one for each direction; PlainCopies on a CPU

Computation does not wait for copies to the host. In the backward pass, a layer is fetched while the
layer after it is computed, so computation rarely waits for copies from the host.

Host memory is page-locked (`PinnedRows`), so that a GPU can copy while it computes. Torch's
page-locked memory (`pin_memory=True`) rounds each tensor up to a power of two, to at most twice its
size (at::CachingHostAllocatorImpl::allocate, torch 2.11 to 2.13). Torch's option against this,
`pinned_max_round_threshold_mb`, returns blocks that are too small (pytorch/pytorch#192722). So this
module locks and reuses memory itself.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

_PARTS = 16
"""Number of buffer sizes between two powers of two; rounding up adds at most 1/16."""


def lock_pages(address: int, size: int) -> None:
    """Page-locks `size` bytes of host memory from `address` on, so that GPUs can access them.

    Raises:
        RuntimeError: the driver cannot lock this much memory.
    """
    runtime: Any = torch.cuda.cudart()
    error = runtime.cudaHostRegister(address, size, 0)
    if int(error):
        raise RuntimeError(
            f"the driver cannot page-lock {size / 2**30:.2f} GiB of host memory"
            f" ({runtime.cudaGetErrorString(error)}). Give the machine or container more memory,"
            " lower model.blocks_to_swap or model.cpu_offloading_num_layers, or set"
            " optimizer.optimizer_cpu_offload=false"
        )


class PinnedRows:
    """Allocator of page-locked host tensors, which reuses memory for tensors of similar size.

    A buffer is free when its tensor and all views of the tensor are deleted. Code that deletes a
    tensor during a copy must make the buffer's next use wait for that copy. Memory is never
    returned to the operating system.
    """

    def __init__(self, lock: Callable[[int, int], None] = lock_pages):
        self._lock = lock
        self._free: dict[int, list[mmap.mmap]] = defaultdict(list)
        self.bytes = 0
        """Bytes of all buffers, free ones included."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A page-locked tensor of this `shape` and `dtype`, with undefined values.

        Raises:
            RuntimeError: the driver cannot lock this much memory.
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
    """The bytes of a buffer for `size` bytes: whole pages, rounded up to one of few sizes."""
    part = max(mmap.PAGESIZE, 2 ** (size.bit_length() - 1) // _PARTS)
    return -(-size // part) * part


_SMALL = 1 << 16
"""Size in bytes below which a tensor is not offloaded."""
Arrival = Any
"""A CUDA event after a copy; None if the copy was immediate."""


class PlainCopies:
    """Immediate copies, for devices without separate memory (CPU)."""

    def to_host(self, kept: Tensor, home: Tensor | None = None) -> tuple[Tensor, Arrival]:
        """(host copy of `kept`, its `Arrival`); the copy is written to `home` unless it is None."""
        return kept.clone() if home is None else home.copy_(kept), None

    def to_device(
        self, home: Tensor, device: torch.device, *, after: Arrival
    ) -> tuple[Tensor, Arrival]:
        del after
        return home.to(device, copy=True), None

    def overwrite(self, row: Tensor, home: Tensor) -> Arrival:
        """Copies `home` into the device tensor `row`, and returns the copy's `Arrival`.

        Computations that were queued before may still read the old values of `row`.
        """
        row.copy_(home)

    def wait(self, arrival: Arrival) -> None:
        """Makes computations that are queued later wait for the copy with this `arrival`."""

    def settle(self) -> None:
        """Frees device tensors whose copies began before the last layer; called after each layer.

        Computations that are queued later wait for these copies.
        """


class StreamCopies(PlainCopies):
    """Copies on separate CUDA streams.

    Device memory belongs to the computing stream, which can reuse the memory of a deleted tensor at
    once. So tensors are kept until the computing stream has waited for their copies.
    `record_stream` would need no such wait. But it frees memory only when the device has finished
    with it, and Python, which runs ahead of the device by whole layers, would allocate new memory.
    """

    def __init__(self, cuda: Any = torch.cuda):
        self.cuda = cuda
        self.out, self.back = cuda.Stream(), cuda.Stream()
        self.rows = PinnedRows()
        self.under_way: dict[Arrival, Tensor] = {}
        """Device tensors for whose copies the computing stream has not yet waited."""
        self.earlier: list[Arrival] = []
        """Copies that began before the last layer."""

    def to_host(self, kept: Tensor, home: Tensor | None = None) -> tuple[Tensor, Arrival]:
        if home is None:
            home = self.rows.empty(kept.shape, kept.dtype)
        # The computing stream computes `kept`, and has waited for earlier copies from `home`.
        self.out.wait_stream(self.cuda.current_stream())
        with self.cuda.stream(self.out):
            home.copy_(kept, non_blocking=True)
        left = self.out.record_event()
        self.under_way[left] = kept
        return home, left

    def to_device(
        self, home: Tensor, device: torch.device, *, after: Arrival
    ) -> tuple[Tensor, Arrival]:
        if after in self.under_way:  # still on the device, because no layer came after
            return self.under_way[after], after
        # Otherwise the computing stream has waited for the copy to the host, and `back` waits for
        # the computing stream.
        back = torch.empty(home.shape, dtype=home.dtype, device=device)
        arrival = self.overwrite(back, home)
        self.under_way[arrival] = back
        return back, arrival

    def overwrite(self, row: Tensor, home: Tensor) -> Arrival:
        self.back.wait_stream(self.cuda.current_stream())
        with self.cuda.stream(self.back):
            row.copy_(home, non_blocking=True)
        return self.back.record_event()

    def wait(self, arrival: Arrival) -> None:
        self.cuda.current_stream().wait_event(arrival)
        self.under_way.pop(arrival, None)

    def settle(self) -> None:
        for arrival in self.earlier:
            if arrival in self.under_way:
                self.wait(arrival)
        self.earlier = list(self.under_way)


@cache
def copies_of(device: torch.device) -> PlainCopies:
    """The object that copies between the host and `device`; there is one for each device."""
    return StreamCopies() if device.type == "cuda" else PlainCopies()


class _Away:
    """The memory of one or more tensors that autograd saved, copied to the host."""

    def __init__(self, kept: Tensor, copies: PlainCopies):
        """Starts the copy; `kept` is the whole memory as a tensor of one dimension."""
        self.copies, self.device = copies, kept.device
        self.home, self.left = copies.to_host(kept)
        self.returned: tuple[Tensor, Arrival] | None = None
        self.views = self.to_come = 0

    def fetch(self) -> None:
        if self.returned is None:
            self.returned = self.copies.to_device(self.home, self.device, after=self.left)
            self.to_come = self.views

    def take(self) -> Tensor:
        self.fetch()
        assert self.returned is not None
        back, arrival = self.returned
        self.to_come -= 1
        if not self.to_come:
            # The device memory is freed after use; a second backward pass would fetch it again.
            self.returned = None
        self.copies.wait(arrival)
        return back


class _View:
    """A tensor that autograd saved, as a view of offloaded memory."""

    def __init__(self, kept: Tensor, away: _Away):
        self.away = away
        away.views += 1
        # Compiled kernels require the same strides in the backward pass.
        self.place = kept.shape, kept.stride(), kept.storage_offset()

    def take(self) -> Tensor:
        return self.away.take().as_strided(*self.place)


class OffloadedLayer:
    """The offloaded tensors that autograd saved for one layer."""

    def __init__(self) -> None:
        self.memory: list[_Away] = []

    def fetch(self) -> None:
        """Starts to copy the layer's tensors back to the device, without waiting."""
        for one in self.memory:
            one.fetch()


@contextmanager
def on_host(layer: nn.Module, shared: Any) -> Iterator[OffloadedLayer]:
    """A context in which tensors that autograd saves are copied to host memory.

    It yields the `OffloadedLayer` with these tensors. Tensors below 64 KiB, the weights of `layer`
    and the tensors in `shared` stay on the device. Tensors that are views of the same memory are
    copied once.
    """
    staying = {_storage(t) for t in (*layer.parameters(), *_tensors(shared))}
    offloaded = OffloadedLayer()
    # The tensors are kept, so that their addresses are not reused meanwhile.
    known: dict[tuple[int, int, torch.dtype], tuple[Tensor, _Away]] = {}

    def pack(kept: Tensor) -> Tensor | _View:
        size = kept.untyped_storage().nbytes()
        if size < _SMALL or _storage(kept) in staying:
            return kept
        key = _storage(kept), kept._version, kept.dtype
        if key not in known:
            whole = kept.detach().as_strided((size // kept.itemsize,), (1,), 0)
            known[key] = whole, _Away(whole, copies_of(kept.device))
            offloaded.memory.append(known[key][1])
        return _View(kept, known[key][1])

    def unpack(kept: Tensor | _View) -> Tensor:
        return kept.take() if isinstance(kept, _View) else kept

    try:
        with saved_tensors_hooks(pack, unpack):
            yield offloaded
    finally:
        known.clear()  # because autograd keeps `pack`, and so `known`, alive


def when_reached(hidden: Any, fetch: Callable[[], None]) -> None:
    """Registers `fetch`, to be called when the backward pass reaches `hidden`.

    For a tuple, the first tensor counts. `fetch` is never called if this tensor needs no gradient.
    """
    row = _row(hidden)

    def hook(_: Tensor) -> None:
        fetch()

    # Torch refuses hooks on tensors that no backward pass will reach.
    if row.requires_grad:
        row.register_hook(hook)


def settle(hidden: Any) -> None:
    """Frees device tensors whose copies began before the layer that computed `hidden`.

    Copies of that layer's own tensors may still be running.
    """
    copies_of(_row(hidden).device).settle()


def _row(hidden: Any) -> Tensor:
    return hidden[0] if isinstance(hidden, tuple) else hidden


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(of: Any) -> Iterator[Tensor]:
    """Yields all tensors in a dataclass or mapping, including nested ones."""
    if isinstance(of, Tensor):
        yield of
    elif is_dataclass(of):
        for field in fields(of):
            yield from _tensors(getattr(of, field.name))
    elif isinstance(of, Mapping):
        for one in of.values():
            yield from _tensors(one)
