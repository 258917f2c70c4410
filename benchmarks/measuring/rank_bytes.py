"""Counts the bytes that this process sends to other ranks, holds in tensors, and reads.

It counts torch's operations as they run: collectives by the bytes that they send to other ranks,
tensors by their memory while they live, reads of checkpoint files by the lengths of stored parts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# They send Python objects: plans, names and places of tensors.
_OBJECTS = (
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
)


@dataclass(kw_only=True, slots=True)
class RankBytes:
    """Numbers of bytes of one process."""

    sent: int = 0
    """Bytes of tensors that were sent to other ranks."""
    metadata: int = 0
    """Bytes of Python objects that were sent to other ranks."""
    held: int = 0
    """Largest memory, at one time, of tensors that were created inside the context."""
    read: int = 0
    """Bytes that were read from the files of a checkpoint."""


@contextmanager
def counted_bytes() -> Iterator[RankBytes]:
    """Context that counts the bytes of the operations inside it; yields the counts, which grow."""
    counter = _Counter()
    with ExitStack() as stack:
        for name in _OBJECTS:
            stack.enter_context(patch.object(dist, name, counter.of_objects(getattr(dist, name))))
        reader = filesystem.FileSystemReader
        stack.enter_context(patch.object(reader, "read_data", counter.reading(reader.read_data)))
        stack.enter_context(counter)
        yield counter.found


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found = RankBytes()
        self._objects = False
        self._live: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            self._collective(func.name().removeprefix("c10d::"), args)
        for tensor in _tensors((args, kwargs)):
            self._track(tensor, before=True)
        made = func(*args, **(kwargs or {}))
        for tensor in _tensors(made):
            self._track(tensor)
        return made

    def of_objects(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            outside, self._objects = self._objects, True
            try:
                return function(*args, **kwargs)
            finally:
                self._objects = outside

        return call

    def reading(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(reader: Any, plan: Any, planner: Any) -> Any:
            places = reader.storage_data
            self.found.read += sum(places[item.storage_index].length for item in plan.items)
            return function(reader, plan, planner)

        return call

    def _collective(self, name: str, args: tuple[Any, ...]) -> None:
        sent = _sent(name, args)
        if self._objects:
            self.found.metadata += sent
        else:
            self.found.sent += sent

    def _track(self, tensor: Tensor, *, before: bool = False) -> None:
        """Counts the memory of `tensor` from this use until it is freed.

        Memory that was allocated `before` the context counts as 0.
        """
        storage = tensor.untyped_storage()
        # The id may be another storage's as soon as this one is gone: it is forgotten with it.
        key = id(storage)
        if key not in self._live:
            self._live[key] = 0 if before else storage.nbytes()
            weakref.finalize(storage, self._live.pop, key, None)
            self.found.held = max(self.found.held, sum(self._live.values()))


def _sent(name: str, args: tuple[Any, ...]) -> int:
    """Bytes that this rank sends in the collective `name`, called with `args`.

    A broadcast and an all-gather count a copy for each receiver, an all-to-all the parts of other
    ranks. An all-reduce, a gather and a scatter count their tensors once.

    Raises:
        NotImplementedError: the collective is unknown.
    """
    group = next(dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject))
    rank, others = group.rank(), group.size() - 1
    match name:
        case "broadcast_":
            source = next(a for a in args if isinstance(a, int))
            return _nbytes(args[0]) * others if rank == source else 0
        case "alltoall_base_":
            given, sizes = args[1], args[4]
            own = sizes[rank] if sizes else given.numel() // group.size()
            return (given.numel() - own) * given.element_size()
        case "allgather_":
            return _nbytes(args[1]) * others
        case "gather_" | "scatter_":
            return _nbytes(args[1])
        case "allreduce_":
            return _nbytes(args[0])
        case "barrier":
            return 0
    raise NotImplementedError(
        f"the bytes that c10d::{name} sends are unknown; add a case for it to _sent in"
        " benchmarks/measuring/rank_bytes.py"
    )


def _nbytes(tensors: Any) -> int:
    return sum(t.nbytes for t in _tensors(tensors))


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]
