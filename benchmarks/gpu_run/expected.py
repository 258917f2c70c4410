"""What the planner expects of a step on one device, and the pack that fits into its memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

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
    efficiency = _attention_here(config)
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
    asked, room = config.dataset.task_encoder_seq_length, USABLE * (device_memory or math.inf)
    multiple = config.dataset.sample_multiple
    need = memory(config, world_size=1).total
    if need <= room:
        return config, ""
    smaller = [_with_pack(config, asked * part // 4 // multiple * multiple) for part in (3, 2, 1)]
    fits = (one for one in smaller if memory(one, world_size=1).total <= room)
    chosen = next(fits, smaller[-1])
    tokens = chosen.dataset.task_encoder_seq_length
    return chosen, (
        f"packs of {tokens:,} tokens, for {asked:,} need about {need / 2**30:.0f} GiB of"
        f" {room / 2**30:.0f}"
    )


def _with_pack(config: RunConfig, tokens: int) -> RunConfig:
    return replace(config, dataset=replace(config.dataset, task_encoder_seq_length=tokens))


def _attention_here(config: RunConfig) -> Efficiency:
    """By the kernel that a run without a timing takes here."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    return efficiency_with(planned_backend(config, capability))
