"""Step 1 of a run's start: adjusts the configuration to the devices."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from dit.config import Recompute, RunConfig
from dit.distributed.collective_errors import on_all_ranks
from dit.distributed.process_groups import device_memory, process_groups
from dit.train.opening.checks import check_settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The configuration adjusted to the devices, and the process groups."""

    config: RunConfig
    groups: ProcessGroupCollection
    timed: bool  # whether kernels of attention may be timed
    notes: tuple[str, ...]


def fit(config: RunConfig, *, timed: bool) -> Machine:
    """Checks a configuration and adjusts it to the devices; all ranks call it.

    `auto` recomputation is resolved, and torch made deterministic if configured. `timed` lets
    attention kernels be timed.

    Raises:
        ValueError: the network, the samples or the sampler cannot satisfy a setting.
    """
    if config.train.deterministic:
        _be_deterministic()
    check_settings(config)
    config, notes = with_recomputation(config)
    return Machine(config=config, groups=process_groups(), timed=timed, notes=notes)


def _be_deterministic() -> None:
    torch.use_deterministic_algorithms(True)
    # Torch would fill each empty tensor, which costs time; no code here reads unwritten memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"  # Transformer Engine's attention


def with_recomputation(config: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """Resolves `recompute_granularity=auto` for the smallest device; also returns log lines."""
    if config.model.recompute_granularity is not Recompute.AUTO:
        return config, ()
    from dit.sizing.recomputation import choose_recomputation

    known = [size for size in on_all_ranks(device_memory) if size is not None]
    size = min(known, default=None)  # ranks that share a layer must recompute alike
    chosen = choose_recomputation(config, world_size=dist.get_world_size(), device_memory=size)
    return chosen.config, (f"recomputation {chosen.reason}",)
