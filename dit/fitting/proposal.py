"""Chooses the run that fits a corpus, given the minutes and the seconds of a step.

1. drafts    for each network: tokens in a sample, length of a pack, samples in a step
2. choose    the largest network that sees every sample often enough; else the smallest
3. warnings  what the run is too short for
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dit.fitting.corpus import Corpus
from dit.fitting.rules import (
    FEWEST_PASSES,
    FEWEST_SAMPLES,
    NAMED,
    NAMED_FROM,
    ON_CPU,
    ON_GPU,
    PART_TRAINING,
    SMALL,
    WANTED_PASSES,
    Optimization,
    Size,
)

_PATCHES = (4, 2, 1)
_MULTIPLES = (16, 8, 4, 2, 1)  # to which samples are padded


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A proposed run without its number of steps."""

    size: Size
    by: Optimization
    patch: int
    tokens: float
    """Mean number of tokens in a sample, padding included."""
    multiple: int
    capacity: int
    """Capacity of a pack in tokens."""

    @property
    def samples(self) -> float:
        """Mean number of samples in a pack."""
        return self.capacity / self.tokens


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A proposed run: steps, time, passes over the samples, and warnings."""

    draft: Draft
    steps: int
    passes: float
    """Number of passes over the training samples (epochs)."""
    minutes: float
    """Minutes to expect, with validations and checkpoints."""
    seconds: float
    """Seconds of a step."""
    why: str
    """Reason for the size of the network, as a phrase."""
    warnings: tuple[str, ...]


Seconds = Callable[[Draft], float]
"""Function from a draft to the seconds of one step."""


def drafts(corpus: Corpus, *, gpu: bool) -> list[Draft]:
    """Runs with the network sizes `NAMED` (`gpu`) or `SMALL` (CPU), the smallest first."""
    by, sizes = (ON_GPU, NAMED) if gpu else (ON_CPU, SMALL)
    fitting = [p for p in _PATCHES if corpus.divides(p)]
    tokens = {p: corpus.mean_length(p) for p in fitting}
    patch = next((p for p in fitting if tokens[p] >= by.fewest_tokens), 1)
    lengths = corpus.lengths(patch)
    divisor = math.gcd(*lengths)
    multiple = next(m for m in _MULTIPLES if divisor % m == 0)
    samples = min(by.samples, max(16, corpus.samples))
    wanted = min(by.tokens, samples * tokens[patch])
    capacity = max(max(lengths), int(wanted)) // multiple * multiple
    return [
        Draft(
            size=size,
            by=by,
            patch=patch,
            tokens=tokens[patch],
            multiple=multiple,
            capacity=capacity,
        )
        for size in sizes
    ]


def choose(
    corpus: Corpus, ladder: Sequence[Draft], *, minutes: float, seconds: Seconds
) -> Proposal:
    """The run of the largest network that makes `WANTED_PASSES` passes in `minutes`.

    If no network makes as many, it is the run of the smallest.

    `seconds` measures networks of the `ladder`. A step of a small network tells little about a
    larger network, because much of its time does not grow with the width. A network that is too
    slow rules out all larger networks, so the ladder is bisected: of five networks, at most three
    are measured, and a network larger than the middle only if the middle is fast enough.
    """
    found: dict[int, tuple[int, float]] = {}
    below, above = -1, len(ladder)  # the largest that is fast enough, the smallest that is not
    while above - below > 1:
        middle = (below + above) // 2
        taken = seconds(ladder[middle])
        steps = _steps(minutes, taken)
        found[middle] = steps, taken
        if _passes(corpus, ladder[middle], steps) >= WANTED_PASSES:
            below = middle
        else:
            above = middle
    enough, number = below >= 0, max(below, 0)
    draft, (steps, taken) = ladder[number], found[number]
    why = (
        "the largest that sees each sample 140 times in this time"
        if enough
        else "the smallest; in this time it sees each sample less than 140 times"
    )
    return propose(corpus, draft, steps=steps, seconds=taken, why=why)


def by_samples(corpus: Corpus, ladder: Sequence[Draft], *, seconds: Seconds) -> Proposal:
    """The run of the network that suits a corpus of this size, with `WANTED_PASSES` passes."""
    number = max(i for i, least in enumerate(NAMED_FROM) if corpus.samples >= least)
    draft = ladder[number]
    steps = math.ceil(WANTED_PASSES * corpus.samples / draft.samples)
    why = f"the size for {corpus.samples:,} samples (a rule of thumb, not measured)"
    return propose(corpus, draft, steps=steps, seconds=seconds(draft), why=why)


def propose(corpus: Corpus, draft: Draft, *, steps: int, seconds: float, why: str) -> Proposal:
    passes = _passes(corpus, draft, steps)
    return Proposal(
        draft=draft,
        steps=steps,
        passes=passes,
        minutes=steps * seconds / 60 / PART_TRAINING,
        seconds=seconds,
        why=why,
        warnings=tuple(warnings(corpus, passes=passes)),
    )


def warnings(corpus: Corpus, *, passes: float) -> list[str]:
    """Sentences about results that would need more than `passes` over the corpus."""
    seen, needed = passes * corpus.samples, ""
    if passes < WANTED_PASSES:
        minutes = WANTED_PASSES / max(passes, 1e-9)
        needed = f"; {minutes:.1f} times as many minutes would be {WANTED_PASSES} passes"
    if corpus.own_captions:
        if passes < FEWEST_PASSES:
            return [
                f"{passes:.0f} passes over pictures with captions of their own are too few for"
                f" recognisable results: after 56, 9 of 100 captions gave their picture{needed}"
            ]
        if passes < WANTED_PASSES:
            return [f"many captions will give a wrong picture after {passes:.0f} passes{needed}"]
    elif seen < FEWEST_SAMPLES:
        return [
            f"{seen:,.0f} samples in all are too few for recognisable results: digits need"
            f" {FEWEST_SAMPLES:,}{needed}"
        ]
    return []


def _steps(minutes: float, seconds: float) -> int:
    return max(1, int(minutes * 60 * PART_TRAINING / seconds))


def _passes(corpus: Corpus, draft: Draft, steps: int) -> float:
    return steps * draft.samples / corpus.samples
