"""Megatron-Core's sharded checkpoint in three parts; the second needs no other rank.

1. plan_files        all ranks plan together the files of each rank
2. write             each rank writes its own files, at any time
3. write_index       all ranks together: .metadata, metadata.json

Threads of this process write the files. Megatron-Core 0.16 forks its writers, which may deadlock
next to the threads of gloo, NCCL and CUDA, and when a writer is killed its parent waits for ever.
Threads are no slower, since torch releases the interpreter lock while it writes a tensor.

This is the only module that touches private members of Megatron-Core's and torch's writers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch import Tensor
from torch.distributed.checkpoint.filesystem import (
    SerializationFormat,
    _StorageWriterTransforms,
    _write_item,
)
from torch.distributed.checkpoint.storage import WriteResult

# From 0.17 on the default strategy is that of another package, nvidia-resiliency-ext.
_HAS_STRATEGIES = "async_strategy" in signature(dist_checkpointing.save).parameters
_STRATEGY: dict[str, Any] = {"async_strategy": "mcore"} if _HAS_STRATEGIES else {}


@dataclass(frozen=True, slots=True)
class DistcpFile:
    """One file with its tensors and objects."""

    path: Path
    items: Sequence[tuple[Any, Any]]

    @property
    def bytes(self) -> int:
        """Size of its tensors; objects are small in comparison."""
        return sum(data.nbytes for _, data in self.items if isinstance(data, Tensor))

    def write(self) -> list[WriteResult]:
        """Writes the file; the results are for the index."""
        return write_items(self.path, self.items)


def write_items(file: Path, items: Iterable[tuple[Any, Any]]) -> list[WriteResult]:
    """Writes tensors and objects one after the other; the results are for the index."""
    with file.open("wb") as stream:
        return [
            _write_item(
                _StorageWriterTransforms(),
                stream,
                data,
                item,
                file.name,
                serialization_format=SerializationFormat.TORCH_SAVE,
            )
            for item, data in items
        ]


@dataclass(frozen=True, slots=True)
class DistcpSave:
    """The files of a checkpoint that this rank writes."""

    request: Any  # Megatron-Core's AsyncRequest
    files: list[DistcpFile]

    def write_index(self, results: list[list[WriteResult]]) -> None:
        """Writes where every tensor lies, once all ranks have written; all ranks call it."""
        if self.files:
            queue = self.request.async_fn_args[2]
            queue.put(dict(enumerate(results)))
        for finalize in self.request.finalize_fns:
            finalize()


def plan_files(state: dict[str, Any], folder: Path) -> DistcpSave:
    """Plans the files of `state`, whose tensors lie in host memory; all ranks call it."""
    # Megatron-Core's own queue is a process. It takes 2 s to start, and it dies of the SIGTERM that
    # makes a run save, since torch.distributed.run sends SIGTERM to every process.
    filesystem_async._results_queue = SimpleQueue()  # type: ignore[assignment]
    request: Any = dist_checkpointing.save(state, str(folder), async_sharded_save=True, **_STRATEGY)
    buckets = request.preload_fn() if request.preload_fn else []
    return DistcpSave(
        request,
        [DistcpFile(Path(path), [*objects, *tensors]) for path, _, (objects, tensors) in buckets],
    )
