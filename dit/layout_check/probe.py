"""A few training steps and their effect on every weight, in the same form on every layout."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from dit.batch import PackedBatch
from dit.config import DistillMethod, RunConfig, Sharding
from dit.data import null_inputs
from dit.distributed.data_parallel import ModelChunk, gathered_weights, main_param_shards
from dit.distributed.pack_broadcast import Replica
from dit.distributed.process_groups import device, process_groups
from dit.distributed.row_shares import rows_of
from dit.distributed.watchdog import heartbeat
from dit.layout_check.rounding import Reach
from dit.lora.targets import Adapters, chosen_adapters
from dit.models.layers.adaptable import is_adapter
from dit.objectives.registry import training_objective
from dit.train.checkpoint.exchange import StateExchange
from dit.train.checkpoint.shares import data_of, entries_of
from dit.train.checkpoint.state_dict import TrainProgress
from dit.train.checkpoint.without_tensors import CRITIC
from dit.train.metrics.step_metrics import sum_over_ranks
from dit.train.model_and_optimizer import ModelAndOptimizer, build_model_and_optimizer, randomise
from dit.train.reference_passes import NetworkTurn, turns
from dit.train.step import forward_backward, optimizer_step
from dit.train.validation import validate

Tensors = dict[str, Tensor]
Piece = tuple[
    str, tuple[int, ...], tuple[int, ...], np.ndarray
]  # name, whole shape, offset, values


@dataclass(kw_only=True, slots=True)
class Probe:
    """The record of a short training; only the first rank has tensors in it."""

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
    """Trains from random weights for `steps` steps, and records losses, gradients and weights.

    All ranks of the layout call it. `read` returns the packs of all steps, in order; only the
    reading rank of each replica calls it, and does so repeatedly. `rounding` is the assumed
    relative difference between gradients, from which `Reach` bounds weights. `frozen` are frozen
    adapters besides the trained ones. Weights are random, because with the zeros of a fresh DiT
    most weights have no gradient, and errors would not be found.
    """
    heartbeat("build of the model", step=0)
    groups = process_groups()
    adapters = chosen_adapters(config.model, config.lora) if config.lora.enabled else None
    beside = {"adapters": adapters, "frozen": frozen}
    fill = partial(_random, seed=config.rng.seed)
    model = build_model_and_optimizer(config, groups, fill=fill, **beside)
    critic = _critic(config, model)
    networks = {"": model} | ({} if critic is None else {f"{CRITIC}.": critic})
    before = {name: _digests(one) for name, one in networks.items()}
    replica, objective = Replica(groups), training_objective(config.objective)
    null, result = null_inputs(config, device()), Probe()
    options = {"rounding": rounding}
    reaches = {n: Reach(one.optimizer, config.optimizer, **options) for n, one in networks.items()}
    alone = dist.get_world_size() == 1
    told = {"config": config, "objective": objective, "null": null, "progress": TrainProgress()}
    run: Any = SimpleNamespace(**told, model=model, critic=critic, teacher=_teacher(config, groups))

    def packs_of(step: int) -> list[PackedBatch]:
        batch = config.train.global_batch_size
        share = batch // groups.dp.size()
        first = (step - 1) * batch + groups.dp.rank() * share
        mine = read()[first : first + share] if replica.reads else []
        return replica.broadcast(mine, device())

    result.validation = validate(model, packs_of(1), objective=objective, config=config)
    began = set[str]()
    for step in range(1, steps + 1):
        heartbeat("read of packs", step=step)
        packs = packs_of(step)
        for turn in turns(run, packs, step=step):
            name = f"{CRITIC}." if turn.critic else ""
            _learn(turn, result, name, first=name not in began)
            if alone:
                reaches[name].add_update()
            began.add(name)
        run.progress = replace(run.progress, step=step)
    _record(result, networks, before, reaches if alone else {})
    return result


def _record(
    result: Probe,
    networks: Mapping[str, ModelAndOptimizer],
    before: Mapping[str, Mapping[_Place, str]],
    reaches: Mapping[str, Reach],
) -> None:
    """Adds the weights, averages and bounds of each network to `result`, after the last step.

    Names in the record begin with the network's name.
    """
    for name, one in networks.items():
        result.weights |= _gather(one, _main_params(one), name)
        if one.ema is not None:
            result.averages |= _gather(one, one.ema.averages, name)
        if name in reaches:
            result.reach |= _gather(one, reaches[name].bounds, name)
        result.torn += [f"{name}{weight}" for weight in _torn(one)]
        result.thawed += [f"{name}{weight}" for weight in _thawed(one, before[name])]


def _learn(turn: NetworkTurn, result: Probe, name: str, *, first: bool) -> None:
    """Makes one update of `turn.model`, and adds its loss and gradient norm to `result`.

    If it is the network's `first`, its gradients are recorded, too; their names begin with `name`.
    """
    rank_loss = forward_backward(
        turn.model, turn.items, objective=turn.config.objective, references=turn.references
    )
    sums = sum_over_ranks({"error": rank_loss.total, "count": rank_loss.count})
    result.losses.append(sums["error"] / sums["count"])
    number = {"number": turn.number, "averaged": turn.averaged}
    update = optimizer_step(turn.model, config=turn.config, loss=result.losses[-1], **number)
    result.grad_norms.append(update.grad_norm)
    if first:
        gradients = [_gradient(value) for value in _main_params(turn.model)]
        result.gradients |= _gather(turn.model, gradients, name)


def _critic(config: RunConfig, student: ModelAndOptimizer) -> ModelAndOptimizer | None:
    """A critic with other random weights than `student`, or other adapters; None without DMD."""
    if config.distill.method is not DistillMethod.DMD:
        return None
    adapted, own = student.adapters is not None, config.of_critic
    shared = adapted and config.ddp.sharding is not Sharding.WEIGHTS

    def fill(model: MegatronModule) -> None:
        if adapted and not shared:
            randomise(model, seed=config.rng.seed)
        chosen = {"chosen": is_adapter} if adapted else {}
        randomise(model, seed=config.rng.seed + 2, **chosen)

    base = student.modules if shared else None
    told = {"adapters": student.adapters, "base": base}
    return build_model_and_optimizer(own, student.groups, fill=fill, **told)


def _teacher(config: RunConfig, groups: ProcessGroupCollection) -> list[ModelChunk]:
    """A teacher with other random weights; empty if the teacher is the base of adapters."""
    if config.distill.teacher is None:
        return []
    from dit.train.distill.teacher import build_teacher

    fill = partial(_random, seed=config.rng.seed + 1)
    return build_teacher(config, groups, None, fill=fill)


def _random(model: MegatronModule, seed: int) -> None:
    randomise(model, seed=seed)


def _main_params(model: ModelAndOptimizer) -> list[Tensor]:
    return [shard.value for shard in main_param_shards(model.optimizer)]


def _gradient(value: Tensor) -> Tensor:
    assert value.grad is not None, "a weight without gradient"
    return value.grad


_PROBED = "probed."


def _gather(model: ModelAndOptimizer, values: Sequence[Tensor], prefix: str = "") -> Tensors:
    """Full tensors by name, on the first rank, from `values` in the order of main parameters.

    Names begin with `prefix`. Other ranks get no tensors.
    """
    exchange = StateExchange(
        model.modules, model.groups, optimizer=model.optimizer, values={_PROBED: values}
    )
    pieces = []
    for entry in exchange.gather():
        if entry.key.startswith(_PROBED):
            axes = entry.prepend_axis_num
            whole, offset = entry.global_shape[axes:], entry.global_offset[axes:]
            name = f"{prefix}{_name(entry).removeprefix(_PROBED)}"
            # A numpy array, because pickling a tensor takes ten times as long.
            local = data_of(entry).detach().float().cpu().numpy()
            pieces.append((name, tuple(whole), tuple(offset), local))
    every: list[list[Piece]] = [[]] * dist.get_world_size()
    dist.gather_object(pieces, every if dist.get_rank() == 0 else None)
    tensors: Tensors = {}
    for name, shape, offset, local in (piece for rank in every for piece in rank):
        # Elements that no rank has stay NaN, which counts as an infinite difference.
        whole = tensors.setdefault(name, torch.full(shape, torch.nan))
        at = zip(offset, local.shape, strict=True)
        whole[tuple(slice(first, first + size) for first, size in at)] = torch.from_numpy(local)
    return tensors


def _name(entry: ShardedTensor) -> str:
    """The weight's name in a checkpoint, with the number of its layer."""
    layer = "".join(f"layers.{index}." for index in entry.global_offset[: entry.prepend_axis_num])
    return entry.key.replace("layers.", layer, 1) if layer else entry.key


def _torn(model: ModelAndOptimizer) -> list[str]:
    """Names of weights whose copies differ between ranks; complete on the first rank only."""
    every: list[dict] = [{}] * dist.get_world_size()
    dist.gather_object(_digests(model), every if dist.get_rank() == 0 else None)
    seen: dict[_Place, str] = {}
    parts = (item for of_rank in every for item in of_rank.items())
    return sorted({part[0] for part, digest in parts if seen.setdefault(part, digest) != digest})


def _thawed(model: ModelAndOptimizer, before: Mapping[_Place, str]) -> list[str]:
    """Names of frozen weights that differ from the digests `before`; complete on the first rank."""
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


_Place = tuple[str, tuple[int, ...], int]  # name, offset, first element of this rank's FSDP rows


def _digests(model: ModelAndOptimizer) -> dict[_Place, str]:
    """Digest of each weight, or part of one, on this rank, by (name, offset, first element)."""
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
