"""The share of a sample that each of its cubes of tokens attends to in full, by training steps.

Video Sparse Attention (VSA, arXiv:2505.13389), with the schedule of FastVideo's training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Self

CUBE = 4
"""Frames, rows and columns of tokens in a cube."""
CUBE_TOKENS = CUBE**3
WHOLE = Fraction(1)


def _exact(number: float) -> Fraction:
    """The number as it is written: 0.1 is a tenth."""
    return Fraction(repr(float(number)))


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseSchedule:
    """From all cubes down to `last` of them, `step` less after each `interval` training steps."""

    last: Fraction
    step: Fraction
    interval: int

    @classmethod
    def of(cls, last: float, *, step: float, interval: int) -> Self:
        return cls(last=_exact(last), step=_exact(step), interval=interval)

    def at(self, step: int) -> Fraction:
        """The share at a training step, counted from 1; FastVideo's sparsity is 1 - this.

        Where 1 - `last` is no multiple of `step`, FastVideo stops before it, and this does not.
        """
        return max(self.last, WHOLE - step // self.interval * self.step)


def attended_cubes(share: Fraction, cubes: int) -> int:
    """How many of the cubes of a sample each of them attends to: at least one."""
    return max(1, math.ceil(share * cubes))
