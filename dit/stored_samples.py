"""Formats of other tools' samples, which `data_prep` and `dit/data` both read.

- tensors in our shapes, with or without leading axes of length 1 - the cache of NeMo AutoModel: a
file for each sample in `WxH/`, and an index of all samples - the texts of NVIDIA's DFM - the shards
of MLPerf Training's FLUX.1: parts of a record in bfloat16, null texts beside them
"""

# C latent channels; F H W frames, rows, columns of the latent; L text tokens; E text width

from __future__ import annotations

import io
import math
import stat
import tarfile
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from dit.parsing import parse_json

INDEX = "metadata.json"
AUTOMODEL: Mapping[str, str] = {
    "pooled_text": "pooled_prompt_embeds",
    "text_2": "text_embeddings_2",
    "first_frame_latent": "first_frame_latent",
    "condition_latent": "condition_latent",
    "image_embed": "image_embeds",
}
"""Our names of tensors beside latent and text, and those of AutoModel's caches."""
MLPERF: Mapping[str, str] = {
    "text": "t5.bytes",
    "pooled_text": "clip.bytes",
    "latent": "mean.bytes",
    "latent_logvar": "logvar.bytes",
}
"""Our names of tensors, and the parts of a record in shards of MLPerf."""
MLPERF_NULL: Mapping[str, str] = {"text": "t5_empty.npy", "pooled_text": "clip_empty.npy"}
"""The files that hold the embeddings of an empty caption."""
LEVELS = 8
"""Number of fixed noise levels k / 8 of validation; the `.json` of a sample may name k."""
MLPERF_AXES: Mapping[str, str] = {
    "text": "LE",
    "pooled_text": "E",
    "latent": "CHW",
    "latent_logvar": "CHW",
}
MLPERF_SHIFT, MLPERF_SCALE = 0.1159, 0.3611
MLPERF_WIDTHS = {"text": 4096, "pooled_text": 768, "latent": 16, "latent_logvar": 16}
_STRIDE = 8  # pixels along a side of a latent cell
"""Latents of training are (latent - shift) * scale, by the autoencoder of FLUX.1."""
MLPERF_HEAD = 256
"""Bytes of a part that say its shape."""
_NPY = b"\x93NUMPY"
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class UnusableError(ValueError):
    """A file holds something other than a sample; the message says what."""


def with_axes(value: Any, axes: str, *, what: str) -> Tensor:
    """A tensor or array of floats as a tensor with `axes`: a latent CFHW, rows LE or a vector E.

    Leading axes of length 1 are dropped. A latent may lack F, and is never empty.

    Raises:
        UnusableError: it has other axes.
    """
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if not isinstance(value, Tensor) or value.dtype not in _FLOATS:
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise UnusableError(f"{what} is {kind}, not a tensor of floats")
    while value.dim() > len(axes) and value.shape[0] == 1:
        value = value[0]
    if axes == "CFHW" and value.dim() == 3:
        value = value[:, None]
    if value.dim() != len(axes) or (axes == "CFHW" and value.numel() == 0):
        raise UnusableError(f"{what} has shape {list(value.shape)}, not [{', '.join(axes)}]")
    return value


def trim_padding(text_LE: Tensor) -> Tensor:
    """The text without the zero vectors at its end; at least one vector stays."""
    used = text_LE.any(dim=1).nonzero()
    return text_LE[: int(used[-1]) + 1 if len(used) else 1]


def unmasked(text_LE: Tensor, mask: Any, *, what: str) -> Tensor:
    """The rows at which a mask is not 0, because encoders also output states for padding.

    Raises:
        UnusableError: `mask` is no mask for this number of rows.
    """
    if not isinstance(mask, Tensor) or mask.numel() != len(text_LE):
        shown = list(mask.shape) if isinstance(mask, Tensor) else f"{mask!r:.100}"
        raise UnusableError(f"{what} {shown} is no mask of a text with {len(text_LE)} rows")
    return text_LE[mask.flatten().bool()]


def check_regular(path: Path) -> None:
    """Checks a path before it is opened: reading a pipe or device might never end.

    Raises:
        OSError: it is a pipe, device or folder, or does not exist.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is no regular file")


def read_json(path: Path) -> Any:
    """The content of a regular file.

    Raises:
        OSError, ValueError: it cannot be read, or is no JSON.
    """
    check_regular(path)
    return parse_json(path.read_bytes())


def automodel_files(folder: Path, index: Any) -> list[str]:
    """Names of the files with the rows of an index.

    Raises:
        UnusableError: the index has no such names.
    """
    names = index.get("shards") if isinstance(index, dict) else ()
    if names is None:
        names = sorted(path.name for path in folder.glob("metadata_shard_*.json"))
    if not isinstance(names, list) or not all(map(_is_name, names)):
        raise UnusableError("'shards' must be a list of names of files in the same folder")
    return names


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and bool(name) and "\0" not in name and Path(name).name == name


def automodel_rows(path: Path) -> list[Any]:
    """The rows of one file of an index, which are one object for each sample in intact files.

    Raises:
        OSError, ValueError: it cannot be read, is no JSON, or no list.
    """
    rows = read_json(path)
    if not isinstance(rows, list):
        raise UnusableError(f"holds a {type(rows).__name__}, no list of samples")
    return rows


def automodel_file(folder: Path, row: Any) -> Path | None:
    """The present path of a sample's file; None if it is missing.

    The index has the path from before the cache was moved. The file is always inside the cache.

    Raises:
        UnusableError: the row names no file.
    """
    if not isinstance(row, dict):
        raise UnusableError(f"the index holds a {type(row).__name__} where an object must be")
    named = row.get("cache_file")
    if not isinstance(named, str) or "\0" in named or ".." in Path(named).parts or not named:
        raise UnusableError(f"cache_file={named!r:.100} is no path of a file")
    path = Path(named)
    inside = path if path.is_relative_to(folder) else folder / path.name
    for candidate in (folder.joinpath(*path.parts[-2:]), inside):
        try:
            if candidate.is_relative_to(folder) and candidate.is_file():
                return candidate
        except OSError:  # a name longer than the file system takes
            continue
    return None


def automodel_sizes(row: Mapping[str, Any]) -> tuple[tuple[int, int], tuple[int, int]]:
    """(width, height) in pixels of a sample as encoded, and of its file.

    Raises:
        UnusableError: the row has no such sizes.
    """
    cropped = "crop_resolution" in row and "bucket_resolution" not in row
    size = _size(row, "crop_resolution" if cropped else "bucket_resolution")
    return size, _size(row, "original_resolution") if row.get("original_resolution") else size


def _size(row: Mapping[str, Any], name: str) -> tuple[int, int]:
    value = row.get(name)
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int for n in value):
        raise UnusableError(f"{name}={value!r:.100} is not [width, height]")
    return value[0], value[1]


def automodel_tensors(content: Mapping[str, Any]) -> dict[str, Any]:
    """Values of `content`, a sample's file of AutoModel, by our names; None for missing ones."""
    latent = content.get("video_latents")
    return {
        "latent": content.get("latent") if latent is None else latent,
        "text": content.get("text_embeddings", content.get("prompt_embeds")),
        **{ours: content.get(theirs) for ours, theirs in AUTOMODEL.items()},
    }


def dfm_texts(found: Any) -> dict[str, Any]:
    """The texts of a `.pickle`, which for FLUX include the pooled text."""
    if not isinstance(found, dict):
        return {"text": found}
    pooled = found.get("pooled_prompt_embeds", found.get("clip_embeds"))
    return {"text": found.get("prompt_embeds", found.get("t5_embeds")), "pooled_text": pooled}


def is_mlperf(parts: Container[str]) -> bool:
    """Whether a record with the extensions `parts` has MLPerf's layout for FLUX.1."""
    return MLPERF["text"] in parts or MLPERF["latent"] in parts


def tar_of_mlperf(file: BinaryIO) -> bool:
    """Whether the first sample of a tar has MLPerf's layout for FLUX.1; False if unreadable."""
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            names = [member.name for member in islice(tar, len(MLPERF) + 1)]
    except (OSError, tarfile.TarError):
        return False
    return is_mlperf({name.rpartition("/")[2].partition(".")[2] for name in names})


def level_index(about: Any) -> int | None:
    """The k of a sample that is validated only at the noise level k / 8; None without one.

    Raises:
        UnusableError: it is no whole number from 0 to 7.
    """
    index = about.get("timestep") if isinstance(about, dict) else None
    if index is not None and (type(index) is not int or not 0 <= index < LEVELS):
        raise UnusableError(f".json: timestep={index!r} is no whole number from 0 to {LEVELS - 1}")
    return index


def uneven_levels(levels: Iterable[int | None]) -> str:
    """The counts of `levels` (see `level_index`) in words if they are uneven; empty if even.

    None is a sample without a level; either all samples have one or none has.
    """
    found = Counter(levels)
    counts, without = [found[k] for k in range(LEVELS)], found[None]
    if not any(counts) or (len(set(counts)) == 1 and not without):
        return ""
    said = [f"{count} of {k}/{LEVELS}" for k, count in enumerate(counts)]
    said += [f"{without} without one"] if without else []
    return (
        "the samples are not equally many of each noise level by their `timestep`"
        f" ({', '.join(said)}), so that their mean loss is that of no benchmark"
    )


def mlperf_outline(head: bytes, size: int, *, name: str, width: int | None) -> tuple[Any, int]:
    """Shape of the numbers of a part, and the offset of its first number.

    `head` are its first bytes, `size` the number of all its bytes. A part without a header of NumPy
    has the shape that follows from `width`, of its rows, its vector or the channels of a square
    latent.

    Raises:
        UnusableError: it holds something other than uint16, or has another number of bytes.
    """
    part, axes, start = f".{MLPERF[name]}", MLPERF_AXES[name], 0
    if head.startswith(_NPY):
        stream = io.BytesIO(head)
        try:
            version = np.lib.format.read_magic(stream)
            header = np.lib.format
            read = (
                header.read_array_header_1_0 if version == (1, 0) else header.read_array_header_2_0
            )
            shape, by_columns, dtype = read(stream)
        except ValueError as error:
            raise UnusableError(f"{part} has a damaged header of NumPy: {error}") from error
        start = stream.tell()
        if dtype != np.uint16 or by_columns:
            raise UnusableError(f"{part} is {dtype}, not uint16 by rows, the bits of bfloat16")
    elif width is None:
        raise UnusableError(f"{part} has no header of NumPy, which says its shape")
    else:
        count = size // 2
        side = math.isqrt(count // width)
        shape = {"LE": (count // width, width), "E": (width,), "CHW": (width, side, side)}[axes]
    if len(shape) != len(axes) or 2 * math.prod(shape) != size - start:
        raise UnusableError(
            f"{part} has {size - start:,} bytes of numbers, not those of [{', '.join(axes)}] in"
            f" bfloat16, {list(shape)}"
        )
    return shape, start


def mlperf_tensor(part: bytes | memoryview, *, name: str, width: int | None = None) -> Tensor:
    """The bfloat16 numbers of a whole part; a view of memory that can be written.

    Raises:
        UnusableError: as for `mlperf_outline`.
    """
    outline = mlperf_outline(bytes(part[:MLPERF_HEAD]), len(part), name=name, width=width)
    (shape, start), count = outline, math.prod(outline[0])
    if count == 0:
        raise UnusableError(f".{MLPERF[name]} has no numbers")
    memory = bytearray(part) if isinstance(part, bytes) else part
    return torch.frombuffer(memory, dtype=torch.bfloat16, count=count, offset=start).view(shape)


def mlperf_tensors(parts: Mapping[str, bytes]) -> dict[str, Tensor]:
    """Tensors of a sample by our names: texts [L, E] and [E], mean and log variance [C, 1, H, W].

    Parts without a header of NumPy have the widths of the benchmark.

    Raises:
        KeyError: a part is missing.
        UnusableError: as for `mlperf_outline`.
    """
    tensors = {
        ours: mlperf_tensor(parts[theirs], name=ours, width=MLPERF_WIDTHS[ours])
        for ours, theirs in MLPERF.items()
    }
    return tensors | mlperf_latent(tensors["latent"], tensors["latent_logvar"])


def mlperf_sizes(latent_CFHW: Tensor) -> dict[str, int]:
    """Frames and pixels of a latent's picture, by their names in a `.json`."""
    _, _, rows, columns = latent_CFHW.shape
    return {"num_frames": 1, "height": _STRIDE * rows, "width": _STRIDE * columns}


def mlperf_latent(mean_CHW: Tensor, logvar_CHW: Tensor) -> dict[str, Tensor]:
    """Mean and log variance [C, 1, H, W] of the normalised latent, float32."""
    return {
        "latent": ((mean_CHW.float() - MLPERF_SHIFT) * MLPERF_SCALE)[:, None],
        "latent_logvar": (logvar_CHW.float() + 2 * math.log(MLPERF_SCALE))[:, None],
    }


def mlperf_null(content: bytes, *, name: str) -> Tensor:
    """The embedding of an empty caption, from its file: rows [L, E], or a vector [E].

    Raises:
        UnusableError: the file holds something else.
    """
    try:
        value = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise UnusableError(f"it is no array of NumPy: {error}") from error
    return with_axes(value, MLPERF_AXES[name], what="it")
