"""The layers that a device recomputes in the backward pass to save memory.

With `model.recompute_granularity=auto` a device recomputes as few whole layers as its memory
requires (`block`). Recomputing attention alone saves nothing with a fused kernel: the kernel keeps
only queries, keys, values and the output, and the next linear keeps the output anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dit.config import ModelConfig, Recompute, RecomputeMethod, RunConfig
from dit.models.registry import network_spec
from dit.sizing.memory import memory

USABLE = 0.90
"""Usable fraction of a device's memory; libraries' buffers and fragmentation take the rest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recomputation:
    """The recomputation that `auto` chooses, and the reason."""

    config: RunConfig
    """The run's configuration with the chosen recomputation keys."""
    reason: str
    """The choice and its reason, as one line for the log."""


def choose_recomputation(
    config: RunConfig, *, world_size: int, device_memory: float | None
) -> Recomputation:
    """The least recomputation that fits a device of `device_memory` bytes; if none fits, the most.

    A `device_memory` of None stands for a CPU, which recomputes nothing.
    """
    choices = list(_choices(config))
    if device_memory is None:
        return Recomputation(config=choices[0], reason="auto: none on a CPU")
    room = USABLE * device_memory
    needs = ((one, memory(one, world_size=world_size).total) for one in choices)
    fitting = next(((one, need) for one, need in needs if need <= room), None)
    chosen = fitting[0] if fitting else choices[-1]
    need = memory(chosen, world_size=world_size).total
    return Recomputation(
        config=chosen,
        reason=f"auto: {_in_words(chosen.model)}; about {need / 2**30:.1f} GiB, which"
        f" {'fit' if fitting else 'do not fit'} into {USABLE:.0%} of {device_memory / 2**30:.1f}",
    )


def _choices(config: RunConfig) -> Iterator[RunConfig]:
    """Yields configurations that recompute more and more layers, so that each needs less memory.

    The last layer of a stage is never recomputed: backward begins with it, when no memory has been
    freed yet.
    """
    model = config.model
    stages = model.pipeline_model_parallel_size * model.virtual_stages
    layers = -(-network_spec(model).layers // stages)  # of the fullest stage

    none = {"recompute_granularity": Recompute.NONE, "recompute_num_layers": 1}
    yield replace(config, model=replace(model, **none))
    for number in range(1, layers):
        block = {"recompute_granularity": Recompute.FULL, "recompute_num_layers": number}
        block |= {"recompute_method": RecomputeMethod.BLOCK}
        yield replace(config, model=replace(model, **block))


def _in_words(model: ModelConfig) -> str:
    if model.recompute_granularity is Recompute.NONE:
        return "none"
    stages = model.pipeline_model_parallel_size * model.virtual_stages
    of = "each stage" if stages > 1 else f"{network_spec(model).layers}"
    return f"full, block, the first {model.recompute_num_layers} layers of {of}"
