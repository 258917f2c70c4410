"""Parts of the tokens of a sample, and the layers that see one in training.

Token routing is that of TREAD (arXiv:2501.04765).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Self

from dit.config.checks import Rule

if TYPE_CHECKING:
    from dit.config.model import ModelConfig
    from dit.config.run import RunConfig

SHORT_SAMPLE = 512
"""Tokens of a sample below which routing has been seen to harm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenShare:
    """`kept` of each run of `run` neighbouring tokens.

    As many of each run, so that each piece of whole runs keeps the same share, whichever rank
    holds it. Published methods draw a subset from all tokens of a sample.
    """

    run: int
    kept: int

    @classmethod
    def of_rate(cls, rate: float, **more: int) -> Self:
        """Without the share `rate`, in the shortest run of which it is a whole number of tokens."""
        share = Fraction(repr(float(rate)))
        run = share.denominator
        return cls(run=run, kept=run - share.numerator, **more)

    def rows(self, rows: int) -> int:
        """Those that are kept of whole runs."""
        return rows // self.run * self.kept

    def tokens(self, real: int) -> int:
        """Real tokens that are kept of a sample; its last run may be filled up with padding."""
        return self.rows(real) + min(real % self.run, self.kept)


def trained_as(tokens: int, text: int, share: TokenShare | None) -> list[tuple[int, int]]:
    """The samples that one of `tokens` and `text` rows is trained as, with a level for each share.

    Each has all of the text; a sample of fewer tokens than a run stays whole.
    """
    if share is None or tokens < share.run:
        return [(tokens, text)]
    first = share.tokens(tokens)
    return [(first, text), (tokens - first, text)]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRoute(TokenShare):
    """Layers `first` to `last` see the tokens that are kept, the others wait."""

    first: int  # layer, counted from 0 over all stacks
    last: int  # layer, likewise; it is in the route

    def holds(self, layer: int) -> bool:
        """Whether what goes into `layer` is a part of the tokens, and what comes before, too."""
        return self.first < layer <= self.last

    def parts(self, first: int, stop: int) -> list[tuple[int, int, bool]]:
        """Layers [first, stop) as parts [first, stop) that are in the route or not."""
        inside = [border for border in (self.first, self.last + 1) if first < border < stop]
        borders = pairwise([first, *inside, stop])
        return [(a, b, self.first <= a <= self.last) for a, b in borders]


def route_rules(model: ModelConfig) -> list[Rule]:
    """Rules of the keys of a route by themselves."""
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


def share_rules(run: RunConfig, parts: int) -> list[Rule]:
    """Each of so many pieces of a sample is whole runs of neighbours, of both keys together."""
    model, objective, multiple = run.model, run.objective, run.dataset.sample_multiple
    rules = [
        (
            objective.level_share is None or not model.attends_to_padding,
            f"objective.second_level_rate={objective.second_level_rate} parts the tokens of a"
            f" sample, and model.family={model.family} attends to its padding; set it to 0",
        ),
        (
            objective.level_share is None or model.whole_samples_by is None,
            f"objective.second_level_rate={objective.second_level_rate} parts the tokens of a"
            f" sample, and {model.whole_samples_by} needs all of them together; set it to 0",
        ),
    ]
    pieces = f" in each of {parts} pieces of a sample" if parts > 1 else ""
    for key, rate, share in (
        ("model.route_rate", model.route_rate, model.token_route),
        ("objective.second_level_rate", objective.second_level_rate, objective.level_share),
    ):
        if share is None:
            continue
        parts *= share.run  # pieces of the parts of a sample are whole runs of the route
        rules.append(
            (
                multiple % parts == 0,
                f"{key}={rate} sets {share.run - share.kept} of {share.run} neighbouring tokens"
                f" apart{pieces}, and dataset.sample_multiple={multiple} does not divide by"
                f" {parts}; use dataset.sample_multiple={math.lcm(multiple, parts)} from the start"
                " of the run, or a rate of fewer digits such as 0.5",
            )
        )
    return rules
