"""Bytes of a caption table -> its rows by file name; a bad row does not affect the others."""

from __future__ import annotations

import csv
import io
import json
import posixpath
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from data_prep.media.captions import decode_utf8
from data_prep.refusals import Reason, RefusedError, short_repr
from dit.parsing import parse_json

OUTSIDE = ("/", "../")
"""How a normalised path begins that does not lead into the folder of the table."""
NAME_FIELDS = ("file_name", "filename", "path", "name", "file", "image", "video")


@dataclass(kw_only=True, slots=True)
class Rows:
    """The rows of a table."""

    path: str
    folders: tuple[str, ...] = ()
    """Absolute paths of the folder of the table."""
    by_name: dict[str, Any] = field(default_factory=dict)  # path relative to that folder -> row
    """In place of a row that cannot be used stands a RefusedError."""
    repeated: int = 0
    """Rows that a later row of the same name replaces."""
    problem: RefusedError | None = None
    """The first error without a file name; it may concern any medium that has no row."""

    def add(self, name: Any, row: Any, number: int) -> None:
        if not isinstance(name, str) or not name:
            named = ", ".join(NAME_FIELDS)
            self.add_problem(
                f"row {number} has a name in none of the fields {named}: {short_repr(row)}"
            )
            return
        name = self._relative(posixpath.normpath(name))
        self.repeated += name in self.by_name
        self.by_name[name] = row

    def _relative(self, name: str) -> str:
        """An absolute path, or one that leaves the folder and returns, as relative path."""
        if name.startswith(OUTSIDE):
            for folder in self.folders:
                inside = posixpath.relpath(posixpath.join(folder, name), folder)
                if not inside.startswith(OUTSIDE):
                    return inside
        return name

    def add_problem(self, why: str) -> None:
        self.problem = self.problem or self.refusal(why)

    def refusal(self, why: str) -> RefusedError:
        return RefusedError(Reason.BAD_CAPTION, f"{self.path}: {why}")


def rows_of(path: str, content: bytes, form: str | None, *, folders: tuple[str, ...] = ()) -> Rows:
    """The rows of the table at `path`; `form` is `jsonl`, `csv` or else one JSON document."""
    rows = Rows(path=path, folders=folders)
    try:
        match form:
            case "jsonl":
                _add_lines(rows, decode_utf8(content, errors="surrogateescape"))
            case "csv":
                _add_csv(rows, decode_utf8(content, errors="surrogateescape"))
            case _:
                _add_document(rows, parse_json(decode_utf8(content)))
    except ValueError as error:
        rows.add_problem(str(error))
    return rows


def _add_lines(rows: Rows, text: str) -> None:
    # Not splitlines(): JSON may contain U+2028 and U+0085 unescaped.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except json.JSONDecodeError as error:
            rows.add_problem(f"line {number} is no JSON: {error.msg}, column {error.colno}")
        except ValueError as error:
            rows.add_problem(f"line {number}: {error}")
        else:
            if number == 1 and isinstance(row, list | dict) and _listed(row) is not None:
                _add_document(rows, row)
            else:
                _add_row(rows, row, number)


def _add_document(rows: Rows, value: Any) -> None:
    listed = _listed(value)
    if listed is not None:
        for number, row in enumerate(listed, 1):
            _add_row(rows, row, number)
    elif isinstance(value, dict):
        for number, (name, row) in enumerate(value.items(), 1):
            rows.add(name, row, number)
    else:
        rows.add_problem(f"it holds {short_repr(value)}, and no rows: a list or an object of names")


def _listed(value: Any) -> list[Any] | None:
    if isinstance(value, dict):
        value = value.get("items", value.get("data"))
    return value if isinstance(value, list) else None


def _add_row(rows: Rows, row: Any, number: int) -> None:
    fields = row if isinstance(row, dict) else {}
    rows.add(next((fields[key] for key in NAME_FIELDS if key in fields), None), row, number)


def _add_csv(rows: Rows, text: str) -> None:
    csv.field_size_limit(sys.maxsize)  # default: 131,072 characters, less than some captions
    lines = _Lines(text)
    separator = "\t" if rows.path.lower().endswith(".tsv") else ","
    reader = csv.reader(lines, delimiter=separator)
    head: list[str] | None = None
    while True:
        lines.of_row.clear()
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            rows.add_problem(f"line {lines.number}: {error}")
            continue
        start = lines.number - len(lines.of_row) + 1
        if lines.ended and _is_open(lines.of_row, separator):
            rows.add_problem(f"a quote that begins in the row of line {start} is never closed")
        elif head is None:
            head = [name.strip() for name in cells] or None
        elif cells:
            _add_cells(rows, head, cells, start)


def _add_cells(rows: Rows, head: list[str], cells: list[str], number: int) -> None:
    while len(cells) > len(head) and not cells[-1]:
        del cells[-1]
    row = dict(zip(head, cells, strict=False))
    name = next((row[key] for key in NAME_FIELDS if key in row), None)
    if len(cells) <= len(head):
        rows.add(name, row, number)
        return
    # It is unknown which of the fields are parts of the caption.
    why = f"line {number} has {len(cells)} fields and the first line {len(head)}"
    rows.add(name, rows.refusal(f"{why}; put quotes around a field with a separator in it"), number)


class _Lines:
    """The lines of a text, and those that belong to the row that is being read."""

    def __init__(self, text: str):
        self._lines = iter(io.StringIO(text, newline=""))
        self.of_row: list[str] = []
        self.number, self.ended = 0, False

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._lines, None)
        if line is None:
            self.ended = True
            raise StopIteration
        self.number += 1
        self.of_row.append(line)
        return line


def _is_open(lines: Iterable[str], separator: str) -> bool:
    """Whether a quotation is not closed; only the strict mode of csv reports it."""
    try:
        list(csv.reader(lines, delimiter=separator, strict=True))
    except csv.Error as error:
        return "end of data" in str(error)
    return False
