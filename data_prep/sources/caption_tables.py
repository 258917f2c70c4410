"""Caption files that describe many media: meta.json, captions.json, JSON lines, CSV, ...

Names in them are paths relative to the folder of the file. A bare name also finds a medium in a
folder below, if only one there is called so; two of one name are never mixed up.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

from data_prep.refusals import Reason, RefusedError

_JSON_NAMES = {"meta.json": "meta_json", "captions.json": "meta_json"}
_JSON_NAMES |= {"videos2caption.json": "meta_json", "metadata.json": "meta_json"}
_NAME_FIELDS = ("file_name", "filename", "path", "name", "file", "image", "video")
# Looked at where no other field is asked for, in this order.
CAPTION_FIELDS = ("caption", "cap", "internvl", "usr", "text", "prompt", "captions")
_LINES_SUFFIXES = ("_internvl.json", "_usr.json")  # JSON lines in spite of their ending


def table_format(path: str) -> str | None:
    """`meta_json`, `jsonl` or `csv` where `path` describes many media, else None."""
    name = PurePosixPath(path).name.lower()
    if name.endswith((".jsonl", *_LINES_SUFFIXES)):
        return "jsonl"
    if name.endswith((".csv", ".tsv")):
        return "csv"
    return _JSON_NAMES.get(name)


def is_table(path: str) -> bool:
    return table_format(path) is not None


def texts_of(value: Any) -> tuple[str, ...] | None:
    """One caption, or several; None where the value is neither."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value and all(isinstance(text, str) for text in value):
        return tuple(value)
    return None


@dataclass(frozen=True, kw_only=True)
class CaptionTables:
    """All tables of an input folder."""

    paths: tuple[str, ...]
    media: Iterable[str]
    """Relative paths of the media, for bare names."""
    caption_field: str
    """The field that holds the caption; its default `caption` also finds its usual synonyms."""
    read: Callable[[str], bytes]
    _parsed: dict[str, Mapping[str, Any] | RefusedError] = field(default_factory=dict)

    def of(self, source: str) -> tuple[tuple[str, ...], str] | None:
        """Captions of the medium `source` and the table they are from; None where no table has it.

        The nearest folder wins, and in it the first table by name.

        Raises:
            RefusedError: the table cannot be used for it.
        """
        for folder in PurePosixPath(source).parents:
            for path in self._by_folder.get(str(folder), ()):
                found = self._look_up(path, source, folder)
                if found is not None:
                    return found, path
        return None

    @cached_property
    def _by_folder(self) -> dict[str, list[str]]:
        folders: dict[str, list[str]] = {}
        for path in sorted(self.paths):
            folders.setdefault(str(PurePosixPath(path).parent), []).append(path)
        return folders

    @cached_property
    def _namesakes(self) -> Counter[tuple[str, str]]:
        """How many media of each name lie below each folder that has a table."""
        counts = Counter[tuple[str, str]]()
        for source in self.media:
            for folder in PurePosixPath(source).parents:
                if str(folder) in self._by_folder:
                    counts[str(folder), PurePosixPath(source).name] += 1
        return counts

    def _look_up(self, path: str, source: str, folder: PurePosixPath) -> tuple[str, ...] | None:
        rows = self._rows(path)
        name, inside = PurePosixPath(source).name, str(PurePosixPath(source).relative_to(folder))
        row = rows.get(inside, rows.get(f"./{inside}"))
        if row is None and inside == f"videos/{name}":  # videos2caption.json names them so
            row = rows.get(name)
        if row is None and name in rows and inside != name:
            if self._namesakes[str(folder), name] > 1:
                raise RefusedError(
                    Reason.BAD_CAPTION,
                    f"{path} names {name!r}, and several files below it are called so; write paths"
                    " relative to its folder",
                )
            row = rows[name]
        if row is None:
            row = rows.get(_prefix(inside)) if path.lower().endswith(_LINES_SUFFIXES) else None
        return None if row is None else self._texts(path, row)

    def _texts(self, path: str, row: Any) -> tuple[str, ...]:
        texts = texts_of(row)
        if texts is None and isinstance(row, dict):
            names = CAPTION_FIELDS if self.caption_field == "caption" else (self.caption_field,)
            found = (texts_of(row[name]) for name in names if name in row)
            texts = next((text for text in found if text is not None), None)
        if texts is None:
            fields = ", ".join(map(repr, row)) if isinstance(row, dict) else repr(row)
            raise RefusedError(
                Reason.BAD_CAPTION,
                f"{path} has no text for it in field {self.caption_field!r}, but {fields}; name the"
                " field with --caption_field",
            )
        return texts

    def _rows(self, path: str) -> Mapping[str, Any]:
        """Rows by the name they give; a table that cannot be read refuses all that look it up."""
        if path not in self._parsed:
            try:
                content = self.read(path).decode("utf-8-sig")
                self._parsed[path] = {str(name): row for name, row in _parse(path, content)}
            except (ValueError, OSError) as error:
                self._parsed[path] = RefusedError(Reason.BAD_CAPTION, f"{path}: {error}")
        rows = self._parsed[path]
        if isinstance(rows, RefusedError):
            raise rows
        return rows


def _prefix(name: str) -> str:
    return PurePosixPath(name).stem.rpartition("_sample")[0] or PurePosixPath(name).stem


def _parse(path: str, content: str) -> Iterator[tuple[str, Any]]:
    """Name and row of each line or item.

    Raises:
        ValueError: it is not what its name says.
    """
    match table_format(path):
        case "jsonl":
            rows = [json.loads(line) for line in content.splitlines() if line.strip()]
        case "csv":
            separator = "\t" if path.lower().endswith(".tsv") else ","
            rows = list(csv.DictReader(io.StringIO(content), delimiter=separator))
        case _:
            rows = json.loads(content)
    if isinstance(rows, dict):
        listed = rows.get("items", rows.get("data"))
        if not isinstance(listed, list):
            yield from rows.items()
            return
        rows = listed
    for row in rows:
        name = next((row[key] for key in _NAME_FIELDS if key in row), None)
        if name is None:
            raise ValueError(f"a row has none of the fields {', '.join(_NAME_FIELDS)}: {row}")
        yield str(name), row
