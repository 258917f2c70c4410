"""Step 4 of a run's start: builds the networks and optimizers, and chooses the attention kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from megatron.core.process_groups_config import ProcessGroupCollection

from dit.config import RunConfig, Sharding
from dit.distributed.data_parallel import ModelChunk
from dit.distributed.watchdog import heartbeat
from dit.train.attention_choice import with_attention
from dit.train.checkpoint.without_tensors import CRITIC
from dit.train.model_and_optimizer import ModelAndOptimizer, build_model_and_optimizer
from dit.train.opening.machine import Machine
from dit.train.opening.start import NETWORK, Start, Starts

if TYPE_CHECKING:
    from dit.train.checkpoint.adapters import AdapterStart


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """The networks of a run by name, with their first values."""

    config: RunConfig  # with the chosen attention kernel, which checkpoints store
    networks: Mapping[str, ModelAndOptimizer]
    teacher: Sequence[ModelChunk]  # of `distill.teacher`; empty if the key is not set
    notes: tuple[str, ...]


def build(machine: Machine, starts: Starts) -> Built:
    """Builds the networks of a run and chooses the attention kernel; all ranks call it.

    Raises:
        ValueError: a kernel cannot be used on this machine, or a base cannot be loaded.
    """
    # A resumed run keeps its kernel; a new run times kernels on samples as long as its data's.
    before = starts.networks[NETWORK].point.continued
    config, notes = with_attention(machine.config, timed=machine.timed, continued=before)
    heartbeat("build of the model")
    networks = _networks(config, machine.groups, starts)
    teacher = _teacher(config, machine.groups, starts.teacher)
    return Built(config=config, networks=networks, teacher=teacher, notes=tuple(notes))


def _networks(
    config: RunConfig, groups: ProcessGroupCollection, starts: Starts
) -> dict[str, ModelAndOptimizer]:
    found: dict[str, ModelAndOptimizer] = {}
    for name, start in starts.networks.items():
        own = config.of_critic if name == CRITIC else config
        found[name] = _built(own, groups, start, beside=found.get(NETWORK))
    return found


def _teacher(
    config: RunConfig, groups: ProcessGroupCollection, start: AdapterStart | None
) -> Sequence[ModelChunk]:
    if start is None:
        return ()
    from dit.train.distill.teacher import build_teacher

    return build_teacher(config, groups, start)


def _built(
    config: RunConfig,
    groups: ProcessGroupCollection,
    start: Start,
    *,
    beside: ModelAndOptimizer | None,
) -> ModelAndOptimizer:
    """Builds a network from its `start`; adapters may share the frozen weights of `beside`."""
    if (adapted := start.adapters) is None:
        return build_model_and_optimizer(config, groups, fill=start.fill)
    if beside is not None and config.ddp.sharding is not Sharding.WEIGHTS:
        return build_model_and_optimizer(
            config, groups, fill=start.fill, adapters=adapted.run.adapters, base=beside.modules
        )
    return build_model_and_optimizer(
        config,
        groups,
        fill=start.fill,
        adapters=adapted.run.adapters,
        frozen=adapted.frozen_shapes,
        load_base=partial(adapted.load_base, model=config.model, groups=groups),
    )
