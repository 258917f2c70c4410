"""Runs -> one HTML file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from string import Template

from dit.drawing import Undrawn
from dit.report import figures
from dit.report.charts import Curve, chart
from dit.report.findings import findings, lost_pictures
from dit.report.lengths import histogram
from dit.report.pictures import STEPS, generated, slider
from dit.report.reading import ReportError, RunRecord
from dit.report.series import ChartPlace, Points, buckets, curves, section_name

Section = tuple[str, str]  # heading, HTML; a section without HTML is left out
_FEW = 2
"""With at most this many runs, pictures stand before all curves but those of the loss."""
_LEAST_STEPS = 4  # a run shows pictures of at least so many steps


def write_page(runs: Sequence[RunRecord], *, output: Path, samples: Sequence[Path] = ()) -> None:
    """Writes the page; `samples` are further folders that generate_dit has written.

    Raises:
        ReportError: the page cannot be written, or a folder of samples cannot be read.
    """
    found = [section for section in _sections(runs, samples) if section[1]]
    text = Template(Path(__file__).with_name("page.html").read_text()).substitute(
        title=escape(", ".join(run.name for run in runs)),
        links="".join(f'<a href="#{_anchor(name)}">{escape(name)}</a>' for name, _ in found),
        sections="\n".join(
            f'<section id="{_anchor(name)}"><h2>{escape(name)}</h2>{body}</section>'
            for name, body in found
        ),
    )
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        # The name of a folder may not be valid UTF-8.
        output.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ReportError(
            f"{output} cannot be written ({error.strerror}); choose another --output"
        ) from error


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def _sections(runs: Sequence[RunRecord], samples: Sequence[Path]) -> Iterator[Section]:
    names = [run.name for run in runs]
    title, settings = figures.settings(runs)
    undrawn: list[Undrawn] = []
    pictures = list(_pictures(runs, samples, undrawn))
    losses, *charts = _charts(runs) or [("Loss", "")]
    yield "Worth a look", _warnings(runs, undrawn)
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
    runs: Sequence[RunRecord], samples: Sequence[Path], undrawn: list[Undrawn]
) -> Iterator[Section]:
    """Sections of pictures; files that are no pictures are added to `undrawn`."""
    yield "Pictures", "".join(generated(folder, undrawn) for folder in samples)
    most = max(_LEAST_STEPS, STEPS * _FEW // max(len(runs), _FEW))
    sliders = "".join(slider(run, undrawn, most=most) for run in runs)
    yield "Samples over the steps", sliders and f"<div class=sliders>{sliders}</div>"


def _lengths(runs: Sequence[RunRecord]) -> str:
    title = "tokens of a sample, whole run"
    titles = [title if len(runs) == 1 else f"{title}: {run.name}" for run in runs]
    charts = "".join(histogram(run, title=t) for run, t in zip(runs, titles, strict=True))
    return charts and f"<div class=charts>{charts}</div>"


def _warnings(runs: Sequence[RunRecord], undrawn: Sequence[Undrawn]) -> str:
    lines = [
        f"<li>{f'<b>{escape(run.name)}</b>: ' if len(runs) > 1 else ''}{escape(text)}</li>"
        for run in runs
        for text in findings(run)
    ]
    lines += [f"<li>{escape(text)}</li>" for text in lost_pictures(undrawn)]
    return f"<ul class=warnings>{''.join(lines)}</ul>" if lines else ""


def _all_settings(run: RunRecord) -> str:
    if not run.settings:
        return ""
    text = "\n".join(f"{key}: {value}" for key, value in run.settings.items())
    return f"<details><summary>{escape(run.name)}</summary><pre>{escape(text)}</pre></details>"


def _charts(runs: Sequence[RunRecord]) -> list[Section]:
    """The charts of all runs by section."""
    found = [curves(run) for run in runs]
    places = sorted({(at.section, at.title) for of in found for at in of})
    sections = []
    for section, group in groupby(places, key=lambda at: at[0]):
        charts = [c for _, title in group for c in _of_title(runs, found, title)]
        sections.append((section_name(section), f"<div class=charts>{''.join(charts)}</div>"))
    return sections


def _of_title(
    runs: Sequence[RunRecord], found: Sequence[dict[ChartPlace, Points]], title: str
) -> Iterator[str]:
    """One chart for all runs if each has at most three curves in it, else one for each run."""
    lines = [[(at.label, of[at]) for at in of if at.title == title] for of in found]
    if len(runs) == 1 or max(map(len, lines)) > 3:
        for run, of in zip(runs, lines, strict=True):
            if of:
                name = title if len(runs) == 1 else f"{title}: {run.name}"
                yield chart(name, [_line(label, p, c) for c, (label, p) in enumerate(of)])
        return
    together = [
        _line(f"{run.name} {label}" if len(of) > 1 else run.name, p, colour, dash=nth)
        for colour, (run, of) in enumerate(zip(runs, lines, strict=True))
        for nth, (label, p) in enumerate(of)
    ]
    yield chart(title, together)


def _line(label: str, points: Points, colour: int, *, dash: int = 0) -> Curve:
    return Curve(label=label, buckets=buckets(points), colour=colour, dash=dash)
