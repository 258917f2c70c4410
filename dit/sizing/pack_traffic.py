"""Bytes that data-parallel ranks send for each pack with fully sharded weights (FSDP)."""

from __future__ import annotations

from dataclasses import dataclass

from dit.config import RunConfig
from dit.sizing.memory import (
    parameter_count,
    parameters_here,
    summed_size,
    trained_count,
    trained_here,
    weight_bytes,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackTraffic:
    """Bytes that a device sends for each pack with `ddp.sharding=weights`, by ring collectives."""

    forward: float
    """All-gather of weights for the forward pass."""
    backward: float
    """All-gather of weights for the backward pass; 0 without `ddp.reshard_after_forward`."""
    gradients: float
    """Reduce-scatter of gradients; `ddp.reduce_each_pack` decides for which packs."""

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.gradients


def pack_traffic(config: RunConfig, *, shards: int) -> PackTraffic:
    """Bytes that a device sends for each pack if `shards` ranks share every weight (FSDP)."""
    others = (shards - 1) / shards
    weights = others * weight_bytes(config)
    gradients = others * trained_here(config) * summed_size(config.model, config.ddp)
    again = weights * config.ddp.reshard_after_forward
    return PackTraffic(forward=weights, backward=again, gradients=gradients)


def break_even_tokens(config: RunConfig, *, shards: int, flops: float, bytes_per_s: float) -> float:
    """Number of tokens of a pack whose matrix products take as long as its FSDP traffic.

    Matrix products count two FLOPs for each weight and token in the forward pass, two for gradients
    of inputs, and two for gradients of trained weights, without recomputation. A device computes
    `flops` a second and sends `bytes_per_s`.
    """
    model = config.model
    trained = trained_count(config) / parameter_count(model)
    a_token = 2 * (2 + trained) * parameters_here(model) / model.context_parallel_size
    return pack_traffic(config, shards=shards).total / bytes_per_s * flops / a_token
