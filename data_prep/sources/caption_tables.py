"""Reads captions of many media from tables: meta.json, captions.json, JSON lines, CSV.

Names in a table are paths relative to its folder, or absolute paths into it. A bare file name also
finds a medium in a subfolder, if only one medium there has this name.
"""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path, PurePosixPath

from data_prep.media.captions import (
    NULL_REMEDY,
    Caption,
    ControlPicture,
    MissingCaption,
    caption,
    texts_in,
    texts_of,
    weight_of,
)
from data_prep.media.name_matching import UNCLEAR, composed, respelled
from data_prep.refusals import Reason, RefusedError, short_repr
from data_prep.sources.table_rows import OUTSIDE, Rows, TableRow, rows_of
from dit.system_errors import reason

_OF_KOHYA = ("meta_cap.json", "meta_clean.json", "meta_lat.json")
"""Names of tables of sd-scripts, which names files without their endings unless it was run with
--full_path."""
_JSON_NAMES = ("meta.json", "captions.json", "videos2caption.json", "metadata.json", *_OF_KOHYA)
# Fields for captions, in this order, where --caption_field is not given.
CAPTION_FIELDS = ("caption", "cap", "internvl", "usr", "text", "prompt", "captions")
_CONTROL_FIELD = re.compile(r"control_path(?:_?(\d{1,3}))?")
_REJECTED_FIELD = re.compile(r"rejected_path()")
_LINES_SUFFIXES = ("_internvl.json", "_usr.json")  # JSON lines, despite their ending


def table_format(path: str) -> str | None:
    """The format of the caption table at `path`: `meta_json`, `jsonl` or `csv`; else None."""
    name = PurePosixPath(path).name.lower()
    if name.endswith((".jsonl", *_LINES_SUFFIXES)):
        return "jsonl"
    if name.endswith((".csv", ".tsv")):
        return "csv"
    return "meta_json" if name in _JSON_NAMES else None


def is_table(path: str) -> bool:
    return table_format(path) is not None


@dataclass(frozen=True, kw_only=True)
class CaptionTables:
    """All caption tables of an input folder."""

    paths: tuple[str, ...]
    media: Iterable[str]
    """Relative paths of the media, to find those that a table names without their folders."""
    caption_field: str
    """Name of the field with the caption; `caption` stands for all of `CAPTION_FIELDS`."""
    read: Callable[[str], bytes]
    missing: MissingCaption = MissingCaption.FILENAME
    root: Path | None = None
    """Input folder, for rows with absolute paths; None: such rows match nothing."""
    control: Callable[[str], ControlPicture] | None = None
    """Finds the control or rejected picture at a relative path, without opening it; None: tables
    may name none."""
    _parsed: dict[str, Rows] = field(default_factory=dict)

    def of(self, source: str) -> list[Caption] | None:
        """Captions of the medium at the relative path `source`; None if no table has a row for it.

        Tables in the nearest folder come first, in the order of their names.

        Raises:
            RefusedError: the row of the medium cannot be used.
        """
        for folder in PurePosixPath(source).parents:
            for path in self._by_folder.get(str(folder), ()):
                found = self._look_up(path, source, folder)
                if found is not None:
                    return found
        return None

    def unused(self, exists: Callable[[str], bool]) -> Counter[str]:
        """Counts rows without effect, by kind: they match no file, or a later row replaces them.

        Rows that repeat a field are counted, too. `exists` says whether a relative path is a file.
        """
        lost, unclear, counts = list[str](), list[str](), Counter[str]()
        for path in sorted(self.paths):
            rows, folder = self._rows(path), str(PurePosixPath(path).parent)
            if rows.repeated:
                counts[f"row of {path} that a later row of the same name replaces"] = rows.repeated
            if rows.repeating:
                counts[f"row of {path} with a field twice: the last value counts"] = rows.repeating
            # `_names` has media at any depth; other files are looked for at the path in the row.
            names = (name for name in rows.by_name if not self._names[folder, name])
            for name in names:
                place = posixpath.normpath(posixpath.join(folder, name))
                if name in rows.unclear:
                    unclear.append(f"{name!r} in {path}")
                elif "\0" in name or name.startswith(OUTSIDE) or not exists(place):
                    lost.append(f"{name!r} in {path}")
        for what, found in (("that matches no file", lost), (UNCLEAR, unclear)):
            if found:
                counts[f"row of a caption table {what}, the first {found[0]}"] = len(found)
        return counts

    def only_beside(self) -> frozenset[str]:
        """Paths that tables name as controls or rejected samples, but not as media."""
        named, media = set[str](), set[str]()
        for path in self.paths:
            folder = str(PurePosixPath(path).parent)
            for name, row in self._rows(path).by_name.items():
                media |= {name, posixpath.normpath(posixpath.join(folder, name))}
                if isinstance(row.content, dict):
                    for wanted in (_CONTROL_FIELD, _REJECTED_FIELD):
                        named.update(self._beside(path, row, wanted, quiet=True))
        return frozenset(named - media)

    @cached_property
    def _by_folder(self) -> dict[str, list[str]]:
        folders: dict[str, list[str]] = {}
        for path in sorted(self.paths):
            folders.setdefault(str(PurePosixPath(path).parent), []).append(path)
        return folders

    @cached_property
    def _names(self) -> Counter[tuple[str, str]]:
        """Number of media with a name, by (folder with a table, name), subfolders included.

        The name is that of the file; in some kinds of tables its short form counts as well.
        """
        counts = Counter[tuple[str, str]]()
        for source in self.media:
            name = PurePosixPath(source).name
            for folder in PurePosixPath(source).parents:
                if tables := self._by_folder.get(str(folder)):
                    counts[str(folder), name] += 1
                    counts.update((str(folder), s) for s in {_short(t, source) for t in tables})
        return counts

    @cached_property
    def _forms(self) -> dict[tuple[str, str], set[str]]:
        """Spellings of media names that are not ASCII, by (folder, composed form of the name)."""
        forms: dict[tuple[str, str], set[str]] = {}
        for source in (source for source in self.media if not source.isascii()):
            for folder in PurePosixPath(source).parents:
                tables = self._by_folder.get(str(folder), ())
                inside = str(PurePosixPath(source).relative_to(folder))
                names = {inside, PurePosixPath(source).name, *(_short(t, source) for t in tables)}
                for name in names if tables or str(folder) == "." else ():
                    forms.setdefault((str(folder), composed(name)), set()).add(name)
        return forms

    def _look_up(self, path: str, source: str, folder: PurePosixPath) -> list[Caption] | None:
        rows = self._rows(path)
        name, inside = PurePosixPath(source).name, str(PurePosixPath(source).relative_to(folder))
        if inside in rows.by_name:
            return self._captions(path, rows.by_name[inside])
        if name in rows.by_name:
            # videos2caption.json gives files in videos/ without their folder.
            if inside != f"videos/{name}" and self._names[str(folder), name] > 1:
                raise RefusedError(
                    Reason.BAD_CAPTION,
                    f"{path} names {name!r}, and several files have this name; write paths relative"
                    " to the folder of the table",
                )
            return self._captions(path, rows.by_name[name])
        if (short := _short(path, source)) in rows.by_name:
            return self._captions(path, rows.by_name[short])
        if rows.problem is not None:
            raise rows.problem
        return None

    def _captions(self, path: str, row: TableRow) -> list[Caption]:
        texts, name = self._texts(path, row), PurePosixPath(path).name
        if not isinstance(row.content, dict):
            return [caption(text, origin=name) for text in texts]
        weight, controls, rejected = weight_of(row.content, row.place(path)), (), None
        if self.control is not None:
            controls = tuple(map(self.control, self._beside(path, row, _CONTROL_FIELD)))
            found = self._beside(path, row, _REJECTED_FIELD)
            if len(found) > 1:
                why = f"{row.place(path)} has {len(found)} files in rejected_path; give it one"
                raise RefusedError(Reason.BAD_REJECTED, why)
            rejected = next(map(self.control, found), None)
        made = [caption(text, origin=name, loss_weight=weight) for text in texts]
        return [replace(one, controls=controls, rejected=rejected) for one in made]

    def _texts(self, path: str, row: TableRow) -> tuple[str, ...]:
        content = row.content
        if isinstance(content, RefusedError):
            raise content
        if not isinstance(content, dict):
            texts = texts_of(content)
            if content is None and self.missing is MissingCaption.EMPTY:
                return ("",)
            if texts is None:
                why = f"{row.place(path)} has {short_repr(content)} as its caption; write a text"
                if content is None:
                    raise RefusedError(Reason.NO_CAPTION, f"{why}{NULL_REMEDY}")
                raise RefusedError(Reason.BAD_CAPTION, why)
            return texts
        names = CAPTION_FIELDS if self.caption_field == "caption" else (self.caption_field,)
        return texts_in(row.place(path), names, content, self.missing)

    def _beside(
        self, path: str, row: TableRow, wanted: re.Pattern[str], *, quiet: bool = False
    ) -> list[str]:
        return [self._spelled(name) for name in _paths(path, row, wanted, quiet=quiet)]

    def _spelled(self, path: str) -> str:
        path = self._with_slashes(path)
        found = self._forms.get((".", composed(path)), ())
        return path if path in found or len(found) != 1 else next(iter(found))

    def _with_slashes(self, name: str, folder: str = ".") -> str:
        r"""The path `name` with \ replaced by /, unless a medium in `folder` has this very name."""
        if "\\" not in name or posixpath.normpath(posixpath.join(folder, name)) in self._media:
            return name
        return posixpath.normpath(name.replace("\\", "/"))

    @cached_property
    def _media(self) -> frozenset[str]:
        return frozenset(self.media)

    def _rows(self, path: str) -> Rows:
        if path not in self._parsed:
            try:
                content, folders = self.read(path), self._folders(path)
                rows = rows_of(path, content, table_format(path), folders=folders)
                for name in [name for name in rows.by_name if "\\" in name]:
                    rows.rename(name, self._with_slashes(name, str(PurePosixPath(path).parent)))
                self._respell(rows)
                self._parsed[path] = rows
            except (RefusedError, OSError) as error:
                why = error.detail if isinstance(error, RefusedError) else reason(error)
                unread = Rows(path=path)
                unread.add_problem(why)
                self._parsed[path] = unread
        return self._parsed[path]

    def _respell(self, rows: Rows) -> None:
        """Renames rows to the spelling of the medium that they name, if only one is possible.

        Names with several possible media are noted in `rows.unclear`.
        """
        folder = str(PurePosixPath(rows.path).parent)

        def media(name: str) -> set[str]:
            return self._forms.get((folder, composed(name)), set())

        spare = [n for n in rows.by_name if not n.isascii() and n not in media(n)]
        left = {composed(name): media(name) - rows.by_name.keys() for name in spare}
        found, rows.unclear = respelled(spare, left)
        for name, spelled in found.items():
            rows.by_name[spelled] = rows.by_name.pop(name)

    def _folders(self, path: str) -> tuple[str, ...]:
        if self.root is None:
            return ()
        folder = self.root.absolute() / PurePosixPath(path).parent
        return posixpath.normpath(folder), str(folder.resolve())


def _paths(path: str, row: TableRow, wanted: re.Pattern[str], *, quiet: bool = False) -> list[str]:
    """The paths in the fields of `row` that match `wanted`, ordered by the number in their name.

    `path` is the path of the table. A field holds a path relative to the table's folder, or a list
    of such paths; an empty field holds none. The result is relative to the input folder.

    Raises:
        RefusedError: a field holds something else and `quiet` is not set.
    """
    content = row.content
    numbered = {wanted.fullmatch(key): key for key in content if isinstance(key, str)}
    fields = sorted((int(match[1] or 0), key) for match, key in numbered.items() if match)
    found: list[str] = []
    for _, key in fields:
        names = texts_of(content[key]) if content[key] not in (None, "", []) else ()
        if names is None or any(not name or "\0" in name for name in names):
            if quiet:
                continue
            why = f"{row.place(path)} has {short_repr(content[key])} in {key}; write a path there"
            is_control = wanted is _CONTROL_FIELD
            raise RefusedError(Reason.BAD_REFERENCE if is_control else Reason.BAD_REJECTED, why)
        folder = PurePosixPath(path).parent
        found += (posixpath.normpath(posixpath.join(folder, name)) for name in names)
    return found


def _short(path: str, source: str) -> str:
    """The short name for `source` that the table at `path` may use; empty if it can use none."""
    stem, table = PurePosixPath(source).stem, PurePosixPath(path).name.lower()
    if table.endswith(_LINES_SUFFIXES):
        return stem.rpartition("_sample")[0] or stem
    return stem if table in _OF_KOHYA else ""
