"""Arithmetic of a pack that is ready for the model."""

from __future__ import annotations

from itertools import pairwise

import dit.models.dit.flops
from dit.batch import PackedBatch
from dit.config import ModelConfig


def pack_forward_flops(model: ModelConfig, batch: PackedBatch) -> int:
    """Floating-point operations of one forward pass, from the true geometry of the pack."""
    text = [b - a for a, b in pairwise(batch.text_starts)]
    return dit.models.dit.flops.forward_flops(model, tokens=batch.num_tokens, text=text)


def training_flops(model: ModelConfig, batch: PackedBatch) -> int:
    """Operations of a training step on a pack: the backward pass costs twice the forward one."""
    return 3 * pack_forward_flops(model, batch)
