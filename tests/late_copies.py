"""A stand-in for the streams of a GPU, on which copies are made as late as their order allows."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor
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


def _unowned(tensor: Tensor) -> Tensor:
    """The same memory, where it is a row: a queued copy does not keep that from its next use."""
    if tensor.untyped_storage().data_ptr() not in _ROWS:
        return tensor
    bytes_of_row = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(bytes_of_row, dtype=tensor.dtype).view(tensor.shape)


class _Later(TorchDispatchMode):
    """Inside, copies are queued on a stream, and new memory holds NaN."""

    def __init__(self, stream: LateStream):
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            target, source = (_unowned(x) for x in args[:2])
            self.stream.queue.append(lambda: target.copy_(source))
            return args[0]
        made = func(*args, **(kwargs or {}))
        return made.fill_(torch.nan) if made.is_floating_point() else made


class LateCopies(offload.StreamCopies):
    def __init__(self) -> None:
        self.compute = _Compute()
        cuda = SimpleNamespace(
            Stream=LateStream, stream=_Later, current_stream=lambda: self.compute
        )
        super().__init__(cuda)
        self.rows = PinnedRows(lambda address, size: _ROWS.add(address))
        self.log: list[str] = []
        self.held = {"out": 0, "compute": 0}

    def _used_by(self, tensor: Tensor, stream: object) -> None:
        self.held["out" if stream is self.out else "compute"] += 1

    def to_host(self, kept):
        self.log.append("leave")
        return super().to_host(kept)

    def to_device(self, home, **options):
        self.log.append("return")
        return super().to_device(home, **options)

    def overwrite(self, row, home):
        self.log.append("overwrite")
        return super().overwrite(row, home)

    def wait(self, back, arrival):
        self.log.append("wait")
        super().wait(back, arrival)
