"""Random generators as a function of (seed, step, pack); no state outlives a step."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch


class Draw(IntEnum):
    """Purpose of a stream of random numbers; the streams of one pack are independent."""

    NOISE = 0
    LEVELS = 1
    TEXT_DROPOUT = 2
    VALIDATION_NOISE = 3


def pack_rng(
    *, seed: int, step: int, pack_id: int, device: torch.device, draw: Draw = Draw.NOISE
) -> torch.Generator:
    """Generator of one pack at one step: the same on every layout and rank.

    Torch's CPU generator keeps only the low 32 bits of a seed, so two of 2**32 streams may coincide
    there. On CUDA all 64 bits count.
    """
    # The same children of (seed, step, pack_id) that SeedSequence.spawn would make.
    sequence = np.random.SeedSequence((seed, step, pack_id), spawn_key=(int(draw),))
    return torch.Generator(device).manual_seed(int(sequence.generate_state(1, np.uint64)[0]))
