"""Megatron-Core's sharded checkpoint in three acts, the second of which needs no other rank.

1. gather   all ranks together plan who writes what, and copy it into host memory
2. write    each rank its own files, whenever it likes
3. index    all ranks together: .metadata, metadata.json

The files are written by threads of this process. Megatron-Core 0.16 forks writers: next to the
threads of gloo, NCCL and CUDA that may deadlock, and when a writer is killed its parent waits for
ever. Nothing is lost by it, since torch releases the interpreter while it writes a tensor.
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

# From 0.17 on the default is a package of its own, nvidia-resiliency-ext.
_CHOOSES = "async_strategy" in signature(dist_checkpointing.save).parameters
_STRATEGY: dict[str, Any] = {"async_strategy": "mcore"} if _CHOOSES else {}


@dataclass(frozen=True, slots=True)
class Shard:
    """One file, and the tensors and objects that go into it."""

    file: Path
    items: Sequence[tuple[Any, Any]]

    @property
    def bytes(self) -> int:
        """Of its tensors; objects are small beside them."""
        return sum(data.nbytes for _, data in self.items if isinstance(data, Tensor))

    def write(self) -> list[WriteResult]:
        """Writes the file; the result is for the index."""
        return write_items(self.file, self.items)


def write_items(file: Path, items: Iterable[tuple[Any, Any]]) -> list[WriteResult]:
    """Writes a file of tensors and objects, one after the other; the result is for the index."""
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
class Shards:
    """The part of a checkpoint that this rank writes."""

    request: Any  # Megatron-Core's AsyncRequest
    shards: list[Shard]

    def index(self, results: list[list[WriteResult]]) -> None:
        """Says where everything lies, once all ranks have written; all of them call it."""
        if self.shards:
            queue = self.request.async_fn_args[2]
            queue.put(dict(enumerate(results)))
        for act in self.request.finalize_fns:
            act()


def gather_shards(state: dict[str, Any], folder: Path, *, clone: bool) -> Shards:
    """Plans the files of `state` in `folder`; all ranks call it.

    What was on a GPU is copied to the host. With `clone` so is what was on the host: the result
    does not change when `state` does.
    """
    # Megatron-Core's own queue is a process: it takes 2 s to start, and dies of the SIGTERM that
    # makes a run save, since torch.distributed.run sends that to every process.
    filesystem_async._results_queue = SimpleQueue()  # type: ignore[assignment]
    request: Any = dist_checkpointing.save(state, str(folder), async_sharded_save=True, **_STRATEGY)
    buckets = request.preload_fn() if request.preload_fn else []
    return Shards(
        request,
        [
            Shard(
                Path(path),
                [*objects, *((item, t.clone() if clone else t) for item, t in tensors)],
            )
            for path, _, (objects, tensors) in buckets
        ],
    )
