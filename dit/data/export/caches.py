"""The samples of a cache of AutoModel, and `open_samples` for any known folder."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dit.data.datasets import META
from dit.data.export.samples import EXPORTED, NumberedSamples, ShardSamples, StoredSample
from dit.data.records import LATENT, ShardRecord, fps_of, in_shape, shaped
from dit.data.rejections import DataError
from dit.models.family import InputKind
from dit.parsing import cause
from dit.stored_samples import (
    INDEX,
    UnusableError,
    automodel_file,
    automodel_files,
    automodel_rows,
    automodel_sizes,
    automodel_tensors,
    read_json,
    trim_padding,
    unmasked,
)


def open_samples(folder: Path | str, *, split: str) -> NumberedSamples:
    """The samples of a dataset folder, or of a cache of AutoModel (all in the split `train`).

    Raises:
        DataError: the folder is neither, lacks the split, or a sample cannot be read.
    """
    folder = Path(folder)
    if (folder / META).exists() or not (folder / INDEX).is_file():
        return ShardSamples(folder, split=split)
    if split != "train":
        raise DataError(f"{folder} is a cache of AutoModel without a split `{split}`; give `train`")
    return CacheSamples(folder)


class CacheSamples(NumberedSamples):
    """All samples of a cache of AutoModel, in the order of its index.

    The cache may have been moved. Text rows that a mask leaves out do not belong to a sample.

    Raises:
        DataError: the index is damaged, or a sample cannot be read. No sample is skipped.
    """

    def __init__(self, folder: Path | str):
        self.remedy = "restore it, or make the cache again: other trainers need every sample"
        self._root = Path(folder).resolve()
        try:
            self._rows = list(_rows(self._root))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise DataError(
                f"{self._root / INDEX}, the index of the cache, cannot be read ({cause(error)});"
                " restore it, or make the cache again"
            ) from error
        if not self._rows:
            raise DataError(
                f"{self._root / INDEX} lists no samples; restore it, or make the cache again"
            )
        super().__init__(folder, count=len(self._rows), card={})

    def read(self, index: int, *, whole: bool) -> StoredSample:
        row = self._rows[index]
        size, before = automodel_sizes(row)
        path = automodel_file(self._root, row)
        if path is None:
            raise FileNotFoundError(f"the index of the cache lists a file that {self._root} lacks")
        content = _content(path, whole=whole)
        record = _record({"prompt": row.get("prompt", ""), **content}, whole=whole)
        text = automodel_tensors(content)["text"]
        return StoredSample(
            key=f"{path.parent.name}/{path.stem}",
            record=record,
            about=_about(row, content, before),
            size=size,
            text_rows=0 if text is None else text.shape[-2],
        )

    def name_of(self, index: int) -> str:
        return f"{self._root}, {self._rows[index].get('cache_file', f'sample {index}')}"


def _content(path: Path, *, whole: bool) -> dict[str, Any]:
    """The dict that `torch.save` wrote to `path`; reads tensor data only if `whole`.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is damaged, or does not hold a dict of tensors and plain values.
    """
    try:
        # Checked here, because torch reads a file with a wrong checksum as if it were right.
        if whole and (damaged := zipfile.ZipFile(path).testzip()):
            raise ValueError(f"{damaged} in the file does not match its checksum")
        content = torch.load(path, map_location="cpu", mmap=not whole, weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            "the file is damaged, or holds more than tensors and plain values"
        ) from error
    except (zipfile.BadZipFile, RuntimeError, EOFError, LookupError) as error:
        raise ValueError(str(error).partition(". ")[0] or cause(error)) from error
    if not isinstance(content, dict):
        raise ValueError(f"the file holds a {type(content).__name__}, not a dict")
    return content


def _record(content: dict[str, Any], *, whole: bool) -> ShardRecord:
    """The record in the `content` of a sample's file; texts keep their padding unless `whole`."""
    given = automodel_tensors(content)
    inputs = shaped(given, EXPORTED)
    if whole and content.get("video_latents") is not None:
        for name, mask in (("text", "text_mask"), ("text_2", "text_mask_2")):
            if name in inputs and content.get(mask) is None:
                inputs[name] = trim_padding(inputs[name])
            elif name in inputs:
                inputs[name] = unmasked(inputs[name], content[mask], what=mask)
    return ShardRecord(
        latent_CFHW=in_shape(given[LATENT], InputKind.CHANNELS, what=LATENT),
        inputs=inputs,
        fps=fps_of(content),
        caption=str(content.get("prompt", "")),
    )


def _rows(root: Path) -> list[dict[str, Any]]:
    rows = list[dict[str, Any]]()
    for name in automodel_files(root, read_json(root / INDEX)):
        found = automodel_rows(root / name)
        if not all(isinstance(row, dict) for row in found):
            raise UnusableError(f"{name} is not a list with an object for each sample")
        rows += found
    return rows


def _about(
    row: Mapping[str, Any], content: Mapping[str, Any], before: tuple[int, int]
) -> dict[str, Any]:
    """Description of a sample, with the field names in this project's shards."""
    source = row.get("image_path") or row.get("video_path") or content.get("image_path")
    return {
        "source": str(source or row.get("cache_file")),
        "original_width": before[0],
        "original_height": before[1],
        **{name: row[name] for name in ("num_frames", "bucket_id", "aspect_ratio") if name in row},
        **({"crop_offset": list(content["crop_offset"])} if "crop_offset" in content else {}),
    }
