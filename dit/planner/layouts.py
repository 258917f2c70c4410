"""Every layout of a number of devices, with its memory and time of a step, or why it fails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from dit.config import ContextComm, Problems, Recompute, RunConfig, Sharding
from dit.config.training import WHEN_GATHERED
from dit.device_specs import Device
from dit.planner.efficiency import Efficiency
from dit.planner.times import PackLoad, Times, times
from dit.planner.traffic import CheckpointBytes, Traffic, checkpoint_bytes, passes_before, traffic
from dit.progress import Track, no_progress, tracked
from dit.sizing.memory import Memory, memory
from dit.sizing.pack_traffic import break_even_tokens

_RECOMPUTE = tuple(one for one in Recompute if one is not Recompute.AUTO)
BATCHES = (1, 2, 4, 8)
"""Batch sizes to compare, as multiples of the run's."""
_MOST_TENSOR, _MOST_CONTEXT, _MOST_STAGES, _MOST_VIRTUAL = 8, 64, 64, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """One way to distribute a run over devices."""

    tensor: int
    context: int
    pipeline: int
    virtual: int
    """Number of virtual pipeline stages (groups of layers) per rank."""
    data: int
    recompute: Recompute
    sharding: Sharding = Sharding.OPTIMIZER
    copies: int = 1
    """Number of copies of the weights, each sharded by FSDP. With sharded optimizer states the
    run's keys decide the number of copies."""

    def __str__(self) -> str:
        stages = f"PP {self.pipeline}" + (f" x {self.virtual}" if self.virtual > 1 else "")
        return (
            f"TP {self.tensor} CP {self.context} {stages} DP {self.data},"
            f" recompute {self.recompute}, sharding {self.shared}"
        )

    @property
    def shared(self) -> str:
        """What data-parallel ranks shard, as text: `optimizer`, or for example `weights 8 x 2`.

        The numbers are those of the ranks that share a weight and, if above 1, of FSDP copies.
        """
        if self.sharding is Sharding.OPTIMIZER:
            return "optimizer"
        ranks = self.data * self.context // self.copies
        return f"weights {ranks}" + (f" x {self.copies}" if self.copies > 1 else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutPlan:
    """A layout that fits, with its expected memory, traffic and speed."""

    layout: ParallelLayout
    memory: Memory
    traffic: Traffic
    times: Times
    checkpoint: CheckpointBytes
    tflops: float
    """TFLOP/s per device, of operations that the model requires."""
    mfu: float
    """Model FLOP utilisation: `tflops` as a fraction of the device's peak."""
    tokens_per_s: float
    """Tokens per second over all devices, padding excluded."""

    @property
    def bubble(self) -> float:
        """Fraction of the step in which pipeline stages wait for others."""
        return self.times.bubble / self.times.step


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """A layout that does not work, and why."""

    layout: ParallelLayout
    why: str


def plans(
    config: RunConfig,
    load: PackLoad,
    *,
    world_size: int,
    device: Device,
    efficiency: Efficiency,
    track: Track = no_progress,
) -> tuple[list[LayoutPlan], list[Refusal]]:
    """(layouts that fit, the fastest first; layouts that do not) for `world_size` devices.

    `track` reports the number of layouts that are done. With adapters, layouts with FSDP come after
    all others: to gather the frozen base for each pack costs more than sharding it saves.
    """
    good: list[LayoutPlan] = []
    bad: list[Refusal] = []
    for layout in tracked([*_layouts(world_size, device.together)], "planning layouts", track):
        try:
            plan = plan_of(
                config, layout, load, world_size=world_size, device=device, efficiency=efficiency
            )
        except Problems as error:
            bad.append(Refusal(layout=layout, why="; ".join(error.problems)))
            continue
        room = device.memory * efficiency.memory
        if plan.memory.total <= room:
            good.append(plan)
        else:
            why = f"needs {plan.memory.total / 1e9:.0f} GB of {room / 1e9:.0f} GB"
            bad.append(Refusal(layout=layout, why=why))
    last = Sharding.WEIGHTS if config.lora.enabled else None
    return sorted(good, key=lambda one: (one.layout.sharding is last, one.times.step)), bad


def recommended(good: list[LayoutPlan]) -> str:
    """A line that recommends the `ddp.sharding` of the first plan in `good`.

    It names the first plan of each sharding. Empty if `good` is.
    """
    best: dict[Sharding, LayoutPlan] = {}
    for plan in good:
        best.setdefault(plan.layout.sharding, plan)
    if not best:
        return ""
    said = [f"{one}: {plan.times.step:.3g} s a step, {plan.layout}" for one, plan in best.items()]
    said += [f"{one}: no layout fits" for one in Sharding if one not in best]
    return f"Recommended is ddp.sharding={'; '.join(said)}"


def break_even(
    config: RunConfig, *, world_size: int, device: Device, efficiency: Efficiency
) -> str:
    """A line with the tokens that a pack needs to hide FSDP's traffic on each kind of link."""
    links = {"inside of a server": (device.link, device.together)}
    if world_size > device.together:
        links["between servers"] = (device.network, world_size)
    tokens = {
        name: break_even_tokens(
            config,
            shards=min(shards, world_size),
            flops=device.flops * efficiency.matrices,
            bytes_per_s=rate * efficiency.links,
        )
        for name, (rate, shards) in links.items()
    }
    said = " and ".join(f"{count:,.0f} {name}" for name, count in tokens.items())
    return f"Tokens of a pack whose products hide the traffic of sharded weights: {said}"


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlan:
    """The fastest layout for a global batch size."""

    packs: int
    best: LayoutPlan


def batch_plans(
    config: RunConfig,
    load: PackLoad,
    *,
    world_size: int,
    device: Device,
    efficiency: Efficiency,
    track: Track = no_progress,
) -> list[BatchPlan]:
    """The fastest plan for each multiple in `BATCHES` of the run's batch, if a layout fits."""
    found = list[BatchPlan]()
    for times_ in tracked(BATCHES, "planning batches", track):
        packs = times_ * config.train.global_batch_size
        larger = replace(config, train=replace(config.train, global_batch_size=packs))
        good, _ = plans(larger, load, world_size=world_size, device=device, efficiency=efficiency)
        found += [BatchPlan(packs=packs, best=one) for one in good[:1]]
    return found


def _layouts(world_size: int, together: int) -> Iterator[ParallelLayout]:
    sizes = (_powers(n) for n in (_MOST_TENSOR, _MOST_CONTEXT, _MOST_STAGES))
    for tensor, context, pipeline in product(*sizes):
        data, rest = divmod(world_size, tensor * context * pipeline)
        if data and not rest:
            groups = _powers(_MOST_VIRTUAL if pipeline > 1 else 1)
            copies = _copies(data * context, together // tensor)
            for virtual, recompute in product(groups, _RECOMPUTE):
                whole = ParallelLayout(
                    tensor=tensor,
                    context=context,
                    pipeline=pipeline,
                    virtual=virtual,
                    data=data,
                    recompute=recompute,
                )
                yield whole
                for count in copies if virtual == 1 else ():
                    yield replace(whole, sharding=Sharding.WEIGHTS, copies=count)


def _copies(ranks: int, near: int) -> list[int]:
    """Numbers of copies of sharded weights to try for `ranks` ranks, `near` of them in a server.

    They are one, and one for each server if there are several; none for one rank, which has nothing
    to shard.
    """
    if ranks == 1:
        return []
    return [1, ranks // near] if near > 1 and ranks > near and ranks % near == 0 else [1]


def _powers(most: int) -> list[int]:
    return [2**n for n in range(most.bit_length())]


def _on_layout(config: RunConfig, layout: ParallelLayout) -> RunConfig:
    """The configuration of the run on `layout`.

    Raises:
        Problems: a rule of the configuration forbids the layout.
    """
    full = layout.recompute is Recompute.FULL
    heads_divide = config.model.num_attention_heads % (layout.tensor * layout.context) == 0
    model = replace(
        config.model,
        cp_comm_type=ContextComm.A2A if heads_divide else ContextComm.ALL_GATHER,
        tensor_model_parallel_size=layout.tensor,
        sequence_parallel=layout.tensor > 1,
        context_parallel_size=layout.context,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
        recompute_granularity=layout.recompute,
        recompute_num_layers=config.model.recompute_num_layers if full else 1,
    )
    changes: dict[str, Any] = {"sharding": layout.sharding}
    if layout.sharding is Sharding.WEIGHTS:  # it overlaps by itself
        changes |= {"overlap_grad_reduce": False, "overlap_param_gather": False}
        changes["dp_replicate_size"] = layout.copies
    else:
        changes |= WHEN_GATHERED
    return replace(config, model=model, ddp=replace(config.ddp, **changes))


def plan_of(
    config: RunConfig,
    layout: ParallelLayout,
    load: PackLoad,
    *,
    world_size: int,
    device: Device,
    efficiency: Efficiency,
) -> LayoutPlan:
    """The plan of a run on `layout`, whether it fits or not.

    Raises:
        Problems: a rule of the configuration forbids the layout.
    """
    config = _on_layout(config, layout)
    batch = config.train.global_batch_size
    expected = times(config, load, world_size=world_size, device=device, efficiency=efficiency)
    passes = 3 * config.learning_passes + passes_before(config)
    rate = passes * load.flops * batch / expected.step / world_size
    return LayoutPlan(
        layout=layout,
        memory=memory(config, world_size=world_size),
        traffic=traffic(
            config, tokens=load.tokens, accumulated=batch // layout.data, replicas=layout.data
        ),
        times=expected,
        checkpoint=checkpoint_bytes(config, world_size=world_size),
        tflops=rate / 1e12,
        mfu=rate / device.flops,
        tokens_per_s=load.tokens * batch / expected.step,
    )
