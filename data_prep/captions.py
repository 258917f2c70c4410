"""The captions of a medium: from files beside it, from tables, else from its own name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Any

from data_prep.refusals import Reason, RefusedError

SIDECAR_ENDINGS = (".json", ".txt")

PRECEDENCE = """\
The caption of pictures/old_cat.jpg is, in this order: the field --caption_field of
pictures/old_cat.jpg.json or pictures/old_cat.json; the whole text of pictures/old_cat.jpg.txt or
pictures/old_cat.txt; the row that a table gives it (meta.json, captions.json, videos2caption.json,
*.jsonl, *.csv; tables in pictures/ before those in the folders above, and by name in one folder);
the caption column of a dataset; else what --missing_caption says. --caption_format looks at one
kind alone. Names in tables are paths relative to the table. An empty text file is an empty caption.
A .json file without the field, and with no .txt file beside it, is refused. Texts are UTF-8.
"""


class MissingCaption(StrEnum):
    """What becomes of a medium that has no caption."""

    FILENAME = "filename"
    EMPTY = "empty"
    REFUSE = "refuse"


class CaptionFormat(StrEnum):
    """Where captions are looked for."""

    AUTO = "auto"
    SIDECAR = "sidecar"
    META_JSON = "meta_json"
    JSONL = "jsonl"
    CSV = "csv"


@dataclass(frozen=True, kw_only=True, slots=True)
class Caption:
    """A text and where it is from."""

    text: str
    origin: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Captions:
    """Finds captions by path, never by bare name: two folders may hold a `0001.png` each."""

    root: Path
    sidecars: Mapping[str, str]
    """Relative path with a lower-case ending -> relative path as it is."""
    field: str
    """Field of a `.json` file; empty looks at no `.json` file."""
    missing: MissingCaption
    tables: Any = None
    """`CaptionTables`, or nothing."""
    read: Callable[[str], bytes] | None = None
    """Opens a caption file that lies in an archive; None reads below `root`."""

    def of(self, source: str) -> Caption:
        """The first caption of the medium at the relative path `source`.

        Raises:
            RefusedError: a caption file cannot be used, or there is none and `missing` is refuse.
        """
        return self.all_of(source)[0]

    def all_of(self, source: str) -> list[Caption]:
        """All captions of it, at least one.

        Raises:
            RefusedError: a caption file cannot be used, or there is none and `missing` is refuse.
        """
        described = self._beside(source, ".json") if self.field else None
        written = self._beside(source, ".txt")
        if described is not None:
            texts = self._from_json(described, may_lack=written is not None)
            if texts is not None:
                return [caption(text, origin=".json") for text in texts]
        if written is not None:
            return [caption(self._text(written), origin=".txt")]
        row = self.tables.of(source) if self.tables is not None else None
        if row is not None:
            return [caption(text, origin=PurePosixPath(row[1]).name) for text in row[0]]
        return [self.substitute(source)]

    def substitute(self, source: str) -> Caption:
        """What a medium without a caption gets.

        Raises:
            RefusedError: `missing` is refuse.
        """
        if self.missing is MissingCaption.REFUSE:
            raise RefusedError(
                Reason.NO_CAPTION, "neither .json nor .txt nor table, and --missing_caption refuse"
            )
        if self.missing is MissingCaption.EMPTY:
            return Caption(text="", origin="nothing (empty)")
        return caption(PurePosixPath(source).stem.replace("_", " "), origin="the file name")

    def _beside(self, source: str, ending: str) -> str | None:
        stem = str(PurePosixPath(source).with_suffix(""))
        return self.sidecars.get(source + ending) or self.sidecars.get(stem + ending)

    def _text(self, sidecar: str) -> str:
        try:
            content = self.read(sidecar) if self.read else (self.root / sidecar).read_bytes()
            return content.decode("utf-8-sig")
        except OSError as error:
            raise RefusedError(Reason.BAD_CAPTION, f"{sidecar}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise RefusedError(Reason.BAD_CAPTION, f"{sidecar} is not UTF-8: {error}") from error

    def _from_json(self, sidecar: str, *, may_lack: bool) -> tuple[str, ...] | None:
        try:
            content = json.loads(self._text(sidecar))
        except ValueError as error:
            raise RefusedError(Reason.BAD_CAPTION, f"{sidecar} is no JSON: {error}") from error
        fields = content if isinstance(content, dict) else {}
        value = fields.get(self.field)
        if isinstance(value, str) or (value is None and may_lack):
            return None if value is None else (value,)
        if isinstance(value, list) and value and all(isinstance(text, str) for text in value):
            return tuple(value)
        found = ", ".join(map(repr, fields)) or "no fields"
        raise RefusedError(
            Reason.BAD_CAPTION,
            f"{sidecar} has no text in field {self.field!r}, but {found}; name the field with"
            " --caption_field",
        )


def caption(text: str, *, origin: str) -> Caption:
    """A text without the space around it.

    Raises:
        RefusedError: it is no Unicode.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, from JSON or a file name
        raise RefusedError(
            Reason.BAD_CAPTION, f"{origin} gives no valid Unicode: {error}"
        ) from error
    return Caption(text=text.strip(), origin=origin)
