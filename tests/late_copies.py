"""A stand-in for the streams of a GPU, on which copies are made as late as their order allows."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from dit.models.stacks import offload
from dit.models.stacks.offload import PinnedRows

_ROWS = set[int]()
"""Addresses of host memory, which stays mapped."""


class LateStream:
    """A stream whose copies are made when something waits for them."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], object]] = []
        self.done = 0
        self.waited_for_compute = 0

    def wait_stream(self, stream: _Compute) -> None:
        assert isinstance(stream, _Compute)
        self.waited_for_compute += 1

    def wait_event(self, event: _Event) -> None:
        self.queue.append(event.wait)

    def record_event(self) -> _Event:
        return _Event(self, len(self.queue))


@dataclass(frozen=True)
class _Event:
    stream: LateStream
    count: int

    def wait(self) -> None:
        while self.stream.done < self.count:
            self.stream.done += 1
            self.stream.queue[self.stream.done - 1]()


class _Compute:
    """The stream of kernels, which run at once."""

    def wait_event(self, event: _Event) -> None:
        event.wait()


class _Unowned:
    """The same memory, which a queued copy does not keep from its next use."""

    def __init__(self, tensor: Tensor):
        storage = tensor.untyped_storage()
        self.mapped = storage.data_ptr() in _ROWS
        self.storage = StorageWeakRef(storage)
        self.bytes = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())

    def __call__(self) -> Tensor:
        assert self.mapped or not self.storage.expired(), "the device has used it for others"
        return torch.frombuffer(self.bytes, dtype=torch.uint8)


class _Later(TorchDispatchMode):
    """Inside, copies are queued on a stream, to whose pool no memory belongs."""

    def __init__(self, stream: LateStream):
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is torch.ops.aten.copy_.default, func
        assert all(x.is_contiguous() for x in args[:2]) and args[0].dtype is args[1].dtype
        target, source = (_Unowned(x) for x in args[:2])
        self.stream.queue.append(lambda: target().copy_(source()))
        return args[0]


class _NewIsNan(TorchDispatchMode):
    """Inside, new memory holds NaN."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        return made.fill_(torch.nan) if func is torch.ops.aten.empty.memory_format else made


class LateCopies(offload.StreamCopies):
    def __init__(self) -> None:
        self.compute = _Compute()
        cuda = SimpleNamespace(
            Stream=LateStream, stream=_Later, current_stream=lambda: self.compute
        )
        super().__init__(cuda)
        self.rows = PinnedRows(lambda address, size: _ROWS.add(address))
        self.log: list[str] = []
        self.living: list[int] = []
        self.of_activations: list[tuple[StorageWeakRef, int]] = []

    def living_bytes(self) -> int:
        """Of the device, of what has left, is leaving, or has come back."""
        return sum(size for storage, size in self.of_activations if not storage.expired())

    def _count(self, tensor: Tensor) -> None:
        self.of_activations.append((StorageWeakRef(tensor.untyped_storage()), tensor.nbytes))

    def to_host(self, kept, home=None):
        self.log.append("leave")
        if home is None:
            self._count(kept)
        return super().to_host(kept, home)

    def to_device(self, home, device, *, after):
        with _NewIsNan():
            back, arrival = super().to_device(home, device, after=after)
        if arrival is after:
            self.log.append("stay")
        else:
            self._count(back)
        return back, arrival

    def overwrite(self, row, home):
        self.log.append("overwrite")
        return super().overwrite(row, home)

    def wait(self, arrival):
        self.log.append("wait")
        self.living.append(self.living_bytes())
        super().wait(arrival)
