"""The list of changes: what an upgrade must know comes first in each week."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path

import pytest

MARKS = ("checkpoint", "order", "config", "numerics")
NEW_LINES = 15


def weeks(text: str) -> dict[str, list[list[str]]]:
    """The marks of each line of a list, for every heading, in the order of the text."""
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    return {
        section.splitlines()[0]: [
            re.findall(r"\*(\w+)\*", re.match(r"- ((?:\*\w+\* )*)", line)[1])  # type: ignore[index]
            for line in section.splitlines()
            if line.startswith("- ")
        ]
        for section in sections
    }


def faults(text: str) -> list[str]:
    """What is wrong with each section: marks that are unknown or late, too many lines, its date."""
    found = []
    sections = weeks(text)
    for heading, lines in sections.items():
        marked = [bool(marks) for marks in lines]
        unknown = {mark for marks in lines for mark in marks} - {*MARKS}
        found += [f"{heading}: unknown mark {mark}" for mark in sorted(unknown)]
        if marked != sorted(marked, reverse=True):
            found.append(f"{heading}: a marked line stands below one without a mark")
        if marked.count(False) > NEW_LINES:
            found.append(f"{heading}: {marked.count(False)} lines of what is new")
        monday = re.fullmatch(r"Week of (\d{4}-\d\d-\d\d)", heading)
        if monday is None or date.fromisoformat(monday[1]).weekday():
            found.append(f"{heading}: not a week that begins on a Monday")
    if list(sections) != sorted(sections, reverse=True):
        found.append("the newest week is not the first")
    # A mark inside a sentence would be missed by a reader who looks at the beginnings of lines.
    late = re.compile(rf"^- (?!\*).*\*(?:{'|'.join(MARKS)})\*", re.MULTILINE)
    return found + [f"a mark inside a line: {line}" for line in late.findall(text)]


def test_marked_lines_come_first_in_each_week(repo_root: Path) -> None:
    text = (repo_root / "CHANGELOG.md").read_text()
    assert weeks(text) and not faults(text)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("## Week of 2026-11-23\n- new\n- *config* a key\n", "below one without a mark"),
        ("## Week of 2026-11-23\n- *keys* a key\n", "unknown mark keys"),
        ("## Week of 2026-11-23\n" + "- new\n" * 16, "16 lines of what is new"),
        ("## Week of 2026-11-24\n- new\n", "begins on a Monday"),
        ("## Week of 2026-11-16\n- a\n## Week of 2026-11-23\n- b\n", "newest week"),
        ("## Week of 2026-11-23\n- new, *numerics* inside\n", "a mark inside a line"),
    ],
)
def test_each_fault_is_found(text: str, fault: str) -> None:
    (found,) = faults(text)
    assert fault in found
