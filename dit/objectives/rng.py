"""Random numbers as a function of (seed, step, pack), with no state that outlives a step."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch


class Draw(IntEnum):
    """What a stream of random numbers is for. Streams of one pack are independent."""

    NOISE = 0
    LEVELS = 1
    TEXT_DROPOUT = 2
    VALIDATION_NOISE = 3


def pack_rng(
    *, seed: int, step: int, pack_id: int, device: torch.device, draw: Draw = Draw.NOISE
) -> torch.Generator:
    """Generator of one pack at one step: the same on every layout, wherever the pack falls.

    Torch's CPU generator keeps the low 32 bits of a seed, so two of 2**32 streams may coincide
    there; on CUDA all 64 bits count.
    """
    # The children of (seed, step, pack_id), as SeedSequence.spawn numbers them.
    sequence = np.random.SeedSequence((seed, step, pack_id), spawn_key=(int(draw),))
    return torch.Generator(device).manual_seed(int(sequence.generate_state(1, np.uint64)[0]))
