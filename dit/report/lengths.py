"""Draws the histogram of the lengths of samples, summed over the metrics of a run."""

from __future__ import annotations

import math
from collections import Counter
from html import escape

from dit.report.charts import BOTTOM, HEIGHT, LEFT, LOG_SCALE, RIGHT, TOP, WIDTH, Axis, grid, number
from dit.report.reading import RunRecord

BIN = 2 ** (1 / 8)
"""Ratio of the ends of a bin; equal to that of dit/train/metrics/interval_metrics.py."""
_TICKS = 6
_MOST = 2**53


def histogram(run: RunRecord, *, title: str) -> str:
    """A figure as HTML: fraction of samples by number of tokens, on a logarithmic axis.

    Empty without data.
    """
    bins = bins_of(run)
    if not bins:
        return ""
    total, most = sum(bins.values()), max(bins.values())
    x = Axis(*(2**power for power in _powers(bins)), log=True)
    y = Axis(0, most / total)
    body = "".join(_bar(longest, count / total, x, y) for longest, count in bins.items())
    ends = ", ".join(f"{p}% up to <b>{_percentile(bins, p):,}</b>" for p in (10, 50, 90))
    return (
        f"<figure class=chart><figcaption>{escape(title)}{LOG_SCALE}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"{_grid(x, y)}{body}</svg>"
        f"<div class=legend><span>of {number(total)} samples {ends} tokens</span></div></figure>"
    )


def bins_of(run: RunRecord) -> dict[int, int]:
    """Number of samples in each bin of lengths over the whole run, by the bin's largest length."""
    found: Counter[int] = Counter()
    for line in run.lines:
        pairs = line.get("tokens_per_sample")
        for pair in pairs if isinstance(pairs, list) else ():
            match pair:
                case [int(longest), int(count)] if 1 <= longest <= _MOST and 0 < count <= _MOST:
                    found[longest] += count
    return dict(sorted(found.items()))


def _powers(bins: dict[int, int]) -> tuple[int, int]:
    return math.floor(math.log2(min(bins) / BIN)), math.ceil(math.log2(max(bins) * BIN))


def _bar(longest: int, share: float, x: Axis, y: Axis) -> str:
    left, right = (_across(end, x) for end in (longest / BIN, longest))
    top = _down(share, y)
    size = f'width="{right - left:.1f}" height="{BOTTOM - top:.1f}"'
    said = f"{longest / BIN:.0f} to {longest} tokens: {share:.2%}"
    return f'<rect class="bar c0" x="{left:.1f}" y="{top:.1f}" {size}><title>{said}</title></rect>'


def _grid(x: Axis, y: Axis) -> str:
    first, last = (round(math.log2(end)) for end in (x.low, x.high))
    ends = (2.0**n for n in range(first, last + 1, math.ceil((last - first + 1) / _TICKS)))
    shares = ((share, f"{100 * share:.3g}%") for share in y.ticks())
    return "".join(grid(x, y, across=((end, number(end)) for end in ends), up=shares))


def _across(tokens: float, x: Axis) -> float:
    return LEFT + x.at(tokens) * (RIGHT - LEFT)


def _down(share: float, y: Axis) -> float:
    return BOTTOM - y.at(share) * (BOTTOM - TOP)


def _percentile(bins: dict[int, int], percent: int) -> int:
    wanted, count = percent / 100 * sum(bins.values()), 0
    for longest, here in bins.items():
        count += here
        if count >= wanted:
            return longest
    raise AssertionError("no bins")
