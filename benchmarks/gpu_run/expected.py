"""What the planner expects of a step on one device."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from dit.config import Implementation, RunConfig
from dit.distributed.device_specs import Device, device_named
from dit.models.cost import memory
from dit.planner.efficiency import FUSED, PLAIN, Efficiency
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


def _attention_here(config: RunConfig) -> Efficiency:
    """FlashAttention 3 or Transformer Engine's, if one of them is used."""
    engine = config.model.transformer_impl is Implementation.TRANSFORMER_ENGINE
    return FUSED if engine or find_spec("flash_attn_interface") else PLAIN
