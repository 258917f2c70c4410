"""A sample of any format, and the checks of what other people's files hold."""

# C latent channels, F frames, H rows, W columns, L text tokens, E text width

from __future__ import annotations

import math
import pickle
import stat
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.functional import pad

from data_prep.inspect.read_shards import read_samples, shard_counts
from data_prep.refusals import PrepError, Reason, RefusedError
from dit import safe_pickle
from dit.parsing import cause, parse_json

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SIZES = ("width", "height", "original_width", "original_height", "num_frames")


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedSample:
    """One sample: tensors named as in our shards, and the content of its `.json`."""

    key: str
    tensors: dict[str, Tensor]  # latent [C, F, H, W], text [L, E], ...
    about: dict[str, Any]  # caption, source, height, width, num_frames, fps, ...
    file: str = ""  # its name in a refusal


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusedRecord:
    """Takes the place of a sample, or of a file of samples, that cannot be read."""

    source: str
    reason: Reason
    detail: str


def read_or_refuse(source: str, read: Callable[[], CachedSample]) -> CachedSample | RefusedRecord:
    """The sample that `read` returns; an error becomes the refusal of this sample."""
    try:
        return replace(read(), file=source)
    except RefusedError as refused:
        return RefusedRecord(source=source, reason=refused.reason, detail=refused.detail)
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        what = error
    except (ArithmeticError, OSError, MemoryError) as error:
        what = error
    detail = f"{type(what).__name__}: {what}"
    return RefusedRecord(source=source, reason=Reason.UNREADABLE, detail=detail)


def read_shards(folder: Path) -> Iterator[CachedSample]:
    """Every sample of a dataset, shard by shard.

    Raises:
        PrepError: the folder is no dataset, or a shard is damaged.
    """
    for name in shard_counts(folder):
        key = ""
        try:
            for _, key, parts in read_samples(folder / name):
                tensors = safetensors.torch.load(parts["safetensors"])
                about = parse_json(parts["json"])
                yield CachedSample(key=key, tensors=tensors, about=checked_description(about))
        except (OSError, tarfile.TarError, SafetensorError, LookupError, ValueError) as error:
            where = f"{folder / name}, after key {key!r}" if key else str(folder / name)
            raise PrepError(
                f"{where}: {cause(error)}; `python -m data_prep inspect {folder}`"
                " lists what is damaged, --overwrite packs the data again"
            ) from None
        except RefusedError as error:
            raise PrepError(f"{folder / name}, key {key!r}: {error.detail}") from None


def load_untrusted(content: Path | bytes) -> Any:
    """The object that `torch.save` or pickle wrote; code in the file is never run.

    Raises:
        RefusedError: it cannot be read, or holds more than tensors and plain values.
    """
    try:
        if isinstance(content, Path):
            content = read_cache_file(content)
        return safe_pickle.loads(content)
    except pickle.UnpicklingError as error:
        raise RefusedError(Reason.UNREADABLE, str(error)) from error


def check_regular(path: Path) -> None:
    """Checks a path before it is opened: reading a pipe or device might never end.

    Raises:
        OSError: it is a pipe, device or folder, or does not exist.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is no regular file")


def read_cache_file(path: Path) -> bytes:
    """The bytes of a regular file.

    Raises:
        RefusedError: it is no regular file, or cannot be read.
    """
    if not path.is_file():
        raise RefusedError(Reason.UNREADABLE, f"{path} is no file")
    try:
        return path.read_bytes()
    except OSError as error:
        raise RefusedError(Reason.UNREADABLE, f"{path}: {error.strerror}") from error


def checked_description(about: Any) -> dict[str, Any]:
    """The content of a sample's `.json`, checked.

    Raises:
        RefusedError: a value is missing or of a wrong type.
    """
    if not isinstance(about, Mapping):
        raise RefusedError(Reason.UNREADABLE, f"a {type(about).__name__} describes the sample")
    for name in ("caption", "source"):
        if not isinstance(about.get(name), str):
            raise _odd(name, about, "a text")
    for name in _SIZES:
        value = about.get(name)
        if type(value) is not int or not 0 <= value < 2**31:
            raise _odd(name, about, "a whole number")
    fps = about.get("fps")
    if fps is not None and (type(fps) not in (int, float) or not 0 < fps < math.inf):
        raise _odd("fps", about, "a positive number")
    # File names need not be valid Unicode, but JSON must.
    source = about["source"].encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return {**about, "source": source}


def _odd(name: str, about: Mapping[str, Any], wanted: str) -> RefusedError:
    return RefusedError(Reason.UNREADABLE, f"{name}={about.get(name)!r:.100} is not {wanted}")


def without_padding(text_LE: Tensor) -> Tensor:
    """Text without the zero vectors behind it; at least one vector is kept."""
    used = text_LE.abs().amax(dim=1).nonzero()
    return text_LE[: int(used[-1]) + 1 if len(used) else 1]


def padded(text_LE: Tensor, rows: int) -> Tensor:
    """Text with zero vectors behind it up to so many rows; longer ones as they are."""
    return pad(text_LE, (0, 0, 0, max(0, rows - len(text_LE))))


def to_latent(value: Any, *, what: str = "latent") -> Tensor:
    """A latent [C, F, H, W]; `value` may have a batch axis, or no frame axis.

    Raises:
        RefusedError: it has another form.
    """
    latent = _floats(value, what=what)
    while latent.dim() > 4 and latent.shape[0] == 1:
        latent = latent[0]
    if latent.dim() == 3:
        latent = latent[:, None]
    if latent.dim() != 4:
        raise _shaped(latent, what, "[C, F, H, W]")
    return latent


def to_text(value: Any) -> Tensor:
    """A text [L, E] without padding.

    Raises:
        RefusedError: it has another form.
    """
    return without_padding(to_rows(value, what="text"))


def to_rows(value: Any, *, what: str) -> Tensor:
    """Rows [L, E] of a text or image encoder.

    Raises:
        RefusedError: it has another form.
    """
    rows = _floats(value, what=what)
    while rows.dim() > 2 and rows.shape[0] == 1:
        rows = rows[0]
    if rows.dim() != 2:
        raise _shaped(rows, what, "[L, E]")
    return rows


def to_pooled(value: Any) -> Tensor:
    """A pooled text [E].

    Raises:
        RefusedError: it has another form.
    """
    pooled = _floats(value, what="pooled text").squeeze()
    if pooled.dim() != 1:
        raise _shaped(pooled, "pooled text", "[E]")
    return pooled


def _floats(value: Any, *, what: str) -> Tensor:
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if not isinstance(value, Tensor) or value.dtype not in _FLOATS:
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise RefusedError(Reason.UNREADABLE, f"the {what} is {kind}, no tensor of floats")
    if value.numel() == 0:
        raise RefusedError(Reason.UNREADABLE, f"the {what} {list(value.shape)} has no numbers")
    if not torch.isfinite(value).all():
        raise RefusedError(Reason.NOT_FINITE, f"the {what} {list(value.shape)} has NaN or Inf")
    return value


def _shaped(tensor: Tensor, what: str, wanted: str) -> RefusedError:
    return RefusedError(Reason.UNREADABLE, f"the {what} is {list(tensor.shape)}, not {wanted}")
