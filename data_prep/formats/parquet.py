"""FastVideo's Parquet: each tensor as three columns, its bytes, shape and type."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_prep.files import TEMPORARY
from data_prep.formats.records import Record, as_latent, as_text, damage_refused
from data_prep.refusals import PrepError, Reason, RefusedError
from data_prep.splits import key_of

FOLDER = "combined_parquet_dataset"
_NAMES = {
    "latent": "vae_latent",
    "text": "text_embedding",
    "image_embed": "clip_feature",
    "first_frame_latent": "first_frame_latent",
    "pooled_text": "pooled_text_embedding",
    "text_2": "text_embedding_2",
}


def _arrow() -> Any:
    try:
        # By name: the checker of types would follow all of its source for minutes.
        pyarrow = import_module("pyarrow")
        import_module("pyarrow.parquet")
    except ImportError:
        raise PrepError(
            "Parquet needs the package pyarrow; install it with pip install 'megatron-dit[prep]'"
        ) from None
    return pyarrow


def write_parquet(records: Iterable[Record], folder: Path, *, rows_in_file: int) -> int:
    """Writes `data_chunk_0.parquet`, ... below `folder`; returns the number of samples."""
    arrow, rows, total = _arrow(), iter(records), 0
    target = folder / FOLDER
    target.mkdir(exist_ok=True)
    for number, chunk in enumerate(iter(lambda: list(islice(rows, rows_in_file)), [])):
        table = arrow.Table.from_pylist([_row(record) for record in chunk])
        path = target / f"data_chunk_{number}.parquet"
        unfinished = path.with_name(path.name + TEMPORARY)
        arrow.parquet.write_table(table, unfinished, compression="zstd")
        unfinished.rename(path)
        total += len(chunk)
    return total


def _row(record: Record) -> dict[str, Any]:
    about = record.about
    fps = about["fps"] or 0.0
    row: dict[str, Any] = {
        "id": record.key,
        "file_name": about["source"],
        "caption": about["caption"],
        "media_type": "video" if about["num_frames"] > 1 else "image",
        "width": about["width"],
        "height": about["height"],
        "num_frames": record.tensors["latent"].shape[1],  # of the latent, as there
        "duration_sec": about["num_frames"] / fps if fps else 0.0,
        "fps": float(fps),
    }
    for name, tensor in record.tensors.items():
        # Their reader takes every tensor for float32, whatever the type says.
        values = tensor.float().contiguous().numpy()
        column = _NAMES[name]
        row[f"{column}_bytes"] = values.tobytes()
        row[f"{column}_shape"] = list(values.shape)
        row[f"{column}_dtype"] = str(values.dtype)
    return row


def read_parquet(folder: Path) -> Iterator[Record | RefusedError]:
    """Every row of every Parquet file below `folder`."""
    arrow = _arrow()
    for path in sorted(folder.rglob("*.parquet")):
        try:
            with arrow.parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=16):
                    for row in batch.to_pylist():
                        yield _record(row, path.name)
        except (arrow.ArrowException, OSError) as error:
            yield RefusedError(Reason.UNREADABLE, f"{path.name}: {error}")


def _record(row: dict[str, Any], source: str) -> Record | RefusedError:
    name = str(row.get("file_name") or row.get("id"))
    try:
        with damage_refused(f"{source}, {name}"):
            tensors = {
                ours: _tensor(row, theirs)
                for ours, theirs in _NAMES.items()
                if row.get(f"{theirs}_bytes")
            }
            tensors["latent"] = as_latent(tensors.get("latent"), f"{source}, {name}")
            tensors["text"] = as_text(tensors.get("text"), f"{source}, {name}")
            about = _about(row, name, latent_frames=tensors["latent"].shape[1])
            return Record(key=key_of(str(row["id"])), tensors=tensors, about=about)
    except RefusedError as refused:
        return refused


def _about(row: dict[str, Any], name: str, *, latent_frames: int) -> dict[str, Any]:
    width, height = row.get("width") or 0, row.get("height") or 0
    fps = row.get("fps") or None
    frames = round((row.get("duration_sec") or 0) * (fps or 0)) or latent_frames
    return {
        "caption": row.get("caption") or "",
        "source": name,
        "width": width,
        "height": height,
        "original_width": width,
        "original_height": height,
        "num_frames": frames,
        "fps": fps,
    }


def _tensor(row: dict[str, Any], name: str) -> Tensor:
    dtype, content = row.get(f"{name}_dtype") or "float32", row[f"{name}_bytes"]
    shape = row[f"{name}_shape"]
    # Where size and type disagree, the reader that the files were made for is right: float32.
    if int(np.prod(shape)) * 4 == len(content):
        dtype = "float32"
    return torch.from_numpy(np.frombuffer(content, np.dtype(dtype)).reshape(shape).copy())
