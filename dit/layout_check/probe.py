"""What a few steps did to every weight, in a form that does not depend on the layout."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from dit.batch import PackedBatch
from dit.config import RunConfig
from dit.data import null_text
from dit.distributed.pack_broadcast import Replica
from dit.distributed.process_groups import device, process_groups
from dit.distributed.watchdog.monitor import heartbeat
from dit.models.layers.init import randomise
from dit.objectives import make_objective, training_problem
from dit.train.main_params import joined, main_param_shards
from dit.train.model_and_optimizer import (
    ModelAndOptimizer,
    build_model_and_optimizer,
    forward_backward,
    optimizer_step,
)
from dit.train.step import sum_over_ranks
from dit.train.validation import validate

Tensors = dict[str, Tensor]
Piece = tuple[str, tuple[int, ...], tuple[int, ...], Tensor]  # name, whole shape, offset, values


@dataclass(kw_only=True, slots=True)
class Probe:
    """A short training, on the first rank; elsewhere the tensors are missing."""

    validation: dict[str, float] = field(default_factory=dict)  # before the first step, by name
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    start: Tensors = field(default_factory=dict)  # weights before the first step
    gradients: Tensors = field(default_factory=dict)  # of the first step
    weights: Tensors = field(default_factory=dict)  # after the last step
    averages: Tensors = field(default_factory=dict)  # of the weights, after the last step
    torn: list[str] = field(default_factory=list)  # weights whose replicas are not bit-identical


def probe(config: RunConfig, packs: Sequence[PackedBatch], *, steps: int) -> Probe:
    """Trains on `packs`, those of one step after those of another, from random values.

    Every rank of the layout calls it, with process groups up. Random values, because with the zeros
    of a fresh DiT most weights have no gradient and broken code passes.
    """
    heartbeat("build of the model", step=0)
    groups = process_groups()
    learner = build_model_and_optimizer(config, groups, fill=_random)
    replica, objective = Replica(groups), make_objective(config.objective)
    null_text_LE = null_text(config).to(device())
    result = Probe(start=_gather(learner, _main(learner)))
    batch = config.train.global_batch_size

    def packs_of(step: int) -> list[PackedBatch]:
        share = batch // groups.dp.size()
        first = (step - 1) * batch + groups.dp.rank() * share
        return replica.share(packs[first : first + share], device())

    result.validation = validate(learner, packs_of(1), objective=objective, config=config)
    for step in range(1, steps + 1):
        heartbeat("read of packs", step=step)
        items = [
            training_problem(
                objective,
                pack,
                seed=config.rng.seed,
                step=step,
                null_text_LE=null_text_LE,
                text_dropout=config.objective.text_dropout,
            )
            for pack in packs_of(step)
        ]
        report = forward_backward(learner, items, config=config)
        sums = sum_over_ranks({"error": report.total, "count": report.count})
        loss = sums["error"] / sums["count"]
        done = optimizer_step(learner, config=config, number=step, loss=loss)
        result.losses.append(loss)
        result.grad_norms.append(done.grad_norm)
        if step == 1:
            result.gradients = _gather(learner, [_gradient(v) for v in _main(learner)])
    result.weights = _gather(learner, _main(learner))
    if learner.ema is not None:
        result.averages = _gather(learner, learner.ema.averages)
    result.torn = _torn(learner)
    return result


def _random(model: MegatronModule, config: RunConfig) -> None:
    randomise(model, seed=config.rng.seed)


def _main(learner: ModelAndOptimizer) -> list[Tensor]:
    return [shard.value for shard in main_param_shards(learner.optimizer)]


def _gradient(value: Tensor) -> Tensor:
    assert value.grad is not None, "a weight without gradient"
    return value.grad


def _gather(learner: ModelAndOptimizer, values: Sequence[Tensor]) -> Tensors:
    """Whole tensors by name, on the first rank, from values beside the main shards."""
    pieces = []
    for chunk in learner.chunks:
        module: MegatronModule = chunk.module  # type: ignore[assignment]
        state = module.sharded_state_dict()
        ranks = learner.groups.dp_cp
        for name, local in joined(learner.optimizer, values, state, data_ranks=ranks).items():
            entry: ShardedTensor = state[name]
            if is_main_replica(entry.replica_id):
                axes = entry.prepend_axis_num
                whole, offset = entry.global_shape[axes:], entry.global_offset[axes:]
                pieces.append((_name(entry), tuple(whole), tuple(offset), local.cpu().clone()))
    every: list[list[Piece]] = [[]] * dist.get_world_size()
    dist.gather_object(pieces, every if dist.get_rank() == 0 else None)
    tensors: Tensors = {}
    for name, shape, offset, local in (piece for rank in every for piece in rank):
        whole = tensors.setdefault(name, torch.full(shape, torch.nan))
        at = zip(offset, local.shape, strict=True)
        whole[tuple(slice(first, first + size) for first, size in at)] = local
    return tensors


def _name(entry: ShardedTensor) -> str:
    """Its name in a checkpoint, with the layer's number."""
    layer = "".join(f"layers.{index}." for index in entry.global_offset[: entry.prepend_axis_num])
    return entry.key.replace("layers.", layer, 1) if layer else entry.key


def _torn(learner: ModelAndOptimizer) -> list[str]:
    """Weights that two ranks should hold alike and do not, on the first rank."""
    digests = set()
    with learner.settled():
        for chunk in learner.chunks:
            module: MegatronModule = chunk.module  # type: ignore[assignment]
            for entry in module.sharded_state_dict().values():
                if isinstance(entry, ShardedTensor) and entry.data is not None:
                    bits = entry.data.detach().cpu().contiguous().flatten().view(torch.uint8)
                    digest = hashlib.blake2b(bits.numpy().tobytes()).hexdigest()
                    digests.add(((_name(entry), *entry.global_offset), digest))
    every: list[set] = [set()] * dist.get_world_size()
    dist.gather_object(digests, every if dist.get_rank() == 0 else None)
    seen: dict[tuple, str] = {}
    torn = [part for part, digest in set().union(*every) if seen.setdefault(part, digest) != digest]
    return sorted({str(part[0]) for part in torn})
