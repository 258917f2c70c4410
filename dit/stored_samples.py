"""Sample formats of other tools, which both `data_prep` and `dit/data` read.

- tensors in the shapes of shards, with or without leading axes of length 1
- the cache of NeMo AutoModel: a file for each sample in `WxH/`, and an index of all samples
- the text embeddings of NVIDIA's DFM
- the shards of MLPerf Training's FLUX.1: parts of a record in bfloat16, with null texts beside them
"""

# C latent channels; F H W frames, rows, columns of the latent; L text tokens; E text width

from __future__ import annotations

import io
import math
import stat
import tarfile
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dit.parsing import parse_json
from dit.system_errors import reason

INDEX = "metadata.json"
AUTOMODEL: Mapping[str, str] = {
    "pooled_text": "pooled_prompt_embeds",
    "text_2": "text_embeddings_2",
    "first_frame_latent": "first_frame_latent",
    "condition_latent": "condition_latent",
    "image_embed": "image_embeds",
}
"""Name of a tensor in shards -> its name in AutoModel's caches, for all but latent and text."""


class MlperfTensor(NamedTuple):
    """How MLPerf's shards store one tensor of a sample."""

    part: str  # extension of its file
    axes: str
    width: int  # in the benchmark: width of the rows or of the vector, or number of channels
    null_file: str = ""  # file with its value for the empty caption


MLPERF: Mapping[str, MlperfTensor] = {
    "text": MlperfTensor("t5.bytes", "LE", 4096, "t5_empty.npy"),
    "pooled_text": MlperfTensor("clip.bytes", "E", 768, "clip_empty.npy"),
    "latent": MlperfTensor("mean.bytes", "CHW", 16),
    "latent_logvar": MlperfTensor("logvar.bytes", "CHW", 16),
}
"""Name of a tensor in shards -> how MLPerf's FLUX.1 shards store it."""
MLPERF_SHIFT, MLPERF_SCALE = 0.1159, 0.3611
"""Normalisation of FLUX.1's autoencoder: latents for training are (latent - shift) * scale."""
MLPERF_HEAD = 256
"""Bytes that are read of a part for the header with its shape."""
LEVELS = 8
"""Number of fixed noise levels in validation; a sample's `.json` may state the k of level k / 8."""
_STRIDE = 8  # pixels along a side of a latent cell
_NPY = b"\x93NUMPY"
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class UnusableError(ValueError):
    """A file holds something else than a sample; the message says what."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordHeader:
    """The first bytes of a part of a record, with dtypes and shapes of its tensors."""

    data: bytes
    size: int
    """Bytes of the whole part, not only of `data`."""


def with_axes(value: Any, axes: str, *, what: str) -> Tensor:
    """The float tensor or array `value` as a tensor with one axis for each letter of `axes`.

    The letters are CFHW for a latent, LE for a text or E for a vector. Leading axes of length 1 are
    dropped. A latent may lack F, and must not be empty. Messages call the value `what`.

    Raises:
        UnusableError: `value` has other axes, or is not a float tensor.
    """
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if not isinstance(value, Tensor) or value.dtype not in _FLOATS:
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise UnusableError(f"{what} is {kind}, not a tensor of floats; write it again")
    while value.dim() > len(axes) and value.shape[0] == 1:
        value = value[0]
    if axes == "CFHW" and value.dim() == 3:
        value = value[:, None]
    if value.dim() != len(axes) or (axes == "CFHW" and value.numel() == 0):
        raise UnusableError(
            f"{what} has shape {list(value.shape)}, not [{', '.join(axes)}]"
            f"{' (channels, frames, rows, columns)' * (axes == 'CFHW')}"
            f"{' (tokens, width)' * (axes == 'LE')}; write it again"
        )
    return value


def trim_padding(text_LE: Tensor) -> Tensor:
    """`text_LE` without the zero vectors at its end; at least one row stays."""
    used = text_LE.any(dim=1).nonzero()
    return text_LE[: int(used[-1]) + 1 if len(used) else 1]


def unmasked(text_LE: Tensor, mask: Any, *, what: str) -> Tensor:
    """Rows of `text_LE` where `mask` is not 0, because encoders also output states for padding.

    Raises:
        UnusableError: `mask` is not a mask for this number of rows.
    """
    if not isinstance(mask, Tensor) or mask.numel() != len(text_LE):
        shown = list(mask.shape) if isinstance(mask, Tensor) else f"{mask!r:.100}"
        raise UnusableError(
            f"{what} {shown} must have a number for each of {len(text_LE)} rows of text; write it"
            " again"
        )
    return text_LE[mask.flatten().bool()]


def check_regular(path: Path) -> None:
    """Checks that `path` is a regular file: reading a pipe or device might never end.

    Raises:
        OSError: it is a pipe, device or folder, or does not exist.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is not a regular file; remove or replace it")


def read_json(path: Path) -> Any:
    """The content of the JSON file `path`, a regular file.

    Raises:
        OSError, ValueError: the file cannot be read, or is not JSON.
    """
    check_regular(path)
    return parse_json(path.read_bytes())


def automodel_files(folder: Path, index: Any) -> list[str]:
    """Names of the files that list the samples of the AutoModel cache `folder`.

    `index` is the content of its metadata.json.

    Raises:
        UnusableError: the index has no such names.
    """
    names = index.get("shards") if isinstance(index, dict) else ()
    if names is None:
        names = sorted(path.name for path in folder.glob("metadata_shard_*.json"))
    if not isinstance(names, list) or not all(map(_is_name, names)):
        raise UnusableError(
            f"'shards' is {names!r:.100}, and must be a list of names of files in the same folder;"
            " write the index again"
        )
    return names


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and bool(name) and "\0" not in name and Path(name).name == name


def automodel_rows(path: Path) -> list[Any]:
    """Entries of one file of an AutoModel index: in intact files an object for each sample.

    Raises:
        OSError, ValueError: the file cannot be read, is not JSON, or holds no list.
    """
    rows = read_json(path)
    if not isinstance(rows, list):
        raise UnusableError(
            f"it holds a {type(rows).__name__}, not a list of samples; write the index again"
        )
    return rows


def automodel_file(folder: Path, row: Any) -> Path | None:
    """Path of the file of the sample `row` in an AutoModel cache; None if the file is missing.

    The index has the path from before the cache was moved. The file is always inside the cache.

    Raises:
        UnusableError: the row names no file.
    """
    if not isinstance(row, dict):
        raise UnusableError(
            f"the index holds a {type(row).__name__} in place of a sample's object; write the"
            " index again"
        )
    named = row.get("cache_file")
    if not isinstance(named, str) or "\0" in named or ".." in Path(named).parts or not named:
        raise UnusableError(
            f"cache_file={named!r:.100} is not the path of a file in the cache; correct it in the"
            " index"
        )
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
    """Two (width, height) in pixels: of the sample `row` as encoded, and of its original file.

    Raises:
        UnusableError: the row has no such sizes.
    """
    cropped = "crop_resolution" in row and "bucket_resolution" not in row
    size = _size(row, "crop_resolution" if cropped else "bucket_resolution")
    return size, _size(row, "original_resolution") if row.get("original_resolution") else size


def _size(row: Mapping[str, Any], name: str) -> tuple[int, int]:
    value = row.get(name)
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int for n in value):
        raise UnusableError(
            f"{name}={value!r:.100} is not [width, height] in whole numbers; correct it in the"
            " index"
        )
    return value[0], value[1]


def automodel_tensors(content: Mapping[str, Any]) -> dict[str, Any]:
    """Name in shards -> value in `content`, a sample file of AutoModel; a missing value is None."""
    latent = content.get("video_latents")
    return {
        "latent": content.get("latent") if latent is None else latent,
        "text": content.get("text_embeddings", content.get("prompt_embeds")),
        **{ours: content.get(theirs) for ours, theirs in AUTOMODEL.items()},
    }


def dfm_texts(found: Any) -> dict[str, Any]:
    """Texts in `found`, the content of DFM's `.pickle`; for FLUX with the pooled text."""
    if not isinstance(found, dict):
        return {"text": found}
    pooled = found.get("pooled_prompt_embeds", found.get("clip_embeds"))
    return {"text": found.get("prompt_embeds", found.get("t5_embeds")), "pooled_text": pooled}


def is_mlperf(parts: Container[str]) -> bool:
    """Whether a record with parts of these extensions is one of MLPerf's FLUX.1."""
    return MLPERF["text"].part in parts or MLPERF["latent"].part in parts


def tars_of_mlperf(paths: Iterable[Any]) -> bool:
    """Whether the first sample in the tars `paths` is of MLPerf's FLUX.1.

    `paths` may be of pathlib or Energon. Tars without a sample, and those that cannot be read, are
    skipped: the reader of samples names them.
    """
    for path in paths:
        with suppress(OSError, tarfile.TarError):
            if not path.is_file():  # a pipe might never end
                continue
            with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
                names = [member.name for member in islice(tar, len(MLPERF) + 1)]
            if names:
                return is_mlperf({name.rpartition("/")[2].partition(".")[2] for name in names})
    return False


def level_index(about: Any) -> int | None:
    """The k of a sample that is validated only at the noise level k / 8; None if it states none.

    `about` is the content of its `.json`.

    Raises:
        UnusableError: k is not a whole number from 0 to 7.
    """
    index = about.get("timestep") if isinstance(about, dict) else None
    if index is not None and (type(index) is not int or not 0 <= index < LEVELS):
        raise UnusableError(
            f".json: timestep={index!r} is not a whole number from 0 to {LEVELS - 1}; correct it"
        )
    return index


def uneven_levels(levels: Iterable[int | None]) -> str:
    """A sentence with the counts of `levels` (see `level_index`) if they are uneven; else empty.

    None stands for a sample without a level; they are even only if all samples have one or none
    has.
    """
    found = Counter(levels)
    counts, without = [found[k] for k in range(LEVELS)], found[None]
    if not any(counts) or (len(set(counts)) == 1 and not without):
        return ""
    said = [f"{count} of {k}/{LEVELS}" for k, count in enumerate(counts)]
    said += [f"{without} without one"] if without else []
    return (
        "the noise levels that the samples name by `timestep` are not equally frequent"
        f" ({', '.join(said)}), so their mean loss is that of no benchmark"
    )


def mlperf_tensors(parts: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors of a sample by their names in shards: texts [L, E] and [E], mean and log variance.

    Texts are bfloat16 views of the bytes; mean and log variance [C, 1, H, W] are of the normalised
    latent, float32. For a part that is a RecordHeader, the tensor is on the device `meta`.

    Raises:
        KeyError: a part is missing.
        UnusableError: a part holds something else than bfloat16 of its axes.
    """
    found = {name: _mlperf_tensor(parts[one.part], one) for name, one in MLPERF.items()}
    mean_CHW, logvar_CHW = found["latent"].float(), found["latent_logvar"].float()
    found["latent"] = ((mean_CHW - MLPERF_SHIFT) * MLPERF_SCALE)[:, None]
    found["latent_logvar"] = (logvar_CHW + 2 * math.log(MLPERF_SCALE))[:, None]
    return found


def _mlperf_tensor(part: Any, one: MlperfTensor) -> Tensor:
    whole = not isinstance(part, RecordHeader)
    head, size = (bytes(part[:MLPERF_HEAD]), len(part)) if whole else (part.data, part.size)
    shape, start = _mlperf_outline(head, size, one)
    count = math.prod(shape)
    if len(shape) != len(one.axes) or not 0 < 2 * count == size - start:
        raise UnusableError(
            f".{one.part} has {size - start:,} bytes of numbers in the shape {list(shape)}, and"
            f" needs [{', '.join(one.axes)}] in bfloat16, none of them 0; write it again"
        )
    if not whole:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")
    memory = bytearray(part) if isinstance(part, bytes) else part  # torch makes no read-only views
    return torch.frombuffer(memory, dtype=torch.bfloat16, count=count, offset=start).view(shape)


def _mlperf_outline(head: bytes, size: int, one: MlperfTensor) -> tuple[tuple[int, ...], int]:
    """(shape of a part's numbers, offset of their first byte) from its NumPy header `head`.

    A part without header has the width of the benchmark, and a square latent. `size` is the number
    of bytes of the part.

    Raises:
        UnusableError: the header is damaged, or not that of uint16.
    """
    if not head.startswith(_NPY):
        rows = size // 2 // one.width
        side = math.isqrt(rows)
        shapes = {"LE": (rows, one.width), "E": (one.width,), "CHW": (one.width, side, side)}
        return shapes[one.axes], 0
    stream, npy = io.BytesIO(head), np.lib.format
    try:
        first = npy.read_magic(stream) == (1, 0)
        read = npy.read_array_header_1_0 if first else npy.read_array_header_2_0
        shape, by_columns, dtype = read(stream)
    except ValueError as error:
        raise UnusableError(
            f".{one.part} has a damaged header of NumPy ({error}); write it again"
        ) from error
    if dtype != np.uint16 or by_columns:
        columns = " by columns" * by_columns
        raise UnusableError(
            f".{one.part} is {dtype}{columns}, not uint16 by rows, the bits of bfloat16; write it"
            " again"
        )
    return shape, stream.tell()


def mlperf_sizes(latent_CFHW: Tensor) -> dict[str, int]:
    """num_frames, height and width in pixels of the picture of a latent, as in a `.json`."""
    _, _, rows, columns = latent_CFHW.shape
    return {"num_frames": 1, "height": _STRIDE * rows, "width": _STRIDE * columns}


def mlperf_nulls(path_of: Callable[[str], Any]) -> dict[str, Tensor]:
    """Embeddings of the empty caption by their names in shards, float32: [L, E] and [E].

    `path_of` returns the path of a file by its name. A missing file is an error, and is not
    replaced by zeros.

    Raises:
        UnusableError: a file is missing or damaged; the message names it.
    """
    found = {}
    for name, one in MLPERF.items():
        if not one.null_file:
            continue
        path = path_of(one.null_file)
        if not path.is_file():
            raise UnusableError(
                f"{path} is missing: it holds the embedding that replaces a dropped caption of"
                " MLPerf's shards; put the benchmark's file there"
            )
        try:
            value = np.lib.format.read_array(io.BytesIO(path.read_bytes()), allow_pickle=False)
            found[name] = with_axes(value, one.axes, what="it").float()
        except UnusableError as error:
            raise UnusableError(f"{path}: {error}") from error
        except (OSError, ValueError, TypeError) as error:
            unread = "it is not an array of NumPy with floats that can be read"
            raise UnusableError(f"{path}: {unread}: {reason(error)}; restore it") from error
    return found
