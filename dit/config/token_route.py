"""Layers that see a part of the tokens in training: token routing (TREAD, arXiv:2501.04765)."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Self

from dit.config.checks import Rule

if TYPE_CHECKING:
    from dit.config.model import ModelConfig

SHORT_SAMPLE = 512
"""Tokens of a sample below which routing has been seen to harm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRoute:
    """Layers `first` to `last` see `kept` of each run of `run` neighbouring tokens.

    As many of each run, so that each piece of whole runs keeps the same share, whichever rank
    holds it. The published method draws the subset from all tokens of a sample.
    """

    first: int  # layer, counted from 0 over all stacks
    last: int  # layer, likewise; it is in the route
    run: int
    kept: int

    @classmethod
    def of_rate(cls, rate: float, *, first: int, last: int) -> Self:
        """With the shortest run of which the share `rate` is a whole number of tokens."""
        share = Fraction(repr(float(rate)))
        run = share.denominator
        return cls(first=first, last=last, run=run, kept=run - share.numerator)

    def rows(self, rows: int) -> int:
        """Those that are kept of whole runs."""
        return rows // self.run * self.kept

    def tokens(self, real: int) -> int:
        """Real tokens that are kept of a sample; its last run may be filled up with padding."""
        return self.rows(real) + min(real % self.run, self.kept)

    def holds(self, layer: int) -> bool:
        """Whether what goes into `layer` is a part of the tokens, and what comes before, too."""
        return self.first < layer <= self.last

    def parts(self, first: int, stop: int) -> list[tuple[int, int, bool]]:
        """Layers [first, stop) as parts [first, stop) that are in the route or not."""
        inside = [border for border in (self.first, self.last + 1) if first < border < stop]
        borders = pairwise([first, *inside, stop])
        return [(a, b, self.first <= a <= self.last) for a, b in borders]


def route_rules(model: ModelConfig) -> list[Rule]:
    """Rules of the keys by themselves; `RunConfig` knows the multiple of samples."""
    first, last, rate, most = model.route_from, model.route_to, model.route_rate, model.all_layers
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
            0 <= first <= last < most,
            f"route_from={first} and route_to={last} must be layers, the first not behind the last,"
            f" counted from 0 to {most - 1}",
        ),
    ]
