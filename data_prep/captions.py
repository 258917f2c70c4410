"""The caption of a medium: from a file beside it, else from its own name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath

from data_prep.refusals import Reason, RefusedError

SIDECAR_ENDINGS = (".json", ".txt")

PRECEDENCE = """\
The caption of pictures/old_cat.jpg is, in this order: the field --caption_field of
pictures/old_cat.jpg.json or pictures/old_cat.json; the whole text of pictures/old_cat.jpg.txt or
pictures/old_cat.txt; else what --missing_caption says. An empty text file is an empty caption. A
.json file without the field, and with no .txt file beside it, is refused. Texts are UTF-8.
"""


class MissingCaption(StrEnum):
    """What becomes of a medium that has no caption file."""

    FILENAME = "filename"
    EMPTY = "empty"
    REFUSE = "refuse"


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

    def of(self, source: str) -> Caption:
        """The caption of the medium at the relative path `source`.

        Raises:
            RefusedError: a caption file cannot be used, or there is none and `missing` is refuse.
        """
        described = self._beside(source, ".json") if self.field else None
        written = self._beside(source, ".txt")
        if described is not None:
            text = self._from_json(described, may_lack=written is not None)
            if text is not None:
                return _caption(text, origin=".json")
        if written is not None:
            return _caption(self._text(written), origin=".txt")
        if self.missing is MissingCaption.REFUSE:
            raise RefusedError(
                Reason.NO_CAPTION, "neither .json nor .txt, and --missing_caption refuse"
            )
        if self.missing is MissingCaption.EMPTY:
            return Caption(text="", origin="nothing (empty)")
        return _caption(PurePosixPath(source).stem.replace("_", " "), origin="the file name")

    def _beside(self, source: str, ending: str) -> str | None:
        stem = str(PurePosixPath(source).with_suffix(""))
        return self.sidecars.get(source + ending) or self.sidecars.get(stem + ending)

    def _text(self, sidecar: str) -> str:
        try:
            return (self.root / sidecar).read_bytes().decode("utf-8-sig")
        except OSError as error:
            raise RefusedError(Reason.BAD_CAPTION, f"{sidecar}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise RefusedError(Reason.BAD_CAPTION, f"{sidecar} is not UTF-8: {error}") from error

    def _from_json(self, sidecar: str, *, may_lack: bool) -> str | None:
        try:
            content = json.loads(self._text(sidecar))
        except ValueError as error:
            raise RefusedError(Reason.BAD_CAPTION, f"{sidecar} is no JSON: {error}") from error
        fields = content if isinstance(content, dict) else {}
        text = fields.get(self.field)
        if isinstance(text, str) or (text is None and may_lack):
            return text
        found = ", ".join(map(repr, fields)) or "no fields"
        raise RefusedError(
            Reason.BAD_CAPTION,
            f"{sidecar} has no text in field {self.field!r}, but {found}; name the field with"
            " --caption_field",
        )


def _caption(text: str, *, origin: str) -> Caption:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, from JSON or a file name
        raise RefusedError(
            Reason.BAD_CAPTION, f"{origin} gives no valid Unicode: {error}"
        ) from error
    return Caption(text=text.strip(), origin=origin)
