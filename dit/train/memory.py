"""Contents of a full device, keys that save memory, and Python's garbage collection.

Garbage is collected at fixed steps, equal on all ranks. By default Python looks for unreachable
cycles after a number of new objects: each rank does so at a different time, while all others wait
for it in the next collective. A step leaves no tensor in such a cycle, so no memory waits for a
collection.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dit.config import Recompute, RunConfig, Sharding, TrainConfig
from dit.config.training import WHEN_GATHERED
from dit.distributed.data_parallel import chained_optimizers, gradient_buffers, main_param_shards
from dit.distributed.process_groups import device

if TYPE_CHECKING:
    from dit.train.model_and_optimizer import ModelAndOptimizer


@dataclass
class Held:
    """The model whose memory `memory_explained` lists; None until it is built."""

    model: ModelAndOptimizer | None = None


@contextmanager
def memory_explained(config: RunConfig) -> Iterator[Held]:
    """A context in which an out-of-memory error of the device lists what its memory held."""
    held = Held()
    try:
        yield held
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
            error.add_note("\n".join(_report(config, held.model)))
        raise


def _report(config: RunConfig, model: ModelAndOptimizer | None) -> Iterator[str]:
    where, allocated = device(), 0
    if where.type == "cuda":
        allocated = torch.cuda.memory_allocated()
        whole = torch.cuda.get_device_properties(where).total_memory
        yield (
            f"{where} has {_gb(whole)}; torch held {_gb(allocated)}, at most"
            f" {_gb(torch.cuda.max_memory_allocated())}, and had reserved"
            f" {_gb(torch.cuda.memory_reserved())}"
        )
    if model is not None:
        sizes = bytes_held(model)
        parts = [f"{name} {_gb(size)}" for name, size in sizes.items()]
        if allocated > sum(sizes.values()):
            parts.append(f"activations and all else {_gb(allocated - sum(sizes.values()))}")
        yield f"held: {', '.join(parts)}"
    yield f"less memory: {', '.join(_remedies(config))}"


def bytes_held(model: ModelAndOptimizer) -> dict[str, int]:
    """Bytes on the device by content (weights, gradients, ...); shared storage counts once."""
    states = chain.from_iterable(
        state.values()
        for inner in chained_optimizers(model.optimizer)
        for state in inner.optimizer.state.values()
    )
    main = (shard.value for shard in main_param_shards(model.optimizer))
    kinds: dict[str, Iterable[Any]] = {
        "weights": chain.from_iterable(chunk.parameters() for chunk in model.chunks),
        "gradients": gradient_buffers(model.chunks),
        "optimizer": chain(main, states),
        "average": model.ema.averages if model.ema is not None else (),
    }
    seen: set[int] = set()
    return {name: sum(_sizes(tensors, seen)) for name, tensors in kinds.items()}


def _sizes(tensors: Iterable[Any], seen: set[int]) -> Iterator[int]:
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or tensor.device.type != device().type:
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage.nbytes()


def _remedies(config: RunConfig) -> Iterator[str]:
    """Keys that save memory; keys that reduce activations come first."""
    model, optimizer = config.model, config.optimizer
    if model.recompute_granularity is not Recompute.FULL:
        yield "model.recompute_granularity=full"
    yield "larger model.context_parallel_size or model.tensor_model_parallel_size"
    tokens = config.dataset.task_encoder_seq_length
    yield f"a smaller dataset.task_encoder_seq_length (now {tokens})"
    for name, usual in WHEN_GATHERED.items():
        if getattr(config.ddp, name) != usual:
            yield f"ddp.{name}={str(usual).lower()}"
    if config.lora.enabled:
        yield "model.blocks_to_swap, lora.base_dtype=float8_e4m3"
        return
    if not config.ddp.use_distributed_optimizer:
        yield "ddp.use_distributed_optimizer=true"
    if config.ddp.sharding is Sharding.OPTIMIZER:
        yield "ddp.sharding=weights"
    if not optimizer.optimizer_cpu_offload:
        yield "optimizer.optimizer_cpu_offload=true"


def _gb(size: int) -> str:
    return f"{size / 1e9:.3g} GB"


@contextmanager
def manual_gc(config: TrainConfig) -> Iterator[None]:
    """A context without automatic garbage collection, if `config.manual_gc`.

    Objects that exist when it begins, mostly modules, live as long as the run, so later collections
    skip them.
    """
    if not config.manual_gc:
        yield
        return
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def collect_after(step: int, config: TrainConfig) -> None:
    """Collects garbage, with `train.manual_gc`, at each `train.manual_gc_interval`-th step."""
    if config.manual_gc and config.manual_gc_interval and step % config.manual_gc_interval == 0:
        gc.collect()
