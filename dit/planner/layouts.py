"""Every layout of a number of devices: its memory and the time of a step, or why it fails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from dit.config import ContextComm, Problems, Recompute, RunConfig
from dit.device_specs import Device
from dit.models.cost import Memory, memory
from dit.planner.efficiency import Efficiency
from dit.planner.times import PackLoad, Times, times
from dit.planner.traffic import CheckpointBytes, Traffic, checkpoint_bytes, traffic
from dit.progress import Track, no_progress, tracked

_RECOMPUTE = tuple(one for one in Recompute if one is not Recompute.AUTO)
BATCHES = (1, 2, 4, 8)
"""Batches that are compared, in those of the run."""
_MOST_TENSOR, _MOST_CONTEXT, _MOST_STAGES, _MOST_VIRTUAL = 8, 64, 64, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLayout:
    """How a run is spread over the devices."""

    tensor: int
    context: int
    pipeline: int
    virtual: int
    """Groups of layers on each stage."""
    data: int
    recompute: Recompute

    def __str__(self) -> str:
        stages = f"PP {self.pipeline}" + (f" x {self.virtual}" if self.virtual > 1 else "")
        return (
            f"TP {self.tensor} CP {self.context} {stages} DP {self.data},"
            f" recompute {self.recompute}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutPlan:
    """A layout that fits, with its expected memory, traffic and speed."""

    layout: ParallelLayout
    memory: Memory
    traffic: Traffic
    times: Times
    checkpoint: CheckpointBytes
    tflops: float
    """Model TFLOP/s of one device."""
    mfu: float
    """Part of the device's peak."""
    tokens_per_s: float
    """Real tokens a second, all devices together."""

    @property
    def bubble(self) -> float:
        """The part of the step in which stages wait for others."""
        return self.times.bubble / self.times.step


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """A layout that does not work."""

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
    """The layouts that fit, the fastest first, and those that do not; `track` counts layouts."""
    good: list[LayoutPlan] = []
    bad: list[Refusal] = []
    for layout in tracked([*_layouts(world_size)], "planning layouts", track):
        try:
            on_layout = _on_layout(config, layout)
            plan = _plan(
                on_layout, layout, load, world_size=world_size, device=device, efficiency=efficiency
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
    return sorted(good, key=lambda plan: plan.times.step), bad


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlan:
    """The fastest layout with so many packs in a step."""

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
    """The batch of the run and `BATCHES` times as many packs, each where a layout fits."""
    found = list[BatchPlan]()
    for times_ in tracked(BATCHES, "planning batches", track):
        packs = times_ * config.train.global_batch_size
        larger = replace(config, train=replace(config.train, global_batch_size=packs))
        good, _ = plans(larger, load, world_size=world_size, device=device, efficiency=efficiency)
        found += [BatchPlan(packs=packs, best=one) for one in good[:1]]
    return found


def _layouts(world_size: int) -> Iterator[ParallelLayout]:
    sizes = (_powers(n) for n in (_MOST_TENSOR, _MOST_CONTEXT, _MOST_STAGES))
    for tensor, context, pipeline in product(*sizes):
        data, rest = divmod(world_size, tensor * context * pipeline)
        if data and not rest:
            groups = _powers(_MOST_VIRTUAL if pipeline > 1 else 1)
            for virtual, recompute in product(groups, _RECOMPUTE):
                yield ParallelLayout(
                    tensor=tensor,
                    context=context,
                    pipeline=pipeline,
                    virtual=virtual,
                    data=data,
                    recompute=recompute,
                )


def _powers(most: int) -> list[int]:
    return [2**n for n in range(most.bit_length())]


def _on_layout(config: RunConfig, layout: ParallelLayout) -> RunConfig:
    """The configuration of the run on this layout.

    Raises:
        Problems: a rule of the configuration forbids it.
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
    return replace(config, model=model)


def _plan(
    config: RunConfig,
    layout: ParallelLayout,
    load: PackLoad,
    *,
    world_size: int,
    device: Device,
    efficiency: Efficiency,
) -> LayoutPlan:
    batch = config.train.global_batch_size
    expected = times(config, load, world_size=world_size, device=device, efficiency=efficiency)
    rate = 3 * load.flops * batch / expected.step / world_size
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
