"""What ranks send each other, and add up, in a step with weights in shares.

Proofs of `shares_worker.py`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dit.config import DdpConfig, Precision, Recompute
from dit.distributed.collective_errors import on_all_ranks
from dit.distributed.data_parallel import named_weights, zero_gradients
from dit.distributed.row_shares import rows_of
from dit.planner.traffic import traffic
from dit.sizing.pack_traffic import pack_traffic
from dit.train.optimizer.update import clip_and_step
from dit.train.step import run_schedule
from tests.distributed.shares_worker import built, configs, item


class Sent(TorchDispatchMode):
    """Counts bytes that collectives send in rings, by their kind and the size of their group."""

    KINDS: ClassVar = {"_allgather_base_": 0, "_reduce_scatter_base_": 1, "allreduce_": 0}
    """Which argument is the whole of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = func.name().removeprefix("c10d::").partition(".")[0]
        if func.namespace == "c10d" and kind in self.KINDS:
            group = next(one for one in args if isinstance(one, torch.ScriptObject))
            ranks = dist.ProcessGroup.unbox(group).size()
            whole = sum(t.nbytes for t in tree_leaves(args[self.KINDS[kind]]))
            rings = 2 if kind == "allreduce_" else 1
            self.bytes[f"{kind} {ranks}"] += rings * whole * (ranks - 1) // ranks
        return func(*args, **(kwargs or {}))


def sent_in_a_step(_: Path, packs: int, copies: int, again: int = 0, **ddp: Any) -> dict[str, Any]:
    """Bytes that a rank sends in a step of so many packs, and what the planner says.

    `again`: so many layers at a time are computed again.
    """
    full = {"recompute_granularity": Recompute.FULL, "recompute_num_layers": again}
    config = configs(ddp=ddp, copies=copies, num_layers=4, **(full if again else {}))[0]
    model, count = built(config), Sent()
    zero_gradients(model.chunks, model.optimizer)
    with count:
        run_schedule(model.chunks, [item(config)] * packs, options=config.objective)
    network = model.modules[0].named_parameters()
    root = sum(p.numel() for name, p in network if ".layers." not in name)
    ranks = dist.get_world_size() // copies
    planned = traffic(config, tokens=1, accumulated=packs, replicas=dist.get_world_size())
    one = pack_traffic(config, shards=ranks)
    return {
        "sent": dict(count.bytes),
        "gathers": planned.data - config.ddp.sums(packs) * one.gradients,
        "again": packs * 4 * root * (ranks - 1) / ranks,
        "gradients": config.ddp.sums(packs) * one.gradients,
        "copies": planned.copies,
    }


def once_a_step(_: Path) -> dict[str, Any]:
    """Two packs in bf16, of which the first does not use a matrix of a layer."""
    found = {}
    for once in (False, True):
        config = configs(ddp={"reduce_each_pack": not once}, precision="bf16")[0]
        model = built(config)
        layer = next(iter(model.modules[0].stacks.values())).layers[0]
        calls: list[int] = []

        def not_of_the_first(_: Any, inputs: Any, out: Any, calls: list[int] = calls) -> Any:
            calls.append(1)
            return out.detach() if len(calls) == 1 else out

        layer.mlp.linear_fc1.register_forward_hook(not_of_the_first)
        zero_gradients(model.chunks, model.optimizer)
        run_schedule(model.chunks, [item(config)] * 2, options=config.objective)
        found[once] = clip_and_step(model.optimizer, clip_grad=1.0).grad_norm
    return {"each": found[False], "once": found[True]}


def order_of_sums(_: Path) -> dict[str, list[str]]:
    """Names of the gradients of a bf16 network whose bits are not those of whole weights.

    `layer`: where these, too, add up what the parts of a layer make of the gradient of the noise
    levels before they add those of layers, as `fully_shard` does.
    """
    shares, plain = configs(precision=Precision.BF16)
    plain = replace(plain, ddp=DdpConfig(use_distributed_optimizer=False))
    found: dict[str, dict[str, Any]] = {}
    for name, config in {"shares": shares, "plain": plain, "layer": plain}.items():
        model = built(config)
        for layer in model.modules[0].decoder.layers if name == "layer" else ():
            layer.register_forward_pre_hook(_levels_of_a_layer)
        run_schedule(model.chunks, [item(config, (1, 4, 4), (2, 3, 3))], options=config.objective)
        found[name] = dict(named_weights(model.chunks[0]))
    mine = found.pop("shares")

    def same(rows: Any, weight: Any) -> bool:
        return torch.equal(rows.grad.flatten(), weight.main_grad.flatten()[rows_of(rows).part])

    different = {
        name: [weight for weight, rows in mine.items() if not same(rows, whole[weight])]
        for name, whole in found.items()
    }
    return {
        name: sorted(set().union(*on_all_ranks(lambda names=names: names)))
        for name, names in different.items()
    }


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(one.view_as(one) for one in given)

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients


def _levels_of_a_layer(_: Any, given: tuple[Any, Any]) -> tuple[Any, Any]:
    hidden, conditions = given
    timestep = conditions.timestep
    t_emb, adaln_shift = _Same.apply(timestep.t_emb_ND, timestep.adaln_shift_NX)  # type: ignore[misc]
    timestep = replace(timestep, t_emb_ND=t_emb, adaln_shift_NX=adaln_shift)
    return hidden, replace(conditions, timestep=timestep)
