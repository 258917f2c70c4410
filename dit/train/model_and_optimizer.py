"""Builds the model under data parallelism, its optimizer, and the EMA of its weights.

1. build       model, optimizer and EMA, together a `ModelAndOptimizer`
2. initialise  initial values that depend on the seed and on a weight's name, never on the layout
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from dit.config import EmaKind, InitMethod, RunConfig, Sharding
from dit.config.training import OptimizerStates
from dit.distributed.data_parallel import ModelChunk, wrap
from dit.distributed.full_sharding import without_memory
from dit.distributed.process_groups import broadcast, device
from dit.distributed.row_shares import keep_packed, put_rows, rows_of
from dit.models.layers.adaptable import FROZEN, is_of_any_adapter, is_up
from dit.models.layers.parallel_linear import add_gradients_in_products
from dit.models.registry import family_of
from dit.models.stacks.frozen_blocks import byte_rows, place_networks, round_blocks
from dit.models.stacks.stacked_transformer import StackedTransformer
from dit.train.checkpoint.shares import stored_by
from dit.train.optimizer.build import build_optimizer, freeze_groups
from dit.train.optimizer.narrow_moments import check_moments
from dit.train.timers import COMMUNICATION, timed

if TYPE_CHECKING:
    from dit.lora.targets import Adapters
    from dit.train.optimizer.ema import Ema

EMBEDS_LEVEL = ("told.", "level.")
"""Prefixes of the names of weights that embed the noise level, or pooled text added to it."""
Initialise = Callable[[StackedTransformer], None]
"""Function that sets the weights of a model to their first values."""
LoadFrozen = Callable[[Sequence[StackedTransformer]], None]
"""Function that loads the frozen weights of this rank's model chunks."""
DrawWeight = Callable[[str, tuple[int, ...], torch.Generator], Tensor]
"""Function that returns a weight's first values, from its name, its whole shape and a generator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelAndOptimizer:
    """A model with its optimizer, its EMA and its process groups."""

    chunks: list[ModelChunk]  # this rank's parts of the model: one for each virtual stage
    optimizer: MegatronOptimizer
    states: OptimizerStates  # what the optimizer keeps for each main parameter
    ema: Ema | None
    groups: ProcessGroupCollection
    adapters: Adapters | None = None  # the trained adapters; None: all weights are trained

    @property
    def modules(self) -> list[Any]:
        """The networks inside the chunks, without the wrapper for data parallelism."""
        return [chunk.module for chunk in self.chunks]

    def at_step(self, step: int) -> None:
        """Sets the training step, counted from 1, for passes that depend on it."""
        for module in self.modules:
            module.at_step(step)


def build_model_and_optimizer(
    config: RunConfig,
    groups: ProcessGroupCollection,
    *,
    fill: Initialise | None = None,
    adapters: Adapters | None = None,
    frozen: Adapters | None = None,
    load_base: LoadFrozen | None = None,
    base: Sequence[MegatronModule] | None = None,
) -> ModelAndOptimizer:
    """Builds a model filled by `fill`, a fresh optimizer, and the EMA of the weights if configured.

    With `adapters`, only these are trained; the frozen weights and the `frozen` adapters are loaded
    by `load_base`, or shared with `base`, the model chunks of another network.
    """
    check_moments(config.optimizer)
    fill = fill or partial(initialise_weights, config=config)
    beside: Any = {"frozen": frozen, "load_base": load_base, "base": base}
    chunks = build_model(config, groups, fill=fill, adapters=adapters, **beside)
    optimizer = build_optimizer(config, chunks)
    ema: Ema | None = None
    if config.ema.kind is not EmaKind.NONE:
        from dit.train.optimizer.ema import Ema

        ema = Ema(config.ema, optimizer, groups)
    return ModelAndOptimizer(
        chunks=chunks,
        optimizer=optimizer,
        states=config.optimizer.states,
        ema=ema,
        groups=groups,
        adapters=adapters,
    )


def initialise_weights(model: StackedTransformer, config: RunConfig) -> None:
    """Sets the weights of `model` to those from which training starts; all data ranks call it.

    A run with adapters calls it if no file has their frozen weights; then no matrix is zero.
    """
    rules = family_of(config.model).weights
    initialise(
        model,
        seed=config.rng.seed,
        std=config.model.init_method_std,
        method=config.model.init_method,
        # Behind a head or a gate that stays zero, no adapter ever has a gradient.
        zero=lambda name: not config.lora.enabled and rules.starts_at_zero(name),
        copies=model.groups.dp_cp,
        chosen=lambda name: name not in rules.fixed,
    )


def leave_to_checkpoint(_: MegatronModule) -> None:
    """Draws nothing, because a checkpoint replaces all weights before they are used."""


def build_model(
    config: RunConfig,
    groups: ProcessGroupCollection,
    *,
    fill: Initialise,
    adapters: Adapters | None = None,
    frozen: Adapters | None = None,
    load_base: LoadFrozen | None = None,
    base: Sequence[MegatronModule] | None = None,
) -> list[ModelChunk]:
    """Model chunks of this rank, filled by `fill` and wrapped for data parallelism.

    The other arguments are those of `build_model_and_optimizer`.
    """
    virtual = config.model.virtual_stages
    stages = range(virtual) if virtual > 1 else [None]
    in_shares = config.ddp.sharding is Sharding.WEIGHTS
    with without_memory() if in_shares or base is not None else nullcontext():
        models = [
            _network(config, groups, stage, adapters, frozen, placed=base is None)
            for stage in stages
        ]
    if base is not None:
        from dit.lora.targets import share_base

        share_base(models, base)
    # With FSDP, wrapping gives memory to this rank's rows; `fill` then sets weights row by row.
    chunks = _wrapped(models, config, groups) if in_shares else []
    for model in models:
        fill(model)
    if load_base is not None:
        load_base(models)
    chunks = chunks or _wrapped(models, config, groups, shared=base is not None)
    # Megatron-Core's schedules look at the first chunk's configuration.
    chunks[0].config.finalize_model_grads_func = timed(COMMUNICATION)(finalize_model_grads)
    return chunks


def _network(
    config: RunConfig,
    groups: ProcessGroupCollection,
    stage: int | None,
    adapters: Adapters | None,
    frozen: Adapters | None,
    *,
    placed: bool = True,
) -> StackedTransformer:
    """The part `stage` of the network on this rank, with adapters and uninitialised weights.

    With `placed` it is moved to the device, unless its weights will be rounded, swapped or sharded
    and may not fit as a whole.
    """
    build: Any = family_of(config.model).network()
    model: StackedTransformer = build(config.model, groups, stage)
    # The device may lack memory for the whole network.
    waits = not placed or config.lora.base_dtype is not None or config.model.blocks_to_swap
    if not (waits or config.ddp.sharding is Sharding.WEIGHTS):
        model.to(device())
    if adapters is not None:
        from dit.lora.targets import attach_adapters

        precision = config.lora.dtype or config.model.precision
        attach_adapters(model, adapters, precision=precision, dropout=config.lora.dropout)
        if frozen:
            attach_adapters(model, frozen, precision=precision, adapter=FROZEN)
    return model


def _wrapped(
    models: Sequence[StackedTransformer],
    config: RunConfig,
    groups: ProcessGroupCollection,
    *,
    shared: bool = False,
) -> list[ModelChunk]:
    """Freezes, rounds and places the `models` as configured, and wraps them for data parallelism.

    If `shared`, the frozen weights belong to another network too, and are rounded already.
    """
    in_shares = config.ddp.sharding is Sharding.WEIGHTS
    for model in models:
        if not shared:
            freeze_groups(model, config)
        if config.lora.base_dtype is not None and in_shares:
            for weight, rows in byte_rows(model):
                keep_packed(weight, rows)
        elif config.lora.base_dtype is not None and not shared:
            round_blocks(model, device())
        if config.model.gradient_accumulation_fusion:
            add_gradients_in_products(model)
    if not in_shares:
        place_networks(models, device(), swapped=config.model.blocks_to_swap)
    return wrap(models, config.ddp, groups)


@torch.no_grad()
def draw_weights(
    model: MegatronModule,
    draw: DrawWeight,
    *,
    seed: int,
    copies: dist.ProcessGroup | None = None,
    chosen: Callable[[str], bool] = lambda _: True,
) -> None:
    """Sets each `chosen` weight to this rank's shard of `draw(name, whole shape, generator)`.

    The generator is seeded by (seed, name, layer), and the whole tensor is drawn in float32 before
    this rank takes its shard, so every layout starts from the same numbers. The ranks `copies` hold
    the same shards; they divide the drawing about equally, and send each other the results.
    """
    shards = [shard for shard in weight_shards(model) if chosen(shard.key)]
    fill_shards(shards, lambda shard: _drawn(shard, draw, seed=seed), copies)


def weight_shards(model: MegatronModule) -> list[ShardedTensor]:
    """This rank's shard of each weight of `model`, in a fixed order.

    With `ddp.sharding=weights` (FSDP) the shard consists of this rank's rows.
    """
    found = nested_values(dict(enumerate(stored_by(model))))
    return [one for one in found if isinstance(one, ShardedTensor) and one.data is not None]


@torch.no_grad()
def fill_shards(
    shards: Sequence[ShardedTensor],
    value_of: Callable[[ShardedTensor], Tensor],
    copies: dist.ProcessGroup | None,
) -> None:
    """Sets each of this rank's `shards` to its value, computed by one of the ranks `copies`.

    These ranks hold the same shards, or rows of them. They compute values at the same time, about
    as many each, and each sends a value to the others before it computes the next.
    """
    owned: list[list[ShardedTensor]] = [[] for _ in range(_size(copies))]
    for shard, rank in zip(shards, _owners(shards, copies), strict=True):
        owned[rank].append(shard)
    here = copies.rank() if copies is not None else 0
    for turn in zip_longest(*owned):
        value = value_of(turn[here]) if turn[here] is not None else None
        for rank, shard in enumerate(turn):
            if shard is not None:
                _send(shard, value if rank == here else None, copies, source=rank)
        value = None  # frees its memory before the next value is computed


def _send(
    shard: ShardedTensor, value: Tensor | None, copies: dist.ProcessGroup | None, *, source: int
) -> None:
    """Copies `value`, which rank `source` has, into `shard` on all ranks of `copies`."""
    part = shard.data
    assert part is not None
    whole = torch.empty(shard.local_shape, dtype=shard.dtype, device=part.device)
    if value is not None:
        whole.copy_(value)
    if copies is not None and copies.size() > 1:
        broadcast(whole, copies, source=source)
    rows = rows_of(part)
    put_rows(part, whole.view(-1) if rows is None else whole.view(-1)[rows.part])


def _size(copies: dist.ProcessGroup | None) -> int:
    return copies.size() if copies is not None else 1


def _owners(shards: Sequence[ShardedTensor], copies: dist.ProcessGroup | None) -> list[int]:
    """The rank that computes each shard's values; all ranks compute about as many numbers."""
    return _shared_out([math.prod(one.local_shape) for one in shards], _size(copies))


def _drawn(shard: ShardedTensor, draw: DrawWeight, *, seed: int) -> Tensor:
    axes = shard.prepend_axis_num  # the layer number is such an axis
    name = f"{shard.key}/{shard.global_offset[:axes]}"
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    whole = draw(shard.key, shard.global_shape[axes:], generator)
    mine = zip(shard.global_offset[axes:], shard.local_shape, strict=True)
    return whole[tuple(slice(at, at + size) for at, size in mine)]


def _shared_out(sizes: Sequence[int], ranks: int) -> list[int]:
    """The rank for each size: the largest size first, always to the rank with the smallest sum."""
    totals, owners = [0] * ranks, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[index] = totals.index(min(totals))
        totals[owners[index]] += sizes[index]
    return owners


_STORED_AT_ZERO = (".bias", ".offset")
"""Suffixes of the names of weights that start at 0: biases, and norms stored minus 1
(`CentredNorm`)."""


def initialise(
    model: MegatronModule,
    *,
    seed: int,
    std: float | None,
    method: InitMethod = InitMethod.NORMAL,
    zero: Callable[[str], bool] = lambda _: False,
    copies: dist.ProcessGroup | None = None,
    chosen: Callable[[str], bool] = lambda _: True,
) -> None:
    """Sets the weights of `model` to those from which training starts.

    Norms are 1, or 0 if they are stored minus 1. Biases are 0, and so are the matrices whose
    checkpoint names `zero` accepts. Other matrices are normal with deviation `std`, or 1 /
    sqrt(inputs) if `std` is None. With `method` xavier only matrices that embed the noise level and
    pooled text are normal; the others are uniform in +-sqrt(6 / (inputs + outputs)) (Glorot and
    Bengio, AISTATS 2010, Eq. 16), where queries, keys and values of a layer count as one matrix.
    Ranks with the same shards (`copies`) divide the work. Matrix A of an adapter is uniform in +-1
    / sqrt(inputs), B is 0, as in PEFT.
    """

    def draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        if is_of_any_adapter(name):
            return uniform(shape, 0 if is_up(name) else shape[1] ** -0.5, generator)
        if len(shape) == 1:
            return (torch.zeros if name.endswith(_STORED_AT_ZERO) else torch.ones)(shape)
        if zero(name):
            return torch.zeros(shape)
        if method is InitMethod.XAVIER and not name.startswith(EMBEDS_LEVEL):
            return uniform(shape, math.sqrt(6 / (shape[0] + shape[1])), generator)
        return torch.randn(shape, generator=generator) * (std or shape[1] ** -0.5)

    def uniform(shape: tuple[int, ...], bound: float, generator: torch.Generator) -> Tensor:
        return (torch.rand(shape, generator=generator) * 2 - 1) * bound

    draw_weights(model, draw, seed=seed, copies=copies, chosen=chosen)


def randomise(
    model: MegatronModule, *, seed: int, chosen: Callable[[str], bool] = lambda _: True
) -> None:
    """Sets every `chosen` weight, norms included, to random values, for tests of equality.

    With the zeros of `initialise`, most weights have no gradient and broken code passes.
    """

    def draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        wave = torch.randn(shape, generator=generator)
        # Large biases and adapters sharpen attention that has no norms of queries and keys, until
        # its gradients are only rounding errors.
        if len(shape) > 1:
            return wave * shape[1] ** -0.5 * (0.2 if name.endswith(".B") else 1)
        return 0.2 * wave if name.endswith("bias") else 1 + 0.2 * wave

    draw_weights(model, draw, seed=seed, chosen=chosen)
