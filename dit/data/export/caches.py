"""The samples of a cache of AutoModel, and which kind of folder is read how."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dit.data.datasets import META
from dit.data.export.samples import EXPORTED, NumberedSamples, StoredSample
from dit.data.export.shard_samples import ShardSamples
from dit.data.records import read_automodel
from dit.data.rejections import DataError
from dit.parsing import cause, parse_json

_INDEX = "metadata.json"


def open_samples(folder: Path | str, *, split: str) -> NumberedSamples:
    """The samples of a dataset folder, or of a cache of AutoModel.

    Raises:
        DataError: it is neither, or a sample cannot be read.
    """
    folder = Path(folder)
    if (folder / META).exists() or not (folder / _INDEX).is_file():
        return ShardSamples(folder, split=split)
    if split != "train":
        raise DataError(f"{folder} is a cache of AutoModel, which has no split `{split}`")
    return CacheSamples(folder)


class CacheSamples(NumberedSamples):
    """All samples of a cache, in the order of its index.

    The cache may have been moved. Rows of a text that its mask leaves out are not part of it.

    Raises:
        DataError: the index is damaged, or a sample cannot be read. Nothing is left out.
    """

    def __init__(self, folder: Path | str):
        self.remedy = "restore it, or make the cache again: other trainers need every sample"
        self._root = Path(folder).resolve()
        try:
            self._rows = list(_rows(self._root))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise DataError(
                f"{self._root / _INDEX} cannot be read ({cause(error)});"
                " restore the index of the cache"
            ) from error
        if not self._rows:
            raise DataError(f"{self._root / _INDEX} lists no samples; restore the cache")
        super().__init__(folder, count=len(self._rows), card={})

    def read(self, index: int, *, whole: bool) -> StoredSample:
        row = self._rows[index]
        width, height = _resolution(row, "bucket_resolution", "crop_resolution")
        path = self._file(row)
        content = _content(path, whole=whole)
        caption = {"prompt": content.get("prompt", row.get("prompt", ""))}
        record = read_automodel(content | caption, EXPORTED, whole=whole)
        text = content.get("text_embeddings", content.get("prompt_embeds"))
        return StoredSample(
            key=f"{path.parent.name}/{path.stem}",
            record=record,
            about=_about(row, content, (width, height)),
            size=(width, height),
            text_rows=0 if text is None else text.shape[-2],
        )

    def name_of(self, index: int) -> str:
        return f"{self._root}, {self._rows[index].get('cache_file', f'sample {index}')}"

    def _file(self, row: Mapping[str, Any]) -> Path:
        """The present path of a sample's file: the index has that of before a move.

        Raises:
            OSError: it is not there.
        """
        parts = Path(row.get("cache_file", "")).parts
        for path in (self._root.joinpath(*parts[-2:]), self._root.joinpath(*parts[-1:])):
            if ".." not in parts and path.is_file():
                return path
        raise FileNotFoundError(f"no such file in {self._root}")


def _content(path: Path, *, whole: bool) -> dict[str, Any]:
    """What `torch.save` wrote; unless `whole`, its numbers are not read.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged, or holds something else.
    """
    try:
        # Without its own check, torch reads a file with a wrong checksum as if it were right.
        if whole and (damaged := zipfile.ZipFile(path).testzip()):
            raise ValueError(f"{damaged} does not match its checksum")
        content = torch.load(path, map_location="cpu", mmap=not whole, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError("it is damaged, or holds more than tensors and plain values") from error
    except (zipfile.BadZipFile, RuntimeError, EOFError, LookupError) as error:
        raise ValueError(str(error).partition(". ")[0] or cause(error)) from error
    if not isinstance(content, dict):
        raise ValueError(f"it holds a {type(content).__name__}, no dict")
    return content


def _rows(root: Path) -> list[dict[str, Any]]:
    index, rows = parse_json((root / _INDEX).read_bytes()), list[dict[str, Any]]()
    for name in index["shards"]:
        if Path(name).name != name:
            raise ValueError(f"{name!r} is no name of a file beside the index")
        found = parse_json((root / name).read_bytes())
        if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
            raise ValueError(f"{name} is no list of samples")
        rows += found
    return rows


def _resolution(row: Mapping[str, Any], *names: str) -> tuple[int, int]:
    value = next((row[name] for name in names if name in row), None)
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int for n in value):
        raise ValueError(f"{' or '.join(names)}={value!r:.100} is not [width, height]")
    return value[0], value[1]


def _about(
    row: Mapping[str, Any], content: Mapping[str, Any], size: tuple[int, int]
) -> dict[str, Any]:
    """The description of a sample, with the names of our shards where they have one."""
    before = _resolution(row, "original_resolution") if "original_resolution" in row else size
    source = row.get("image_path") or row.get("video_path") or content.get("image_path")
    return {
        "source": str(source or row.get("cache_file")),
        "original_width": before[0],
        "original_height": before[1],
        **{name: row[name] for name in ("num_frames", "bucket_id", "aspect_ratio") if name in row},
        **({"crop_offset": list(content["crop_offset"])} if "crop_offset" in content else {}),
    }
