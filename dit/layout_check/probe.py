"""A few training steps, and what they did to every weight, in the same form on every layout."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from dit.batch import PackedBatch
from dit.config import RunConfig
from dit.data import null_inputs
from dit.distributed.data_parallel import gathered_weights, main_param_shards
from dit.distributed.model_parallel import Item
from dit.distributed.pack_broadcast import Replica
from dit.distributed.process_groups import device, process_groups
from dit.distributed.row_shares import rows_of
from dit.distributed.watchdog import heartbeat
from dit.layout_check.rounding import Reach
from dit.lora.targets import Adapters, chosen_adapters
from dit.objectives.registry import training_objective
from dit.objectives.training_target import training_problem
from dit.train.checkpoint.exchange import StateExchange
from dit.train.checkpoint.shares import data_of, entries_of
from dit.train.metrics.step_metrics import sum_over_ranks
from dit.train.model_and_optimizer import ModelAndOptimizer, build_model_and_optimizer, randomise
from dit.train.reference_passes import reference_passes
from dit.train.step import forward_backward, optimizer_step
from dit.train.validation import validate

Tensors = dict[str, Tensor]
Piece = tuple[str, tuple[int, ...], tuple[int, ...], Tensor]  # name, whole shape, offset, values


@dataclass(kw_only=True, slots=True)
class Probe:
    """The record of a short training; only the first rank has the tensors."""

    validation: dict[str, float] = field(default_factory=dict)  # before the first step, by name
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    gradients: Tensors = field(default_factory=dict)  # of the first step
    weights: Tensors = field(default_factory=dict)  # after the last step
    averages: Tensors = field(default_factory=dict)  # of the weights, after the last step
    reach: Tensors = field(default_factory=dict)  # of one process: bounds of `Reach`
    torn: list[str] = field(default_factory=list)  # weights whose copies are not bit-identical
    thawed: list[str] = field(default_factory=list)  # frozen weights that a step has changed


def probe(
    config: RunConfig,
    read: Callable[[], Sequence[PackedBatch]],
    *,
    steps: int,
    rounding: float,
    frozen: Adapters | None = None,
) -> Probe:
    """Trains from random weights on the packs of `read`, which are sorted by step.

    `rounding` is the difference of gradients that `Reach` bounds weights by. `frozen` are adapters
    beside those that are trained.

    The rank of a replica that reads calls it, often: it keeps what it has read.

    Every rank of the layout calls it. Weights are random because with the zeros of a fresh DiT most
    weights have no gradient, and errors would not be found.
    """
    heartbeat("build of the model", step=0)
    groups = process_groups()
    adapters = chosen_adapters(config.model, config.lora) if config.lora.enabled else None
    beside = {"adapters": adapters, "frozen": frozen}
    model = build_model_and_optimizer(config, groups, fill=_random, **beside)
    before = _digests(model)
    replica, objective = Replica(groups), training_objective(config.objective)
    null, result = null_inputs(config, device()), Probe()
    reach = Reach(model.optimizer, config.optimizer, rounding=rounding)
    alone = dist.get_world_size() == 1
    run: Any = SimpleNamespace(config=config, model=model, objective=objective, null=null)

    def packs_of(step: int) -> list[PackedBatch]:
        batch = config.train.global_batch_size
        share = batch // groups.dp.size()
        first = (step - 1) * batch + groups.dp.rank() * share
        mine = read()[first : first + share] if replica.reads else []
        return replica.broadcast(mine, device())

    result.validation = validate(model, packs_of(1), objective=objective, config=config)
    for step in range(1, steps + 1):
        heartbeat("read of packs", step=step)
        packs = packs_of(step)
        items = _problems(run, packs, step)
        references = reference_passes(run, packs, items, step=step)
        rank_loss = forward_backward(model, items, config=config, references=references)
        sums = sum_over_ranks({"error": rank_loss.total, "count": rank_loss.count})
        result.losses.append(sums["error"] / sums["count"])
        update = optimizer_step(model, config=config, number=step, loss=result.losses[-1])
        result.grad_norms.append(update.grad_norm)
        if alone:
            reach.add_update()
        if step == 1:
            result.gradients = _gather(model, [_gradient(v) for v in _main_params(model)])
    result.weights = _gather(model, _main_params(model))
    if model.ema is not None:
        result.averages = _gather(model, model.ema.averages)
    if alone:
        result.reach = _gather(model, reach.bounds)
    result.torn, result.thawed = _torn(model), _thawed(model, before)
    return result


def _problems(run: Any, packs: Sequence[PackedBatch], step: int) -> list[Item]:
    c = run.config
    more: Any = {"null": run.null, "options": c.objective, "route": c.model.token_route}
    return [
        training_problem(run.objective, pack, seed=c.rng.seed, step=step, **more) for pack in packs
    ]


def _random(model: MegatronModule, config: RunConfig) -> None:
    randomise(model, seed=config.rng.seed)


def _main_params(model: ModelAndOptimizer) -> list[Tensor]:
    return [shard.value for shard in main_param_shards(model.optimizer)]


def _gradient(value: Tensor) -> Tensor:
    assert value.grad is not None, "a weight without gradient"
    return value.grad


_PROBED = "probed."


def _gather(model: ModelAndOptimizer, values: Sequence[Tensor]) -> Tensors:
    """Full tensors by name, on the first rank, from values in the order of the main parameters."""
    exchange = StateExchange(
        model.modules, model.groups, optimizer=model.optimizer, values={_PROBED: values}
    )
    pieces = []
    for entry in exchange.gather():
        if entry.key.startswith(_PROBED):
            axes = entry.prepend_axis_num
            whole, offset = entry.global_shape[axes:], entry.global_offset[axes:]
            name = _name(entry).removeprefix(_PROBED)
            pieces.append((name, tuple(whole), tuple(offset), data_of(entry)))
    every: list[list[Piece]] = [[]] * dist.get_world_size()
    dist.gather_object(pieces, every if dist.get_rank() == 0 else None)
    tensors: Tensors = {}
    for name, shape, offset, local in (piece for rank in every for piece in rank):
        # NaN stays where no rank has a piece, and counts as an infinite difference.
        whole = tensors.setdefault(name, torch.full(shape, torch.nan))
        at = zip(offset, local.shape, strict=True)
        whole[tuple(slice(first, first + size) for first, size in at)] = local
    return tensors


def _name(entry: ShardedTensor) -> str:
    """The name in a checkpoint, with the number of the layer."""
    layer = "".join(f"layers.{index}." for index in entry.global_offset[: entry.prepend_axis_num])
    return entry.key.replace("layers.", layer, 1) if layer else entry.key


def _torn(model: ModelAndOptimizer) -> list[str]:
    """Names of weights whose copies on two ranks differ, on the first rank."""
    every: list[dict] = [{}] * dist.get_world_size()
    dist.gather_object(_digests(model), every if dist.get_rank() == 0 else None)
    seen: dict[_Place, str] = {}
    parts = (item for of_rank in every for item in of_rank.items())
    return sorted({part[0] for part, digest in parts if seen.setdefault(part, digest) != digest})


def _thawed(model: ModelAndOptimizer, before: Mapping[_Place, str]) -> list[str]:
    """Names of frozen weights that are not as they were before, on the first rank."""
    trained = {
        _name(entry)
        for module in model.modules
        for entry in entries_of(module)
        if data_of(entry).requires_grad
    }
    after = _digests(model)
    mine = {part[0] for part in after if part[0] not in trained and after[part] != before[part]}
    every: list[set[str]] = [set()] * dist.get_world_size()
    dist.gather_object(mine, every if dist.get_rank() == 0 else None)
    return sorted(set().union(*every))


_Place = tuple[str, tuple[int, ...], int]  # name, offset, where rows of a weight in shares begin


def _digests(model: ModelAndOptimizer) -> dict[_Place, str]:
    """Of the weights of this rank."""
    digests = {}
    with gathered_weights(model.chunks):
        for module in model.modules:
            for entry in entries_of(module):
                bits = data_of(entry).detach().cpu().contiguous().flatten().view(torch.uint8)
                digest = hashlib.blake2b(bits.numpy().tobytes()).hexdigest()
                rows = rows_of(data_of(entry))
                first = 0 if rows is None else rows.part.start
                digests[_name(entry), tuple(entry.global_offset), first] = digest
    return digests
