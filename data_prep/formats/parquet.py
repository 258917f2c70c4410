"""Reads and writes Parquet files of FastVideo: columns for bytes, shape and type of each tensor.

`vae_latent` is the autoencoder's output without normalisation, because FastVideo's training
normalises it; `first_frame_latent` is normalised. For Wan, FastVideo's `first_frame_latent` has all
frames: it is our `condition_latent`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_prep.formats.cached_samples import (
    CachedSample,
    RefusedRecord,
    checked_description,
    numbers,
    read_or_refuse,
    to_text,
)
from data_prep.planning.splits import key_of
from data_prep.refusals import PrepError, Reason, RefusedError
from dit.codecs.normalization import Whitening
from dit.safe_writing import TEMPORARY
from dit.stored_samples import check_regular
from dit.system_errors import explained

FOLDER = "combined_parquet_dataset"
_NAMES = {
    "latent": "vae_latent",
    "text": "text_embedding",
    "image_embed": "clip_feature",
    "first_frame_latent": "first_frame_latent",
    "pooled_text": "pooled_text_embedding",
    "text_2": "text_embedding_2",
}
HELD = {*_NAMES, "condition_latent"}
"""Names of the tensors of a sample for which FastVideo's Parquet has columns."""
_TYPES = ("float16", "float32", "float64")
_MOST_AXES = 8


def _arrow() -> Any:
    try:
        # Imported by name: pyright would read its whole source, for minutes.
        pyarrow = import_module("pyarrow")
        import_module("pyarrow.parquet")
    except ImportError:
        raise PrepError(
            "Parquet needs the package pyarrow; install it with pip install 'megatron-dit[prep]'"
        ) from None
    return pyarrow


def write_parquet(
    records: Iterable[CachedSample],
    folder: Path,
    *,
    rows_in_file: int,
    whitening: Whitening | None = None,
) -> int:
    """Writes samples as `data_chunk_0.parquet`, ... below `folder`; returns their number.

    Each file has `rows_in_file` samples, the last one maybe fewer. If `whitening` is given, the
    latents are written without this normalisation.
    """
    arrow, rows, total = _arrow(), iter(records), 0
    target = folder.absolute() / FOLDER  # pyarrow reads a relative `wan:lora` as a URL
    target.mkdir(exist_ok=True)
    for number, chunk in enumerate(iter(lambda: list(islice(rows, rows_in_file)), [])):
        table = arrow.Table.from_pylist([_row(record, whitening) for record in chunk])
        path = target / f"data_chunk_{number}.parquet"
        unfinished = path.with_name(path.name + TEMPORARY)
        arrow.parquet.write_table(table, unfinished, compression="zstd")
        unfinished.rename(path)
        total += len(chunk)
    return total


def _row(record: CachedSample, whitening: Whitening | None) -> dict[str, Any]:
    about = record.about
    fps = about["fps"] or 0.0
    row: dict[str, Any] = {
        "id": record.key,
        "file_name": about["source"],
        "caption": about["caption"],
        "media_type": "video" if about["num_frames"] > 1 else "image",
        "width": about["width"],
        "height": about["height"],
        "num_frames": record.tensors["latent"].shape[1],  # of the latent, as in FastVideo
        "duration_sec": about["num_frames"] / fps if fps else 0.0,
        "fps": float(fps),
    }
    tensors = {name: tensor for name, tensor in record.tensors.items() if name in HELD}
    if whitening is not None:
        tensors["latent"] = whitening.undo(tensors["latent"])
    if "condition_latent" in tensors:
        tensors["first_frame_latent"] = tensors.pop("condition_latent")
    for name, tensor in tensors.items():
        # FastVideo's reader reads every tensor as float32, whatever the type column says.
        values = tensor.float().contiguous().numpy()
        column = _NAMES[name]
        row[f"{column}_bytes"] = values.tobytes()
        row[f"{column}_shape"] = list(values.shape)
        row[f"{column}_dtype"] = str(values.dtype)
    return row


def read_parquet(folder: Path) -> Iterator[CachedSample | RefusedRecord]:
    """Yields every row of every Parquet file below `folder` as a sample, or its refusal."""
    arrow = _arrow()
    for path in sorted(folder.absolute().rglob("*.parquet")):
        try:
            check_regular(path)
            with arrow.parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=16):
                    for row in batch.to_pylist():
                        name = f"{path.name}, {row.get('file_name') or row.get('id')}"
                        yield read_or_refuse(name, partial(_record, row))
        # Text that is no UTF-8 and huge sizes raise errors when rows become Python objects.
        except (arrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
            detail = (
                f"the rest of the file is unread ({type(error).__name__}: {explained(error)});"
                " copy or write the file again"
            )
            yield RefusedRecord(source=path.name, reason=Reason.UNREADABLE, detail=detail)


def _record(row: dict[str, Any]) -> CachedSample:
    tensors = {
        ours: _tensor(row, theirs) for ours, theirs in _NAMES.items() if row.get(f"{theirs}_bytes")
    }
    tensors["latent"] = numbers(tensors.get("latent"), "CFHW", what="latent")
    tensors["text"] = to_text(tensors.get("text"))
    if "pooled_text" in tensors:
        tensors["pooled_text"] = numbers(tensors["pooled_text"], "E", what="pooled text")
    if "image_embed" in tensors:
        tensors["image_embed"] = numbers(tensors["image_embed"], "LE", what="clip_feature")
    if "first_frame_latent" in tensors:
        tensors |= _condition(tensors["first_frame_latent"], frames=tensors["latent"].shape[1])
    if not isinstance(row.get("id"), str | int):
        raise RefusedError(
            Reason.UNREADABLE,
            f"id={row.get('id')!r:.100} is neither a text nor a whole number; write one of these",
        )
    about = _about(row, latent_frames=tensors["latent"].shape[1])
    return CachedSample(
        key=key_of(str(row["id"])), tensors=tensors, about=checked_description(about)
    )


def _condition(value: Tensor, *, frames: int) -> dict[str, Tensor]:
    """Makes our tensors, by name, from `value`, which is a row's tensor `first_frame_latent`.

    Our `first_frame_latent` is the first frame of `value`. If `value` has as many frames as the
    sample's latent (`frames`), it is also our `condition_latent`.
    """
    latent = numbers(value, "CFHW", what="first_frame_latent")
    first = {"first_frame_latent": latent[:, :1].clone()}
    return first | {"condition_latent": latent} if latent.shape[1] == frames else first


def _about(row: dict[str, Any], *, latent_frames: int) -> dict[str, Any]:
    width, height = row.get("width") or 0, row.get("height") or 0
    fps, seconds = row.get("fps") or None, row.get("duration_sec") or 0
    frames = round(seconds * (fps or 0)) or latent_frames
    return {
        "caption": row.get("caption") or "",
        "source": row.get("file_name") or str(row["id"]),
        "width": width,
        "height": height,
        "original_width": width,
        "original_height": height,
        "num_frames": frames,
        "fps": fps,
    }


def _tensor(row: dict[str, Any], name: str) -> Tensor:
    dtype, content = row.get(f"{name}_dtype") or "float32", row[f"{name}_bytes"]
    shape = row.get(f"{name}_shape")
    if not isinstance(content, bytes) or not isinstance(shape, list):
        kinds = f"{type(content).__name__} and {type(shape).__name__}"
        raise RefusedError(
            Reason.UNREADABLE,
            f"{name}_bytes and {name}_shape hold {kinds}, not bytes and a list; write the row anew",
        )
    if not all(type(n) is int and n >= 0 for n in shape) or len(shape) > _MOST_AXES:
        raise RefusedError(
            Reason.UNREADABLE,
            f"{name}_shape={shape!r:.100} is not the shape of a tensor; write at most {_MOST_AXES}"
            " whole numbers, none below 0",
        )
    # Bytes for float32 are read as float32, even if the type column says otherwise: FastVideo's
    # reader does the same.
    if math.prod(shape) * 4 == len(content):
        dtype = "float32"
    if dtype not in _TYPES or math.prod(shape) * np.dtype(dtype).itemsize != len(content):
        raise RefusedError(
            Reason.UNREADABLE,
            f"{name}_dtype={dtype!r:.100} and {name}_shape={shape} do not fit the {len(content)}"
            f" bytes of {name}_bytes; write the row again",
        )
    return torch.from_numpy(np.frombuffer(content, dtype).reshape(shape).copy())
