"""A sample of a cache in any format, and checks of its content."""

# C latent channels, F frames, H rows, W columns, L text tokens, E text width

from __future__ import annotations

import math
import pickle
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.functional import pad

from data_prep.inspect.read_shards import read_samples, shard_counts
from data_prep.refusals import PrepError, Reason, RefusedError, printable
from data_prep.writing.dataset_folder import LEDGER, META
from dit import safe_pickle
from dit.parsing import cause, parse_json
from dit.stored_samples import UnusableError, check_regular, trim_padding, with_axes
from dit.system_errors import explained

_SIZES = ("width", "height", "original_width", "original_height", "num_frames")


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedSample:
    """A sample of a cache: tensors under our shards' names, and the content of its `.json`."""

    key: str
    tensors: dict[str, Tensor]  # latent [C, F, H, W], text [L, E], ...
    about: dict[str, Any]  # caption, source, height, width, num_frames, fps, ...
    file: str = ""  # name of the sample in a refusal


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusedRecord:
    """The refusal of a sample, or of a file of samples, that cannot be read from a cache."""

    source: str
    reason: Reason
    detail: str


def read_or_refuse(source: str, read: Callable[[], CachedSample]) -> CachedSample | RefusedRecord:
    """Calls `read` and returns its sample, or a refusal of `source` if the sample is unusable."""
    try:
        return replace(read(), file=source)
    except RefusedError as refused:
        return RefusedRecord(source=source, reason=refused.reason, detail=refused.detail)
    except UnusableError as error:
        return RefusedRecord(source=source, reason=Reason.UNREADABLE, detail=printable(str(error)))
    except (
        *(LookupError, TypeError, AttributeError, ValueError, RuntimeError),
        *(ArithmeticError, OSError, MemoryError),
    ) as error:
        detail = f"{type(error).__name__}: {error}"
        return RefusedRecord(source=source, reason=Reason.UNREADABLE, detail=detail)


def tars_below(folder: Path) -> list[Path]:
    """Paths of all tars below `folder`, except those in subfolders that data_prep has packed."""
    ours = [p.parent for name in (META, LEDGER) for p in folder.rglob(name) if p.parent != folder]
    tars = sorted(folder.rglob("*.tar"))
    return [path for path in tars if not any(path.is_relative_to(one) for one in ours)]


def read_tars(
    folder: Path, record: Callable[[str, str, dict[str, bytes]], CachedSample]
) -> Iterator[CachedSample | RefusedRecord]:
    """Yields the samples, or their refusals, of all tars below `folder`.

    `record` makes a sample from its name in messages, its key, and its files by ending.
    """
    for path in tars_below(folder):
        try:
            check_regular(path)
            for _, key, parts in read_samples(path):
                name = f"{path.stem}/{key}"
                yield read_or_refuse(name, partial(record, name, key, parts))
        except (tarfile.TarError, OSError) as error:
            detail = (
                f"the rest of the tar is unread ({type(error).__name__}: {explained(error)}); copy"
                " or write the tar again"
            )
            yield RefusedRecord(source=path.name, reason=Reason.UNREADABLE, detail=detail)


def read_shards(folder: Path) -> Iterator[CachedSample]:
    """Yields every sample of the packed dataset in `folder`, shard by shard.

    Raises:
        PrepError: the folder is not a dataset, or a shard is damaged.
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
            raise PrepError(
                f"{folder / name}, key {key!r}: {error.detail}; --overwrite packs the data again"
            ) from None


def load_untrusted(content: Path | bytes) -> Any:
    """Unpickles what `torch.save` or pickle wrote, from a file or from bytes, without running code.

    Raises:
        OSError: `content` is not a regular file, or cannot be read.
        RefusedError: `content` holds more than tensors and plain values.
    """
    if isinstance(content, Path):
        check_regular(content)
        content = content.read_bytes()
    try:
        return safe_pickle.loads(content)
    except pickle.UnpicklingError as error:
        raise RefusedError(Reason.UNREADABLE, str(error)) from error


def checked_description(about: Any) -> dict[str, Any]:
    """The description `about` of a sample (its `.json`), after its types are checked.

    Raises:
        RefusedError: a value is missing or of a wrong type.
    """
    if not isinstance(about, Mapping):
        raise RefusedError(
            Reason.UNREADABLE,
            f"its .json holds a {type(about).__name__}, not an object; write the sample again",
        )
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
    return RefusedError(
        Reason.UNREADABLE, f"{name}={about.get(name)!r:.100} is not {wanted}; correct it"
    )


def padded(text_LE: Tensor, rows: int) -> Tensor:
    """`text_LE` padded with zero vectors to `rows` rows; a longer text is unchanged."""
    return pad(text_LE, (0, 0, 0, max(0, rows - len(text_LE))))


def to_text(value: Any) -> Tensor:
    """The text [L, E] in `value`, an entry of a cache, without rows of zeros at its end.

    It raises the errors of `numbers`.
    """
    return trim_padding(numbers(value, "LE", what="text"))


def numbers(value: Any, axes: str, *, what: str) -> Tensor:
    """The tensor in `value`, an entry of a cache, with its axes in the order `axes`.

    `axes` is CFHW for a latent, LE for hidden states of an encoder, E for a pooled text. `value`
    may have a batch axis as well, and a latent may lack the frame axis. `what` names the tensor in
    messages.

    Raises:
        UnusableError: `value` is not a tensor with these axes.
        RefusedError: the tensor is empty, or holds NaN or Inf.
    """
    tensor = with_axes(value, axes, what=what)
    if tensor.numel() == 0:
        raise RefusedError(
            Reason.UNREADABLE,
            f"the {what} {list(tensor.shape)} has no numbers; encode the sample again",
        )
    if not torch.isfinite(tensor).all():
        raise RefusedError(
            Reason.NOT_FINITE,
            f"the {what} {list(tensor.shape)} has NaN or Inf; encode the sample again",
        )
    return tensor
