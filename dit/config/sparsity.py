"""Methods that compute less: layers skip tokens of a sample, or attention skips keys.

1. TokenShare      a fixed number of each run of neighbouring tokens: two noise levels in a sample
2. TokenRoute      such a share for some layers: token routing (TREAD, arXiv:2501.04765)
3. SparseSchedule  the fraction of a sample's cubes that each cube attends to, by training step:
                   Video Sparse Attention (VSA, arXiv:2505.13389), with the schedule of FastVideo's
                   training
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Self

from dit.config.checks import Rule

SHORT_SAMPLE = 512
"""Number of tokens in a sample below which token routing is known to do harm."""
CUBE = 4
"""Side of a cube, in tokens: its frames, rows and columns."""
CUBE_TOKENS = CUBE**3
WHOLE = Fraction(1)


def _exact(number: float) -> Fraction:
    """`number` as a fraction of its decimal digits: 0.1 is a tenth."""
    return Fraction(repr(float(number)))


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenShare:
    """A fraction of a sample's tokens: `kept` of each `run` neighbouring tokens.

    The same number of each run is kept, so that each rank's shard of whole runs keeps the same
    fraction. Published methods draw a subset of all tokens of a sample.
    """

    run: int
    kept: int

    @classmethod
    def of_rate(cls, rate: float, **more: int) -> Self:
        """The share that leaves out the fraction `rate`, with the shortest possible run."""
        share = _exact(rate)
        run = share.denominator
        return cls(run=run, kept=run - share.numerator, **more)

    def rows(self, rows: int) -> int:
        """Number of tokens that are kept of `rows` tokens, counting only whole runs."""
        return rows // self.run * self.kept

    def tokens(self, real: int) -> int:
        """Number of a sample's `real` tokens that are kept; padding may complete its last run."""
        return self.rows(real) + min(real % self.run, self.kept)


def trained_as(tokens: int, text: int, share: TokenShare | None) -> list[tuple[int, int]]:
    """(latent tokens, text tokens) of the samples into which training divides one sample.

    With two noise levels (`share`) there are two samples, each with the whole text; a sample with
    fewer tokens than a run stays whole.
    """
    if share is None or tokens < share.run:
        return [(tokens, text)]
    first = share.tokens(tokens)
    return [(first, text), (tokens - first, text)]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRoute(TokenShare):
    """Token routing: only a share of the tokens passes through layers `first` to `last`."""

    first: int  # layer, counted from 0 over all stacks
    last: int  # layer, likewise; it is in the route

    def holds(self, layer: int) -> bool:
        """Whether `layer` and the layer before it both process only a share of the tokens."""
        return self.first < layer <= self.last

    def parts(self, first: int, stop: int) -> list[tuple[int, int, bool]]:
        """Layers [first, stop) as ranges (first, stop, whether inside the route)."""
        inside = [border for border in (self.first, self.last + 1) if first < border < stop]
        borders = pairwise([first, *inside, stop])
        return [(a, b, self.first <= a <= self.last) for a, b in borders]


def route_rules(first: int | None, last: int | None, rate: float, *, layers: int) -> list[Rule]:
    """Rules about route_from (`first`), route_to (`last`) and route_rate (`rate`).

    The network has `layers` layers. Other keys of the configuration are not looked at.
    """
    rules = [
        (
            0 <= rate < 1,
            f"route_rate={rate} must lie in [0, 1): the share of the tokens that layers leave out",
        ),
        (
            (first is None) == (last is None),
            f"route_from={first} and route_to={last} are the first and the last layer of a route;"
            " set both, or neither",
        ),
    ]
    if first is None or last is None:
        return rules
    return [
        *rules,
        (
            0 <= first <= last < layers,
            f"route_from={first} and route_to={last} must be layers, the first not behind the last,"
            f" counted from 0 to {layers - 1}",
        ),
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseSchedule:
    """Fraction of a sample's cubes that attention keeps, which falls during training.

    It starts at 1 and falls by `step` after each `interval` training steps, down to `last`.
    """

    last: Fraction
    step: Fraction
    interval: int

    @classmethod
    def of(cls, last: float, *, step: float, interval: int) -> Self:
        return cls(last=_exact(last), step=_exact(step), interval=interval)

    def at(self, step: int) -> Fraction:
        """Fraction of kept cubes at training step `step`, counted from 1.

        FastVideo's sparsity is 1 minus this fraction. If 1 - `last` is not a multiple of
        `self.step`, FastVideo stops above `last`, while this schedule reaches it.
        """
        return max(self.last, WHOLE - step // self.interval * self.step)


def attended_cubes(share: Fraction, cubes: int) -> int:
    """Number of cubes that each of a sample's `cubes` cubes attends to: at least one."""
    return max(1, math.ceil(share * cubes))
