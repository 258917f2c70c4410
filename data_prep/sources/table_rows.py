"""Parses a caption table into rows by file name; a bad row affects no others."""

from __future__ import annotations

import csv
import io
import json
import posixpath
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

from data_prep.media.captions import JsonObject, decode_utf8
from data_prep.media.name_matching import composed
from data_prep.refusals import Reason, RefusedError, short_repr
from dit.parsing import parse_json

OUTSIDE = ("/", "../")
"""Prefixes of normalised paths that are not inside the folder of the table."""
_SEPARATORS = (",", ";", "\t", "|")
_SAID = re.compile(r'"?sep=(.)"?')
NAME_FIELDS = ("file_name", "filename", "path", "name", "file", "image", "video")


class TableRow(NamedTuple):
    """A row of a caption table: its fields or captions, or the error that makes it unusable."""

    content: Any
    number: int  # of the row, from 1; in a CSV file, of the line

    def place(self, path: str) -> str:
        return f"{path}, row {self.number},"


@dataclass(kw_only=True, slots=True)
class Rows:
    """Rows of a caption table by the name of their medium, and what is wrong with the table."""

    path: str
    folders: tuple[str, ...] = ()
    """Absolute paths of the table's folder, as given and with links resolved."""
    by_name: dict[str, TableRow] = field(default_factory=dict)
    """Rows by path relative to the folder of the table."""
    unclear: set[str] = field(default_factory=set)
    """Names that may stand for several media, as these differ only in Unicode spelling."""
    repeated: int = 0
    """Number of rows that a later row with the same name replaces."""
    repeating: int = 0
    """Number of rows that have a field twice."""
    problem: RefusedError | None = None
    """The first error about a row without a name; any medium without a row may be concerned."""

    def add(self, name: Any, content: Any, number: int) -> None:
        if not isinstance(name, str) or not name:
            why = f"row {number} names no file in any of the fields {', '.join(NAME_FIELDS)}"
            is_bad = isinstance(content, RefusedError)
            self.problem = self.problem or (
                content if is_bad else self.refusal(f"{why}: {short_repr(content)}")
            )
            return
        self.repeating += isinstance(content, JsonObject) and content.replaced > 0
        self._put(self._relative(posixpath.normpath(name)), TableRow(content, number))

    def _put(self, name: str, row: TableRow) -> None:
        """Adds `row` under `name`; of two rows with the same name the later in the table stays."""
        former = self.by_name.pop(name, row)
        self.repeated += former is not row
        self.by_name[name] = max(former, row, key=lambda one: one.number)

    def rename(self, name: str, new: str) -> None:
        """Moves the row of `name` to the spelling `new`, which another row may have."""
        self._put(new, self.by_name.pop(name))

    def _relative(self, name: str) -> str:
        """The path `name` relative to the table's folder, if it leaves that folder and comes back.

        Any other path is returned unchanged.
        """
        if name.startswith(OUTSIDE):
            for spelled, folder in product((str, composed), self.folders):
                folder = spelled(folder)
                inside = posixpath.relpath(posixpath.join(folder, spelled(name)), folder)
                if not inside.startswith(OUTSIDE):
                    return inside
        return name

    def add_problem(self, why: str) -> None:
        self.problem = self.problem or self.refusal(why)

    def refusal(self, why: str) -> RefusedError:
        return RefusedError(Reason.BAD_CAPTION, f"{self.path}: {why}")


def rows_of(path: str, content: bytes, form: str | None, *, folders: tuple[str, ...] = ()) -> Rows:
    """Parses the table at `path` from its bytes `content`.

    `form` is `jsonl` or `csv`; else the table is one JSON document. `folders` are the absolute
    paths of the table's folder. What is wrong with the table is noted in the result, not raised.
    """
    rows = Rows(path=path, folders=folders)
    try:
        match form:
            case "jsonl":
                _add_lines(rows, decode_utf8(content, errors="surrogateescape"))
            case "csv":
                _add_csv(rows, decode_utf8(content, errors="surrogateescape"))
            case _:
                _add_document(rows, parse_json(decode_utf8(content), pairs=JsonObject))
    except ValueError as error:
        rows.add_problem(str(error))
    return rows


def _add_lines(rows: Rows, text: str) -> None:
    # Not splitlines(): JSON may contain U+2028 and U+0085 unescaped.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line, pairs=JsonObject)
        except json.JSONDecodeError as error:
            rows.add_problem(
                f"line {number} is not JSON: {error.msg}, column {error.colno}; correct it"
            )
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
    elif isinstance(value, JsonObject):
        rows.repeated += value.replaced
        for number, (name, row) in enumerate(value.items(), 1):
            rows.add(name, row, number)
    else:
        rows.add_problem(
            f"it holds {short_repr(value)}; write a list of rows, or an object such as"
            ' {"cat.jpg": "a cat"}'
        )


def _listed(value: Any) -> list[Any] | None:
    if isinstance(value, dict):
        value = value.get("items", value.get("data"))
    return value if isinstance(value, list) else None


def _add_row(rows: Rows, row: Any, number: int) -> None:
    fields = row if isinstance(row, dict) else {}
    rows.add(next((fields[key] for key in NAME_FIELDS if key in fields), None), row, number)


def _add_csv(rows: Rows, text: str) -> None:
    csv.field_size_limit(sys.maxsize)  # default: 131,072 characters, less than some captions
    lines = list(io.StringIO(text, newline=""))
    separator = _separator(rows.path, lines)
    reader = csv.reader(lines, delimiter=separator)
    head: list[str] | None = None
    while True:
        start = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            rows.add_problem(f"line {reader.line_num}: {error}; correct it")
            continue
        if reader.line_num == len(lines) and _is_open(lines[start - 1 :], separator):
            rows.add_problem(f"a quote in the row of line {start} is never closed; close it")
        elif head is None:
            head = _head(rows, cells)
        elif cells:
            _add_cells(rows, head, cells, start)


def _separator(path: str, lines: Iterable[str]) -> str:
    """The field separator of a CSV file: stated by a first line `sep=`, or found by its columns.

    It is the first separator that gives a known column name, or else the usual one. Spreadsheets
    write semicolons where the comma is the decimal sign, and a first line `sep=;`.
    """
    first = next(filter(None, (line.rstrip("\r\n") for line in lines)), "")
    if said := _SAID.fullmatch(first):
        return said[1]
    usual = "\t" if path.lower().endswith(".tsv") else ","
    heads = ((s, next(csv.reader([first], delimiter=s), [])) for s in (usual, *_SEPARATORS))
    found = (s for s, head in heads if any(name.strip() in NAME_FIELDS for name in head))
    return next(found, usual)


def _head(rows: Rows, cells: list[str]) -> list[str] | None:
    """Column names from the first `cells`; None for a line before the column names.

    A problem is added to `rows` if no column is known.
    """
    if not cells or cells[0].startswith("sep="):
        return None
    head = [name.strip() for name in cells]
    if not any(name in NAME_FIELDS for name in head):
        rows.add_problem(
            f"its first line names no column {', '.join(NAME_FIELDS)}: {short_repr(head)}; write a"
            " first line such as file_name,text (commas, semicolons, tabs or | between fields)"
        )
    return head


def _add_cells(rows: Rows, head: list[str], cells: list[str], number: int) -> None:
    while len(cells) > len(head) and not cells[-1]:
        del cells[-1]
    row = JsonObject(list(zip(head, cells, strict=False)))
    name = next((row[key] for key in NAME_FIELDS if key in row), None)
    if len(cells) <= len(head):
        rows.add(name, row, number)
        return
    # It is unknown which of the fields are parts of the caption.
    why = f"line {number} has {len(cells)} fields and the first line {len(head)}"
    rows.add(name, rows.refusal(f"{why}; put quotes around a field with a separator in it"), number)


def _is_open(lines: Iterable[str], separator: str) -> bool:
    """Whether a quotation in `lines` is not closed; only the strict mode of `csv` reports it."""
    try:
        list(csv.reader(lines, delimiter=separator, strict=True))
    except csv.Error as error:
        return "end of data" in str(error)
    return False
