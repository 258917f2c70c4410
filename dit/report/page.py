"""Writes the report on one or several runs as one HTML file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from string import Template

from dit.report import figures
from dit.report.charts import Curve, chart, style
from dit.report.comparison import LossGroup, loss_groups, loss_note
from dit.report.findings import findings, lost_pictures
from dit.report.lengths import histogram
from dit.report.pictures import STEPS, generated, slider
from dit.report.reading import Points, ReportError, RunRecord
from dit.report.series import ChartPlace, buckets, curves, is_loss, section_name
from dit.system_errors import reason
from dit.watching import NotShown

Section = tuple[str, str]  # heading, HTML; a section without HTML is left out
_FEW = 2
"""Number of runs up to which pictures precede all curves except the loss."""
_LEAST_STEPS = 8  # a run shows pictures of at least so many steps


def write_page(runs: Sequence[RunRecord], *, output: Path, samples: Sequence[Path] = ()) -> None:
    """Writes the page to `output`; `samples` are further folders that generate_dit has written.

    Raises:
        ReportError: the page cannot be written, or a folder of samples cannot be read.
    """
    text = page(runs, samples=samples)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        # The name of a folder may not be valid UTF-8.
        output.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ReportError(
            f"{output} cannot be written ({reason(error)}); choose another --output"
        ) from error


def page(
    runs: Sequence[RunRecord],
    *,
    samples: Sequence[Path] = (),
    notes: Sequence[str] = (),
    refresh_s: int = 0,
) -> str:
    """The report on `runs` as HTML, with `notes` at the top.

    With `refresh_s` above 0 the page reloads itself after so many seconds.

    Raises:
        ReportError: a folder of samples cannot be read.
    """
    found = [section for section in _sections(runs, samples, notes) if section[1]]
    links = "".join(f'<a href="#{_anchor(name)}">{escape(name)}</a>' for name, _ in found)
    sections = "\n".join(
        f'<section id="{_anchor(name)}"><h2>{escape(name)}</h2>{body}</section>'
        for name, body in found
    )
    title = ", ".join(run.name for run in runs)
    return _whole(title, f"<nav>{links}</nav>{_legend(runs)}{sections}", refresh_s=refresh_s)


def message_page(title: str, message: str, *, refresh_s: int) -> str:
    """A page with `message` in place of a report; it reloads itself after `refresh_s` seconds."""
    return _whole(title, f"<p class=message>{escape(message)}</p>", refresh_s=refresh_s)


def _whole(title: str, body: str, *, refresh_s: int) -> str:
    here = Path(__file__)
    # Without scripts the browser itself loads the page again.
    refresh = f'<meta http-equiv="refresh" content="{refresh_s}">' if refresh_s else ""
    return Template(here.with_name("page.html").read_text()).substitute(
        title=escape(title),
        body=body,
        script=here.with_name("page.js").read_text(),
        refresh=refresh,
        refresh_s=refresh_s,
    )


def _legend(runs: Sequence[RunRecord]) -> str:
    """Buttons that show or hide each run on the whole page, in the colours of the curves.

    Empty for a single run.
    """
    entries = "".join(
        f'<button type=button aria-pressed=true data-run="{escape(run.name)}">'
        f'<i class="{style(colour)}"></i>{escape(run.name)}</button>'
        for colour, run in enumerate(runs)
    )
    return f'<div class="legend runs">{entries}</div>' if len(runs) > 1 else ""


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def _sections(
    runs: Sequence[RunRecord], samples: Sequence[Path], notes: Sequence[str]
) -> Iterator[Section]:
    names = [run.name for run in runs]
    title, settings = figures.settings(runs)
    undrawn: list[NotShown] = []
    pictures = list(_pictures(runs, samples, undrawn))
    losses, *charts = _charts(runs) or [("Loss", "")]
    apart = loss_note(runs)
    yield "Worth a look", _warnings(runs, undrawn, [*notes, *filter(None, [apart])])
    yield "Summary", figures.table(names, [figures.summary_table(run) for run in runs])
    yield losses
    # Pictures of many runs take much space, while their curves share the charts.
    yield from (*pictures, *charts) if len(runs) <= _FEW else (*charts, *pictures)
    read = figures.table(names, [figures.data(run) for run in runs])
    yield "Samples and dataset", _lengths(runs) + read
    yield title, figures.table(names, settings) if any(settings) else ""
    yield "All settings", "".join(map(_all_settings, runs))
    yield "Environment", figures.table(names, [figures.environment_table(run) for run in runs])


def _pictures(
    runs: Sequence[RunRecord], samples: Sequence[Path], undrawn: list[NotShown]
) -> Iterator[Section]:
    yield "Pictures", "".join(generated(folder, undrawn) for folder in samples)
    most = max(_LEAST_STEPS, STEPS * _FEW // max(len(runs), _FEW))
    yield "Samples over the steps", slider(runs, undrawn, most=most)


def _lengths(runs: Sequence[RunRecord]) -> str:
    title = "tokens of a sample, whole run"
    titles = [title if len(runs) == 1 else f"{title}: {run.name}" for run in runs]
    charts = "".join(histogram(run, title=t) for run, t in zip(runs, titles, strict=True))
    return charts and f"<div class=charts>{charts}</div>"


def _warnings(runs: Sequence[RunRecord], undrawn: Sequence[NotShown], notes: Sequence[str]) -> str:
    said = defaultdict[str, list[str]](list)  # what is said -> names of the runs
    for run in runs:
        for text in findings(run):
            said[text].append(run.name)
    lines = [f"<li>{escape(text)}</li>" for text in notes]
    for text, names in said.items():
        whose = f"<b>{escape(', '.join(names))}</b>: " if len(runs) > 1 else ""
        lines.append(f"<li>{whose}{escape(text)}</li>")
    lines += [f"<li>{escape(text)}</li>" for text in lost_pictures(undrawn)]
    return f"<ul class=warnings>{''.join(lines)}</ul>" if lines else ""


def _all_settings(run: RunRecord) -> str:
    if not run.settings:
        return ""
    text = "\n".join(f"{key}: {value}" for key, value in run.settings.items())
    return f"<details><summary>{escape(run.name)}</summary><pre>{escape(text)}</pre></details>"


def _charts(runs: Sequence[RunRecord]) -> list[Section]:
    """The sections of charts of all runs, as (heading, HTML).

    Losses that are not comparable have charts of their own.
    """
    found = [curves(run) for run in runs]
    places = sorted({(at.section, at.title) for of in found for at in of})
    sections, groups = [], loss_groups(runs)
    for section, of_section in groupby(places, key=lambda at: at[0]):
        charts = [
            drawn
            for _, title in of_section
            for name, numbers in _parts(title, groups)
            for drawn in _of_title(runs, _lines(found, numbers, title), name)
        ]
        sections.append((section_name(section), f"<div class=charts>{''.join(charts)}</div>"))
    return sections


def _parts(title: str, groups: Sequence[LossGroup]) -> list[tuple[str, list[int]]]:
    """Splits a chart of losses into one for each group of comparable runs.

    Returns (title, numbers of the runs) of each; one for all runs if the chart `title` has no
    losses.
    """
    if is_loss(title) and len(groups) > 1:
        return [(f"{title}, {group.label}", group.runs) for group in groups]
    return [(title, [number for group in groups for number in group.runs])]


Lines = tuple[int, list[tuple[str, Points]]]
"""The number of a run, which is its colour, and its curves in a chart, as (label, points)."""


def _lines(
    found: Sequence[dict[ChartPlace, Points]], numbers: Sequence[int], title: str
) -> list[Lines]:
    """The curves in the chart `title` of each of the runs `numbers` that has any."""
    each = [
        (number, [(at.label, of) for at, of in found[number].items() if at.title == title])
        for number in sorted(numbers)
    ]
    return [one for one in each if one[1]]


def _of_title(runs: Sequence[RunRecord], lines: Sequence[Lines], title: str) -> Iterator[str]:
    """Yields charts as HTML, which together show `lines` under one title.

    A single run has one chart. Two runs share one if each has at most three curves, else each has
    its own. More runs have a chart for each label of a curve, with a curve for each run.
    """
    if len(runs) > _FEW:
        labels = dict.fromkeys(label for _, of in lines for label, _ in of)
        for label in labels:
            together = [
                _line(runs[number], runs[number].name, points, number)
                for number, of in lines
                for known, points in of
                if known == label
            ]
            yield chart(title if len(labels) == 1 else f"{title}: {label}", together)
    elif len(runs) == 1 or any(len(of) > 3 for _, of in lines):
        for number, of in lines:
            name = title if len(runs) == 1 else f"{title}: {runs[number].name}"
            yield chart(name, [_line(runs[number], label, p, c) for c, (label, p) in enumerate(of)])
    elif lines:
        together = [
            _line(runs[number], _called(runs[number], label, of), points, number, dash=nth)
            for number, of in lines
            for nth, (label, points) in enumerate(of)
        ]
        yield chart(title, together)


def _called(run: RunRecord, label: str, of: Sequence[tuple[str, Points]]) -> str:
    return f"{run.name} {label}" if len(of) > 1 else run.name


def _line(run: RunRecord, label: str, points: Points, colour: int, *, dash: int = 0) -> Curve:
    return Curve(label=label, buckets=buckets(points), colour=colour, dash=dash, run=run.name)
