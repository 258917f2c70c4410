"""Media of a Hugging Face dataset, given as bytes, paths or URLs."""

from __future__ import annotations

import hashlib
import http.client
import io
import time
import urllib.error
import urllib.request
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from data_prep.media.captions import (
    NULL_REMEDY,
    Caption,
    MissingCaption,
    caption,
    substitute,
    texts_of,
    weight_of,
)
from data_prep.refusals import PrepError, Reason, RefusedError, short_repr
from data_prep.sources.folders import CaptionOptions, Medium
from data_prep.sources.listing import Ignored
from data_prep.writing.dataset_folder import LEDGER
from dit.safe_writing import write_atomically
from dit.system_errors import explained

_IMAGE_COLUMNS = ("image", "jpg", "jpeg", "png", "webp", "image_url", "url")
_VIDEO_COLUMNS = ("video", "mp4", "file", "video_path", "path", "video_url")
_CAPTION_COLUMNS = ("caption", "text", "prompt", "description")
_TRIES, _FIRST_WAIT, _TIMEOUT = 4, 0.5, 30  # seconds; each wait is twice as long as the one before


def huggingface_rows(args: Namespace, captions: CaptionOptions) -> RowsCollection:
    """The media of the Hugging Face dataset that the options in `args` name.

    Columns that are not named are found by their usual names.

    Raises:
        PrepError: the dataset cannot be opened, or lacks a column.
    """
    name, split = str(args.hf_dataset), args.dataset_split
    columns = _dataset(name, split).column_names
    image = _column(args.image_column, () if args.video_column else _IMAGE_COLUMNS, columns)
    video = None if image else _column(args.video_column, _VIDEO_COLUMNS, columns)
    medium = image or video
    if medium is None:
        raise PrepError(
            f"--hf_dataset {name} has the columns {', '.join(columns)}; name the one that holds the"
            " media with --image_column or --video_column"
        )
    return RowsCollection(
        dataset=name,
        split=split,
        column=medium,
        kind="image" if image else "video",
        caption_column=_column(args.caption_column, _CAPTION_COLUMNS, columns),
        captions=captions,
        fetched=args.output_dir / LEDGER / "fetched",
    )


def _column(asked: str | None, usual: Sequence[str], columns: Sequence[str]) -> str | None:
    if asked is not None and asked not in columns:
        raise PrepError(
            f"--hf_dataset has no column {asked!r}; name one of {', '.join(columns)} with"
            " --image_column, --video_column or --caption_column"
        )
    return asked or next((name for name in usual if name in columns), None)


@cache
def _dataset(name: str, split: str) -> Any:
    """Opens the split of a dataset on disk or on the hub; its media are not decoded.

    Raises:
        PrepError: the split cannot be opened, or the package `datasets` is missing.
    """
    try:
        # Imported by name: pyright would read its whole source, for minutes.
        datasets: Any = import_module("datasets")
    except ImportError:
        raise PrepError(
            "--hf_dataset needs the package `datasets`; install it with pip install"
            " 'megatron-dit[prep]'"
        ) from None
    try:
        saved = (Path(name) / "state.json").exists() or (Path(name) / "dataset_dict.json").exists()
        if saved:
            # Absolute, because fsspec reads a relative `data:photos` as a data URL.
            found: Any = datasets.load_from_disk(str(Path(name).absolute()))
            found = found[split] if isinstance(found, dict) else found
        else:
            found = datasets.load_dataset(name, split=split)
    except (OSError, ValueError, KeyError) as error:
        raise PrepError(
            f"--hf_dataset {name}, --dataset_split {split}, cannot be opened: {explained(error)};"
            " give a folder or hub name, and a split that it has"
        ) from None
    for column, feature in found.features.items():
        if isinstance(feature, datasets.Image | datasets.Video):
            found = found.cast_column(column, type(feature)(decode=False))
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsCollection:
    """The media of a Hugging Face dataset, one in each row, as a `Collection`."""

    dataset: str
    split: str
    column: str
    kind: str
    caption_column: str | None
    captions: CaptionOptions
    fetched: Path
    """Folder of downloaded files, so that each URL is fetched once."""
    controls: tuple[()] = ()
    masks: None = None
    rejected: None = None

    @property
    def name(self) -> str:
        return Path(self.dataset).name

    def media(self, ignored: Ignored) -> Iterator[Medium]:
        del ignored
        rows = _dataset(self.dataset, self.split)
        print_ = str(rows._fingerprint)
        for index in range(len(rows)):
            yield Medium(
                source=f"{self.split}/{index:08d}",
                where=str(index),
                stamp=print_,
                kind=self.kind,
                captions=lambda index=index: self._captions(index),
            )

    def _captions(self, index: int) -> list[Caption]:
        row = _dataset(self.dataset, self.split)[index]
        value = row.get(self.caption_column) if self.caption_column else None
        texts, weight = texts_of(value), weight_of(row, f"row {index}")
        if texts is not None:
            origin = f"column {self.caption_column}"
            return [caption(text, origin=origin, loss_weight=weight) for text in texts]
        if value is not None:
            why = f"row {index} has {short_repr(value)} in column {self.caption_column!r}; write"
            raise RefusedError(Reason.BAD_CAPTION, f"{why} a text there, or name another column")
        if self.captions.missing is not MissingCaption.EMPTY:  # rows have no file names
            why = f"row {index} has null in column {self.caption_column!r}; write a text there"
            if self.caption_column is None:
                why = "no column is known to hold captions; name one with --caption_column"
            raise RefusedError(Reason.NO_CAPTION, f"{why}{NULL_REMEDY}")
        return [replace(substitute("", self.captions.missing), loss_weight=weight)]

    def open(self, where: str) -> Path | BinaryIO:
        value = _dataset(self.dataset, self.split)[int(where)][self.column]
        if isinstance(value, dict):
            value = value.get("bytes") or value.get("path")
        if isinstance(value, bytes):
            return io.BytesIO(value)
        if not isinstance(value, str):
            raise RefusedError(
                Reason.UNREADABLE,
                f"row {where}: column {self.column!r} holds {short_repr(value)}, neither bytes nor"
                " a path or URL; name another column with --image_column or --video_column",
            )
        if value.startswith(("http://", "https://")):
            return self._fetch(value)
        return Path(value) if Path(value).is_absolute() else Path(self.dataset) / value

    def _fetch(self, address: str) -> Path:
        path = self.fetched / hashlib.blake2b(address.encode(), digest_size=16).hexdigest()
        if not path.exists():
            content = _content(address)
            self.fetched.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content)
        return path


def _content(address: str) -> bytes:
    """Downloads the content of a URL; tries again after errors of the network or server.

    Raises:
        RefusedError: all tries failed, or the server refused the request.
    """
    wait, problem = _FIRST_WAIT, ""
    for read_or_refuse in range(1, _TRIES + 1):
        try:
            request = urllib.request.Request(address, headers={"User-Agent": "megatron-dit"})
            with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
                content = answer.read()
                promised = answer.headers.get("Content-Length")
            if promised is None or int(promised) == len(content):
                return content
            problem = f"{len(content)} of {promised} bytes came"
        except urllib.error.HTTPError as error:
            problem = f"{error.code} {error.reason}"
            if error.code in (400, 401, 403, 404, 410):
                break
        except (OSError, ValueError, http.client.HTTPException) as error:
            problem = explained(error)
        if read_or_refuse < _TRIES:
            time.sleep(wait)
            wait *= 2
    raise RefusedError(
        Reason.NOT_FETCHED, f"{address}: {problem}; correct the address, or run the command again"
    )
