"""What the planner expects of a step on one device, and the pack that fits into its memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from dit.config import RunConfig
from dit.device_specs import Device, device_named
from dit.models.attention.fit import planned_backend
from dit.models.cost import memory
from dit.models.recomputation import USABLE
from dit.planner.efficiency import Efficiency, efficiency_with
from dit.planner.times import Times, expected_load, times


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedStep:
    """By arithmetic."""

    times: Times
    mfu: float
    """Of the data sheet's dense bfloat16."""
    memory: int
    """Bytes."""


def expected_step(config: RunConfig, device: Device, efficiency: Efficiency) -> ExpectedStep:
    """Of full packs of the samples in `dataset.mock_samples`."""
    load = expected_load(config, fill=1.0)
    found = times(config, load, world_size=1, device=device, efficiency=efficiency)
    flops = 3 * load.flops * config.train.global_batch_size
    return ExpectedStep(
        times=found,
        mfu=flops / found.step / device.flops,
        memory=memory(config, world_size=1).total,
    )


def expected_here(config: RunConfig, name: str) -> dict[str, Any] | None:
    """For the results of a part on the device of this name; None where its rates are not known."""
    device = device_named(name)
    if device is None:
        return None
    import torch  # late: expected_step.py needs none

    # By the kernel of attention that a run without a timing takes here.
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    efficiency = efficiency_with(planned_backend(config, capability))
    step = expected_step(config, device, efficiency)
    return {
        "step_s": step.times.step,
        "mfu": step.mfu,
        "by_kind_s": step.times.by_kind,
        "memory_gb": step.memory / 1e9,
        "assumed": efficiency.of(device),
    }


def with_fitting_pack(config: RunConfig, device_memory: float | None) -> tuple[RunConfig, str]:
    """The run with as many quarters of its packs as fit into a device, and why, if not all do.

    `device_memory` is in bytes; None, a CPU, takes all. A quarter is the least, fitting or not.
    """
    packs, room = config.dataset, USABLE * (device_memory or math.inf)
    asked, multiple = packs.task_encoder_seq_length, packs.sample_multiple
    need, fitting = memory(config, world_size=1).total, config
    for quarters in (3, 2, 1):
        if memory(fitting, world_size=1).total > room:
            tokens = asked * quarters // 4 // multiple * multiple
            fitting = replace(config, dataset=replace(packs, task_encoder_seq_length=tokens))
    if fitting is config:
        return config, ""
    return fitting, (
        f"packs of {fitting.dataset.task_encoder_seq_length:,} tokens, for {asked:,} need about"
        f" {need / 2**30:.0f} GiB of {room / 2**30:.0f}"
    )
