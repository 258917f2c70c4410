"""Marks on weights by which Megatron-Core knows what tensor ranks share."""

from __future__ import annotations

from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn


def mark_split(weight: nn.Parameter, *, axis: int) -> None:
    """Tells Megatron-Core that each tensor rank has its own part of a weight.

    Without the marks the norm of the gradient counts one part instead of all. Megatron-Core's
    layers set them while they initialise their weights, which `init.initialise` does here instead.
    """
    marks = {"tensor_model_parallel": True, "partition_dim": axis, "partition_stride": 1}
    for name, value in marks.items():
        setattr(weight, name, value)


def sees_part_of_tokens(module: nn.Module, config: TransformerConfig) -> None:
    """Marks replicated weights whose gradients Megatron must sum under sequence parallelism."""
    for parameter in module.parameters(recurse=False):
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
