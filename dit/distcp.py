"""Megatron-Core's sharded checkpoint format, written in three steps; step 2 needs no other rank.

1. plan_files        all ranks together plan the files that each rank writes
2. write             each rank writes its own files, at any time
3. write_index       all ranks together write .metadata and metadata.json

`load`, `common_values` and `tensor_names` read such a checkpoint.

Threads of this process write the files. Megatron-Core 0.16 forks its writers, which may deadlock
next to the threads of gloo, NCCL and CUDA, and when a writer is killed its parent waits for ever.
Threads are no slower, because torch releases the interpreter lock while it writes a tensor.

If multi-storage-client is installed (Energon needs it), Megatron-Core takes the part of a path
before a colon for the name of a store: it could not write `wan:lora/run1`, and wrote `msc://x/run`
partly to the store and partly to a local folder. This module switches that off.

This is the only module that touches private members of Megatron-Core's and torch's writers, and the
only one that passes paths to these writers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.msc_utils import MultiStorageClientFeature
from torch import Tensor
from torch.distributed.checkpoint.filesystem import (
    SerializationFormat,
    _StorageWriterTransforms,
    _write_item,
)
from torch.distributed.checkpoint.storage import WriteResult

MultiStorageClientFeature.disable()
# From 0.17 on the default strategy is that of another package, nvidia-resiliency-ext.
_HAS_STRATEGIES = "async_strategy" in signature(dist_checkpointing.save).parameters
_STRATEGY: dict[str, Any] = {"async_strategy": "mcore"} if _HAS_STRATEGIES else {}


@dataclass(frozen=True, slots=True)
class DistcpFile:
    """A file of a sharded checkpoint: its tensors and objects, ready to be written."""

    path: Path
    items: Sequence[tuple[Any, Any]]

    @property
    def bytes(self) -> int:
        """Bytes of the tensors in the file; objects are small in comparison."""
        return sum(data.nbytes for _, data in self.items if isinstance(data, Tensor))

    def write(self) -> list[WriteResult]:
        """Writes the file; returns the results that the index needs."""
        return write_items(self.path, self.items)


def write_items(file: Path, items: Iterable[tuple[Any, Any]]) -> list[WriteResult]:
    """Writes (request, tensor or object) pairs to `file`; returns results for the index."""
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
    """This rank's files of a checkpoint, and Megatron-Core's request for its index."""

    request: Any  # Megatron-Core's AsyncRequest
    files: list[DistcpFile]

    def write_index(self, results: list[list[WriteResult]]) -> None:
        """Writes the index of all tensors, after all ranks have written; all ranks call it.

        `results` has what `write` returned for each of this rank's files, in their order.
        """
        if self.files:
            queue = self.request.async_fn_args[2]
            queue.put(dict(enumerate(results)))
        for finalize in self.request.finalize_fns:
            finalize()


def plan_files(state: dict[str, Any], folder: Path) -> DistcpSave:
    """Plans the files for `state`, whose tensors are in host memory; all ranks call it.

    The values that are not tensors are written to `folder` at once.
    """
    # Megatron-Core's own queue is a process. It takes 2 s to start, and it dies of the SIGTERM that
    # makes a run save, since torch.distributed.run sends SIGTERM to every process.
    filesystem_async._results_queue = SimpleQueue()  # type: ignore[assignment]
    request: Any = dist_checkpointing.save(state, str(folder), async_sharded_save=True, **_STRATEGY)
    common = folder / COMMON_STATE_FNAME
    if dist.get_rank() == 0 and not common.exists():
        # From 0.19 on Megatron-Core keeps these values among the tensors, where 0.16 does not look.
        torch.save(extract_sharded_base(state)[1], common)
    buckets = request.preload_fn() if request.preload_fn else []
    return DistcpSave(
        request,
        [DistcpFile(Path(path), [*objects, *tensors]) for path, _, (objects, tensors) in buckets],
    )


def write_format(folder: Path) -> None:
    """Writes into `folder` the file by which Megatron-Core recognises its checkpoints."""
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))


def load(state: dict[str, Any], folder: Path) -> Any:
    """Reads what Megatron-Core stored for the keys of `state`; all ranks call it."""
    return dist_checkpointing.load(state, str(folder))


def common_values(folder: Path) -> dict[str, Any]:
    """Values in the checkpoint `folder` that are not tensors, by name."""
    return dist_checkpointing.load_common_state_dict(str(folder))


def tensor_names(folder: Path) -> list[str]:
    """Names of the tensors in the checkpoint `folder`."""
    return list(dist_checkpointing.load_tensors_metadata(str(folder)))
