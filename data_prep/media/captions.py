"""Finds the captions of a medium: in files beside it, in tables, or in its file name."""

from __future__ import annotations

import hashlib
import math
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from data_prep.refusals import Reason, RefusedError, short_repr
from dit.parsing import parse_json
from dit.system_errors import reason

_MOST_SIDECAR = 16 << 20  # bytes of a caption file
_LARGEST_WEIGHT = 1e6  # training accepts no larger one
_WIDE = "it is UTF-16 or UTF-32; save it as UTF-8"

_TWICE = "caption file with a field twice: the last value counts"
NULL_REMEDY = ", or give --missing_caption empty"
"""End of the message of a refusal because of a null caption."""

SIDECAR_ENDINGS = (".json", ".txt")

PRECEDENCE = """\
The caption of pictures/old_cat.jpg is, in this order: the field --caption_field of
pictures/old_cat.jpg.json or pictures/old_cat.json; the whole text of pictures/old_cat.jpg.txt or
pictures/old_cat.txt; the row that a table gives it (meta.json, metadata.json, captions.json,
videos2caption.json, kohya's meta_cap.json, *.jsonl, *.csv, *.tsv; tables in pictures/ before those
in the folders above, and by name in one folder);
the caption column of a dataset; else what --missing_caption says. --caption_format reads only one
kind of file. Names in tables are paths relative to the table, or absolute. An empty text file is an
empty caption. A .json file without the field, and with no .txt file beside it, is refused. So is
null in a file, row or column, unless --missing_caption empty makes it an empty caption. Texts are
UTF-8. Caption files and rows that belong to no medium are counted, and the first is named.
"""


class MissingCaption(StrEnum):
    """The caption that a medium gets if none is found for it."""

    FILENAME = "filename"
    EMPTY = "empty"
    REFUSE = "refuse"


class CaptionFormat(StrEnum):
    """The kinds of files from which captions are read."""

    AUTO = "auto"
    SIDECAR = "sidecar"
    META_JSON = "meta_json"
    JSONL = "jsonl"
    CSV = "csv"


class JsonObject(dict[str, Any]):
    """A JSON object, or a row of a CSV file, that counts the values that were replaced.

    A value is replaced if a later one has the same name, which hand-written files and spreadsheets
    allow.
    """

    def __init__(self, pairs: list[tuple[str, Any]]):
        super().__init__(pairs)
        named = [name for name, _ in pairs if name]
        self.replaced = len(named) - len({*named})


class SeveralCaptions(StrEnum):
    """Which captions become samples if a medium has several."""

    ALL = "all"
    FIRST = "first"
    RANDOM = "random"


class ControlPicture(NamedTuple):
    """A control or rejected picture or video, as a caption's file or table row names it."""

    name: str  # relative path, for people
    where: str  # path in its folder, or argument of `Collection.open`
    stamp: str  # changes when the file changes; empty if there is no such file


@dataclass(frozen=True, kw_only=True, slots=True)
class Caption:
    """The caption of a medium, where it was found, and what else that file or row says."""

    text: str
    origin: str
    loss_weight: float | None = None
    """Loss weight of the sample; None if the caption's file or row has none."""
    controls: tuple[ControlPicture, ...] = ()
    rejected: ControlPicture | None = None
    """The rejected picture or video, in the folder of the media, that the table's row names."""
    notes: tuple[str, ...] = ()
    """Notes about the caption file, which the summary counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TagShuffle:
    """Shuffles the tags of captions that are lists of tags, to make several captions of each."""

    count: int  # captions that are made of each caption
    delimiter: str  # between tags

    def of(self, captions: Iterable[Caption], *, key: str) -> list[Caption]:
        """Makes `count` captions of each of `captions`, with their tags in different orders.

        `key` seeds the orders, so that they do not change between runs.
        """
        return [
            replace(caption, text=self._ordered(caption.text, f"{key} {number} {order}"))
            for number, caption in enumerate(captions)
            for order in range(self.count)
        ]

    def _ordered(self, text: str, seed: str) -> str:
        def rank(item: tuple[int, str]) -> bytes:
            return hashlib.blake2b(f"{seed} {item[0]}".encode(), digest_size=8).digest()

        tags = sorted(enumerate(text.split(self.delimiter)), key=rank)
        return self.delimiter.join(tag for _, tag in tags)


@dataclass(frozen=True, kw_only=True, slots=True)
class Captions:
    """Finds the captions of media in the folder `root`, by the relative paths of the media."""

    root: Path
    sidecars: Mapping[str, str]
    """Relative path with its ending in lower case -> actual relative path."""
    field: str
    """Field of the caption in `.json` files; if empty, `.json` files are ignored."""
    missing: MissingCaption
    tables: Any = None
    """The `CaptionTables` of the folder; None if there are none."""
    read: Callable[[str], bytes] | None = None
    """Reads a caption file by its relative path, for archives; None: files below `root` are read.
    """

    def all_of(self, source: str) -> list[Caption]:
        """The captions of the medium at the relative path `source`, at least one.

        They are looked for in a `.json` file beside the medium, in a `.txt` file beside it, and in
        tables, in this order. If none has a caption, `missing` decides.

        Raises:
            RefusedError: a caption file cannot be used, or there is none and `missing` is refuse.
        """
        described = self._beside(source, ".json") if self.field else None
        written = self._beside(source, ".txt")
        weight, notes = None, ()
        if described is not None:
            fields = self._fields(described)
            weight, notes = weight_of(fields, described), (_TWICE,) * (fields.replaced > 0)
            if written is None or fields.get(self.field) is not None:
                texts = texts_in(described, (self.field,), fields, self.missing)
                made = [caption(text, origin=".json", loss_weight=weight) for text in texts]
                return [replace(one, notes=notes) for one in made]
        if written is not None:
            made = caption(self._text(written), origin=".txt", loss_weight=weight)
            return [replace(made, notes=notes)]
        of_table = self.tables.of(source) if self.tables is not None else None
        return of_table or [substitute(source, self.missing)]

    def _beside(self, source: str, ending: str) -> str | None:
        stem = str(PurePosixPath(source).with_suffix(""))
        return self.sidecars.get(source + ending) or self.sidecars.get(stem + ending)

    def _text(self, sidecar: str) -> str:
        try:
            content = self.read(sidecar) if self.read else read_regular_file(self.root / sidecar)
            if len(content) > _MOST_SIDECAR:
                raise RefusedError(
                    Reason.BAD_CAPTION,
                    f"{sidecar} has {len(content)} bytes, and a file of captions at most"
                    f" {_MOST_SIDECAR}; shorten it",
                )
            return decode_utf8(content).replace("\r\n", "\n")  # line ends of Windows
        except OSError as error:
            raise RefusedError(Reason.BAD_CAPTION, f"{sidecar}: {reason(error)}") from error
        except ValueError as error:
            raise RefusedError(Reason.BAD_CAPTION, f"{sidecar}: {error}") from error

    def _fields(self, sidecar: str) -> JsonObject:
        try:
            content = parse_json(self._text(sidecar), pairs=JsonObject)
        except ValueError as error:
            raise RefusedError(
                Reason.BAD_CAPTION, f"{sidecar} is not JSON: {error}; correct it"
            ) from error
        if not isinstance(content, JsonObject):
            why = f"{sidecar} holds {short_repr(content)}; write an object with the field"
            raise RefusedError(Reason.BAD_CAPTION, f"{why} {self.field!r}")
        return content


def substitute(source: str, missing: MissingCaption) -> Caption:
    """The caption of the medium `source` if none was found: its file name, or the empty caption.

    Raises:
        RefusedError: `missing` is REFUSE.
    """
    if missing is MissingCaption.REFUSE:
        why = "no .json, .txt or table has one; add it, or leave --missing_caption refuse out"
        raise RefusedError(Reason.NO_CAPTION, why)
    if missing is MissingCaption.EMPTY:
        return Caption(text="", origin="nothing (empty)")
    return caption(PurePosixPath(source).stem.replace("_", " "), origin="the file name")


def texts_of(value: Any) -> tuple[str, ...] | None:
    """The captions in `value`, which may be a text or a list of texts; None if it is neither."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value and all(isinstance(text, str) for text in value):
        return tuple(value)
    return None


def weight_of(fields: Mapping[str, Any], path: str) -> float | None:
    """The `loss_weight` in `fields`; None if it is missing or empty.

    `path` names the JSON file or table row of these fields in messages.

    Raises:
        RefusedError: the value is not a number from 0 to 1,000,000.
    """
    value = fields.get("loss_weight")
    if value is None or value == "":
        return None
    try:
        weight = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        weight = math.nan
    if not 0 <= weight <= _LARGEST_WEIGHT:
        why = f"{path} has loss_weight {short_repr(value)}; give a number from 0 to"
        raise RefusedError(Reason.BAD_WEIGHT, f"{why} {_LARGEST_WEIGHT:g}")
    return weight


def texts_in(
    place: str, names: Sequence[str], fields: Mapping[str, Any], missing: MissingCaption
) -> tuple[str, ...]:
    """The captions in `fields`, from the first of the fields `names` that has any.

    A field that is null counts as the empty caption if `missing` is EMPTY. `place` names the file
    or row in messages.

    Raises:
        RefusedError: no field has a caption.
    """
    held = [name for name in names if name in fields]
    found = (texts_of(fields[name]) for name in held)
    texts = next((text for text in found if text is not None), None)
    if texts is not None:
        return texts
    is_null = bool(held) and all(fields[name] is None for name in held)
    if is_null and missing is MissingCaption.EMPTY:
        return ("",)
    said = [f"field {name!r} holds {short_repr(fields[name])}" for name in held]
    if held:
        remedy = f"write a text there{NULL_REMEDY if is_null else ''}"
        why = f"{' and '.join(said)}; {remedy}"
    else:
        found = ", ".join(short_repr(key) for key in list(fields)[:20]) or "none"
        why = f"there is no field {names[0]!r}; name one with --caption_field (fields: {found})"
    kind = Reason.NO_CAPTION if is_null else Reason.BAD_CAPTION
    raise RefusedError(kind, f"{place} has no caption: {why}")


def read_regular_file(path: Path) -> bytes:
    """The content of the file `path`, which must be regular: reading a pipe might never end.

    Raises:
        OSError: the file cannot be read.
        RefusedError: the path is not a regular file.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise RefusedError(
            Reason.BAD_CAPTION,
            f"{path.name} is not a regular file, but a folder, pipe or device; remove or replace"
            " it",
        )
    return path.read_bytes()


def decode_utf8(content: bytes, *, errors: str = "strict") -> str:
    """Decodes UTF-8, with or without a byte order mark; `errors` is that of `bytes.decode`.

    Raises:
        ValueError: the bytes are not UTF-8.
    """
    # Latin letters have zeros in UTF-16 and UTF-32, whether or not a byte order mark says so.
    if content.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in content[:4]:
        raise ValueError(_WIDE)
    try:
        return content.decode("utf-8-sig", errors)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8; save it as UTF-8") from None


def caption(text: str, *, origin: str, loss_weight: float | None = None) -> Caption:
    """A caption of `text` without surrounding white space, found in `origin`.

    Raises:
        RefusedError: `text` is not valid Unicode, or contains a NUL.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:  # bytes of a file name or of a table
        why = f"{origin} has bytes that are not UTF-8: {short_repr(text)}; write it in UTF-8"
        raise RefusedError(Reason.BAD_CAPTION, why) from error
    if "\0" in text:
        raise RefusedError(
            Reason.BAD_CAPTION, f"{origin} gives a text with a NUL character; remove it"
        )
    return Caption(text=text.strip(), origin=origin, loss_weight=loss_weight)
