"""HTML pages that need no server or network: search, filters and pages over many samples."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from data_prep.refusals import printable
from dit.safe_writing import write_atomically

MOST_ROWS = 100_000
"""Samples that a page lists; a browser takes a second for so many."""
Row = dict[str, Any]
"""A listed sample: name, caption; and where they are known bucket (its size), facts, refused,
detail, group (of near duplicates), repeats (of its caption), picture and clip (data URIs), file (a
path relative to the page)."""


def write_html(path: Path, title: str, parts: Iterable[str], rows: Sequence[Row]) -> None:
    """Writes a page of `parts`, which are HTML already, and the list of samples."""
    shown, cut = listed(rows), ""
    if len(shown) < len(rows):
        cut = f"<p>{len(shown):,} of {len(rows):,} samples are listed: all refused ones and near"
        cut += " duplicates first.</p>"
    values = json.dumps(shown, separators=(",", ":")).replace("<", "\\u003c")  # ends no script
    page = Template(Path(__file__).with_name("page.html").read_text()).substitute(
        title=escape(title), parts="\n".join([*parts, cut]), rows=values
    )
    write_atomically(path, printable(page).encode())


def listed(rows: Sequence[Row]) -> Sequence[Row]:
    """The rows of a page, in their order; of too many, those that people look for stay."""
    if len(rows) <= MOST_ROWS:
        return rows
    wanted = sorted(range(len(rows)), key=lambda n: not (rows[n].get("refused") or
                                                         rows[n].get("group")))  # fmt: skip
    return [rows[number] for number in sorted(wanted[:MOST_ROWS])]


def html_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    def cell(value: object) -> str:
        number = " class=n" if isinstance(value, int | float) else ""
        return f"<td{number}>{escape(f'{value:,}' if number else str(value))}</td>"

    lines = ("<tr>" + "".join(map(cell, row)) + "</tr>" for row in rows)
    return (
        "<table><tr>" + "".join(f"<th>{escape(h)}</th>" for h in head) + "</tr>"
        + "".join(lines) + "</table>"
    )  # fmt: skip
