"""Bytes of a checkpoint, and what each rank does with it (`dit/train/checkpoint`)."""

from __future__ import annotations

from dataclasses import dataclass

from dit.config import EmaKind, Precision, RunConfig
from dit.models.cost import parameter_count, parameters_here, trained_count, trained_here

_FLOAT32 = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointBytes:
    """Bytes; those of a rank are means, and no rank has more than those of one weight beyond."""

    whole: int
    share: float
    """What a rank writes, reads, and has in host memory meanwhile."""
    sent: float
    """What a rank sends at most when it saves: the state that it keeps."""
    received: int
    """What a rank takes when it loads: its weights, and the state that it keeps."""


def checkpoint_bytes(config: RunConfig, *, world_size: int) -> CheckpointBytes:
    """The bytes of a checkpoint of `config`, by arithmetic."""
    weight = 2 if config.model.precision is Precision.BF16 else _FLOAT32
    averaged = config.ema.kind is not EmaKind.NONE
    sharded = config.ddp.use_distributed_optimizer
    # Beside them the main parameters, which are the weights themselves in float32 alone.
    states = len(config.optimizer.states.names)
    state = _FLOAT32 * (states + (sharded or weight == 2) + averaged)
    trained, adapted = trained_count(config), config.lora.enabled
    # Beside adapters no other weight is stored, and of frozen weights no state.
    whole = (trained if adapted else parameter_count(config.model)) * weight + trained * state
    kept, trained_of_rank = trained * state / world_size, trained_here(config)
    here = trained_of_rank if adapted else parameters_here(config.model)
    return CheckpointBytes(
        whole=whole,
        share=whole / world_size,
        sent=kept if sharded else 0,
        received=round(here * weight + (kept if sharded else trained_of_rank * state)),
    )
