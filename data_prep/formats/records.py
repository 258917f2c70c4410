"""What a sample is, whatever file holds it."""

# C latent channels, F frames, H rows, W columns, L text tokens, E text width

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
import torch
from torch import Tensor

from data_prep.inspection import read_samples, shard_counts
from data_prep.refusals import Reason, RefusedError


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One sample: tensors named as in our shards, and what its `.json` says."""

    key: str
    tensors: dict[str, Tensor]  # latent [C, F, H, W], text [L, E], ...
    about: dict[str, Any]  # caption, source, height, width, num_frames, fps, ...


def read_shards(folder: Path) -> Iterator[Record]:
    """Every sample of a dataset of ours, shard by shard.

    Raises:
        PrepError: the folder is none.
    """
    for name in shard_counts(folder):
        for _, key, parts in read_samples(folder / name):
            tensors = safetensors.torch.load(parts["safetensors"])
            yield Record(key=key, tensors=tensors, about=json.loads(parts["json"]))


def untrusted(file: Path | BinaryIO) -> Any:
    """What `torch.save` wrote; code in it is never run.

    Raises:
        RefusedError: it cannot be read, or wants to run something.
    """
    try:
        return torch.load(file, weights_only=True, map_location="cpu")
    except Exception as error:  # unpickling raises whatever the damage provokes
        raise RefusedError(Reason.UNREADABLE, str(error).partition(". ")[0]) from error


@contextmanager
def damage_refused(name: str) -> Iterator[None]:
    """Whatever the contents of a stranger's sample provoke is a refusal of that one sample.

    Raises:
        RefusedError: a part is missing or of another kind than its format says.
    """
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise RefusedError(Reason.UNREADABLE, f"{name}: {what}") from error


def without_padding(text_LE: Tensor) -> Tensor:
    """Text without the zero vectors behind it; one stays where there is nothing else."""
    used = text_LE.abs().amax(dim=1).nonzero()
    return text_LE[: int(used[-1]) + 1 if len(used) else 1]


def as_latent(tensor: Any, source: str) -> Tensor:
    """[C, F, H, W] of a latent that may have a batch axis or lack the frames.

    Raises:
        RefusedError: it is something else.
    """
    if isinstance(tensor, Tensor):
        while tensor.dim() > 4 and tensor.shape[0] == 1:
            tensor = tensor[0]
        if tensor.dim() == 3:
            tensor = tensor[:, None]
        if tensor.dim() == 4 and torch.isfinite(tensor).all():
            return tensor
    shape = list(getattr(tensor, "shape", ())) or type(tensor).__name__
    raise RefusedError(Reason.NOT_FINITE, f"{source} holds no finite latent, but {shape}")


def as_text(tensor: Any, source: str) -> Tensor:
    """[L, E] at its true length.

    Raises:
        RefusedError: it is something else.
    """
    if isinstance(tensor, Tensor):
        while tensor.dim() > 2 and tensor.shape[0] == 1:
            tensor = tensor[0]
        if tensor.dim() == 2 and torch.isfinite(tensor).all():
            return without_padding(tensor)
    shape = list(getattr(tensor, "shape", ())) or type(tensor).__name__
    raise RefusedError(Reason.NOT_FINITE, f"{source} holds no finite text, but {shape}")
