"""What `data_prep` and `dit/data` both know of the samples of other tools.

- tensors in the shapes that we use, with or without axes of length 1 before them
- the cache of NeMo AutoModel: a file for each sample in `WxH/`, and an index of all samples
- the texts of NVIDIA's DFM
"""

# C latent channels; F H W frames, rows, columns of the latent; L text tokens; E text width

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class UnusableError(ValueError):
    """A file holds something else than a sample; the message says what."""


def with_axes(value: Any, axes: str, *, what: str) -> Tensor:
    """A tensor or array of floats as a tensor with `axes`: a latent CFHW, rows LE or a vector E.

    Axes of length 1 before them are left out. A latent may come without F, and is never empty.

    Raises:
        UnusableError: it has another form.
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
    """The rows at which a mask is not 0: encoders make numbers of padding, too.

    Raises:
        UnusableError: `mask` is no mask of so many rows.
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
        raise UnusableError("'shards' must be a list of names of files beside it")
    return names


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and bool(name) and "\0" not in name and Path(name).name == name


def automodel_rows(path: Path) -> list[Any]:
    """The rows of one file of an index: an object for each sample, if nobody has changed it.

    Raises:
        OSError, ValueError: it cannot be read, is no JSON, or no list.
    """
    rows = read_json(path)
    if not isinstance(rows, list):
        raise UnusableError(f"holds a {type(rows).__name__}, no list of samples")
    return rows


def automodel_file(folder: Path, row: Any) -> Path | None:
    """The present path of the file of a sample, None for one that is not there.

    The index has the path of before the cache was moved. The file is always inside the cache.

    Raises:
        UnusableError: the row names no file.
    """
    if not isinstance(row, dict):
        raise UnusableError(f"the index holds a {type(row).__name__}, no object")
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
        UnusableError: the row has something else.
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
    """What the file of a sample has, by our names; None for what it has not."""
    latent = content.get("video_latents")
    return {
        "latent": content.get("latent") if latent is None else latent,
        "text": content.get("text_embeddings", content.get("prompt_embeds")),
        **{ours: content.get(theirs) for ours, theirs in AUTOMODEL.items()},
    }


def dfm_texts(found: Any) -> dict[str, Any]:
    """The texts of a `.pickle`: DFM's scripts for FLUX store the pooled text as well."""
    if not isinstance(found, dict):
        return {"text": found}
    pooled = found.get("pooled_prompt_embeds", found.get("clip_embeds"))
    return {"text": found.get("prompt_embeds", found.get("t5_embeds")), "pooled_text": pooled}
