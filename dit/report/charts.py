"""Draws curves as inline SVG; the page's style has their colours, for light and dark mode.

Each curve contains its values; page.js shows the values under the pointer in the legend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from dit.report.series import Bucket

COLOURS = 8
"""Number of colour classes (c0, c1, ...) in the page's style."""
WIDTH, HEIGHT = 420, 240  # the width of a phone held upright, so that text is not scaled down
LEFT, RIGHT, TOP, BOTTOM = 50, 408, 8, 214
_LOG_FROM = 4.0
"""The vertical axis is logarithmic if the largest mean is at least so many times the smallest."""
LOG_SCALE = " <small>log scale</small>"
_MANY = 4  # in a chart with more curves, their extremes are drawn fainter
# The learning rate decays to zero, which a logarithmic axis cannot show; the others only count.
_LINEAR = {"learning rate", "epochs", "epochs by dataset", "samples by dataset"}
_LINEAR |= {"steps skipped so far", "samples refused so far"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A curve of a chart: its points as buckets of steps, and how it is drawn."""

    label: str
    buckets: list[Bucket]
    colour: int
    dash: int = 0  # 0 solid, 1 dashed, 2 dotted
    run: str = ""  # name of its run, by which all curves of the run are switched off


@dataclass(frozen=True, slots=True)
class Axis:
    """The range of an axis, and its scale."""

    low: float
    high: float
    log: bool = False

    def at(self, value: float) -> float:
        """The position of `value` on the axis: 0 at the lower end, 1 at the upper."""
        low, high, value = map(self._scaled, (self.low, self.high, value))
        return (value - low) / (high - low)

    def _scaled(self, value: float) -> float:
        return math.log(value) if self.log else value

    def ticks(self) -> list[float]:
        from matplotlib.ticker import LogLocator, MaxNLocator

        linear = MaxNLocator(nbins=5, steps=[1, 2, 5, 10]).tick_values(self.low, self.high)
        choices = [LogLocator(subs=subs) for subs in ((1,), (1, 3), (1, 2, 5))] if self.log else []
        inside: list[float] = []
        for values in [*(c.tick_values(self.low, self.high) for c in choices), linear]:
            inside = [float(v) for v in values if self.low <= v <= self.high]
            if 3 <= len(inside) <= 6:
                return inside
        return inside


def chart(title: str, lines: Sequence[Curve]) -> str:
    """A figure as HTML: title, the curves `lines` over the steps, and a legend.

    The legend has the newest value of each curve.
    """
    x = Axis(0, max(1, *(b.step for line in lines for b in line.buckets)))
    y = _y_axis(lines, title.partition(":")[0])

    def at(step: float, value: float) -> str:
        right = LEFT + x.at(step) * (RIGHT - LEFT)
        shown = min(max(value, y.low), y.high)
        return f"{right:.1f} {BOTTOM - y.at(shown) * (BOTTOM - TOP):.1f}"

    marks = grid(x, y, across=_labelled(x.ticks()), up=_labelled(y.ticks()))
    body = [*marks, *(_drawn(line, at, title) for line in lines)]
    kind = "chart many" if len(lines) > _MANY else "chart"
    return (
        f'<figure class="{kind}" data-across="{WIDTH} {LEFT} {RIGHT} {x.high:.15g}"><figcaption>'
        f"{escape(title)}{LOG_SCALE if y.log else ''} <output></output></figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)} by step">'
        f'{"".join(body)}<path class=cursor d="M0 {TOP}V{BOTTOM}"/></svg>'
        f"{_legend(lines, title)}</figure>"
    )


def _y_axis(lines: Sequence[Curve], title: str) -> Axis:
    """The vertical axis of the chart `title` with the curves `lines`.

    It contains all means, and extremes only as far as the means still fill half of the axis. For
    metrics without a trend, unlike losses, all but the most extreme tenth at each end count
    like means: otherwise the variation from step to step would exceed both ends.
    """
    every = [b for line in lines for b in line.buckets]
    low, high = min(b.mean for b in every), max(b.mean for b in every)
    log = title not in _LINEAR and low > 0 and high / low >= _LOG_FROM
    if "loss" not in title and not log:
        few = len(every) // 10
        low = min(low, sorted(b.low for b in every)[few])
        high = max(high, sorted(b.high for b in every)[-1 - few])
    if log:
        margin = (high / low) ** 0.5
        below = max(min((b.low for b in every if b.low > 0), default=low), low / margin)
        return Axis(below / 1.05, min(max(b.high for b in every), high * margin) * 1.05, log)
    margin = (high - low) * 0.1 or abs(high) * 0.1 or 1
    below = max(min(b.low for b in every), low - 5 * margin) - margin
    above = min(max(b.high for b in every), high + 5 * margin) + margin
    return Axis(max(below, 0) if low >= 0 else below, above)


def grid(
    x: Axis, y: Axis, *, across: Iterable[tuple[float, str]], up: Iterable[tuple[float, str]]
) -> list[str]:
    """SVG of lines and labels at the values `across` and `up` of both axes, each (value, label)."""
    parts = []
    for value, label in up:
        height = BOTTOM - y.at(value) * (BOTTOM - TOP)
        parts.append(f'<path class=grid d="M{LEFT} {height:.1f}H{RIGHT}"/>')
        parts.append(f'<text class=y x={LEFT - 6} y="{height + 4:.1f}">{label}</text>')
    for value, label in across:
        right = LEFT + x.at(value) * (RIGHT - LEFT)
        parts.append(f'<text class=x x="{right:.1f}" y={BOTTOM + 18}>{label}</text>')
    return parts


def _labelled(ticks: list[float]) -> list[tuple[float, str]]:
    """(value, label) of each tick, with the fewest digits by which all labels differ."""
    choices = ([number(tick, digits=digits) for tick in ticks] for digits in (3, 4, 5, 6, 9, 17))
    labels = next(c for c in choices if len(set(c)) == len(ticks))
    return list(zip(ticks, labels, strict=True))


def _drawn(line: Curve, at: Callable[[float, float], str], title: str) -> str:
    lowest = min(line.buckets, key=lambda b: b.low)
    # What a browser shows without scripts while the pointer rests on the curve.
    said = f"{line.label}: {number(line.buckets[-1].mean, digits=4)}, lowest {number(lowest.low)}"
    shape = "".join(_shape(line.buckets, at))
    return (
        f'<g class="curve {style(line.colour, line.dash)}" {_names(line, title)}'
        f' data-values="{_values(line.buckets)}"><title>{escape(said)}</title>{shape}</g>'
    )


def _shape(buckets: Sequence[Bucket], at: Callable[[float, float], str]) -> Iterator[str]:
    across = [at(b.step, b.mean) for b in buckets]
    if len(across) == 1:
        left, top = across[0].split()
        yield f"<circle cx={left} cy={top} r=3 />"
        return
    if any(b.low != b.high for b in buckets):
        above = [at(b.step, b.high) for b in buckets]
        below = [at(b.step, b.low) for b in reversed(buckets)]
        yield f'<path class="band" d="M{"L".join(above + below)}Z"/>'
    yield f'<path class="line" d="M{"L".join(across)}"/>'


def _values(buckets: Sequence[Bucket]) -> str:
    """The values of buckets as text for page.js, joined by semicolons.

    A bucket is "step mean", or "step mean low high" if its values differ.
    """
    each = (
        [b.step, b.mean] if b.low == b.high else [b.step, b.mean, b.low, b.high] for b in buckets
    )
    return ";".join(f"{step:.0f} {' '.join(f'{v:.4g}' for v in values)}" for step, *values in each)


def _names(line: Curve, title: str) -> str:
    """HTML attributes by which page.js recognises a curve, also after the page was reloaded."""
    return f'data-run="{escape(line.run)}" data-key="{escape(f"{title}/{line.label}")}"'


def style(colour: int, dash: int = 0) -> str:
    """CSS classes of a curve and of its entry in a legend."""
    # With more curves than colours, a colour is used again with another dash.
    return f"c{colour % COLOURS} dash{(dash + colour // COLOURS) % 3}"


def _legend(lines: Sequence[Curve], title: str) -> str:
    entries = (
        f"<button type=button aria-pressed=true {_names(line, title)}>"
        f'<i class="{style(line.colour, line.dash)}"></i>'
        f"{escape(line.label)} <b>{number(line.buckets[-1].mean, digits=4)}</b></button>"
        for line in lines
    )
    return f"<div class=legend>{''.join(entries)}</div>"


def number(value: float, *, digits: int = 3) -> str:
    """`value` as text with a few digits: 0.0123, 4.5, 2731, 12.3k, 4.5M."""
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= (unit if unit > 1e3 else 1e4):
            return f"{value / unit:.{digits}g}{letter}"
    return f"{value:.0f}" if abs(value) >= 10**digits else f"{value:.{digits}g}"
