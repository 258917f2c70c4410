"""Shards of MLPerf Training's FLUX.1: `.t5.bytes`, `.clip.bytes`, `.mean.bytes`, `.logvar.bytes`.

Each part is an array of uint16 with the bits of bfloat16. Samples of validation have a fixed noise
level k / 8 by the whole number `timestep` of their `.json`. NVIDIA's converter writes them to tars
with an `index.txt`, without what Energon reads; a dataset can link to those tars instead of copying
them.
"""

from __future__ import annotations

import tarfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data_prep.formats.cached_samples import (
    CachedSample,
    RefusedRecord,
    checked_description,
    numbers,
    read_tars,
)
from data_prep.planning.splits import Split, key_of
from data_prep.refusals import PrepError, Reason, RefusedError
from dit.codecs.normalization import Whitening
from dit.parsing import parse_json
from dit.safe_writing import write_atomically
from dit.stored_samples import (
    MLPERF,
    MLPERF_NULL,
    MLPERF_SCALE,
    MLPERF_SHIFT,
    UnusableError,
    check_regular,
    level_index,
    mlperf_null,
    mlperf_sizes,
    mlperf_tensors,
    tar_of_mlperf,
)
from dit.system_errors import explained


def holds_mlperf(folder: Path) -> bool:
    """Whether the first tar below `folder` has this layout."""
    for path in sorted(folder.rglob("*.tar"))[:1]:
        with suppress(OSError):  # the reader of samples says why
            check_regular(path)
            with path.open("rb") as file:
                return tar_of_mlperf(file)
    return False


def read_mlperf(folder: Path) -> Iterator[CachedSample | RefusedRecord]:
    """Every sample of every tar below `folder`, latents normalised as the benchmark has them."""
    return read_tars(folder, _record)


def whitening(channels: int) -> Whitening:
    """The benchmark's normalisation of latents."""
    return Whitening(mean=(MLPERF_SHIFT,) * channels, std=(1 / MLPERF_SCALE,) * channels)


def _record(name: str, _key: str, parts: dict[str, bytes]) -> CachedSample:
    missing = {*MLPERF.values(), "json"} - set(parts)
    if missing:
        found = ", ".join(f".{part}" for part in parts) or "nothing"
        raise RefusedError(Reason.UNREADABLE, f"no .{min(missing)}, found {found}")
    about = parse_json(parts["json"])
    if not isinstance(about, dict):
        raise RefusedError(
            Reason.UNREADABLE, f".json holds a {type(about).__name__}, not an object"
        )
    tensors = mlperf_tensors(parts)
    sizes = mlperf_sizes(numbers(tensors["latent"], "CFHW", what="mean"))
    known = {"caption": "", "source": str(about.get("key", name)), "fps": None, **sizes}
    known |= {f"original_{side}": sizes[side] for side in ("height", "width")}
    index = level_index(about)
    return CachedSample(
        key=key_of(name),
        tensors=tensors,
        about=checked_description(known | ({} if index is None else {"timestep": index})),
    )


def null_texts(folder: Path) -> dict[str, Tensor]:
    """The embeddings of an empty caption, float32, from their files anywhere below `folder`.

    Raises:
        PrepError: one is missing or damaged.
    """
    found = {}
    for name, file in MLPERF_NULL.items():
        paths = sorted(folder.rglob(file))
        if not paths:
            raise PrepError(
                f"{folder} has no {file}, which holds the text that replaces dropped captions;"
                " put the"
                " benchmark's file there or in a folder below"
            )
        try:
            found[name] = torch.as_tensor(mlperf_null(paths[0].read_bytes(), name=name)).float()
        except (OSError, UnusableError) as error:
            raise PrepError(f"{paths[0]}: {explained(error)}; restore it") from None
    return found


def link_shards(folder: Path, target: Path, levels: Counter[int]) -> dict[Split, dict[str, int]]:
    """Links every tar below `folder` into `target`, with its index; returns samples by shard.

    Tars whose first sample has a noise level belong to the split val. `levels` counts the levels.

    Raises:
        PrepError: a tar or the level of a sample cannot be read.
    """
    shards: dict[Split, dict[str, int]] = {}
    for path in sorted(folder.rglob("*.tar")):
        try:
            check_regular(path)
            ends, found = _outline(path)
        except (OSError, tarfile.TarError, ValueError) as error:
            raise PrepError(f"{path}: {explained(error)}; restore it") from None
        split = Split.VAL if found else Split.TRAIN
        levels.update(found)
        of_split = shards.setdefault(split, {})
        link = target / split / f"shard-{len(of_split):06d}.tar"
        link.parent.mkdir(exist_ok=True)
        write_atomically(link.with_suffix(".tar.idx"), np.array(ends, np.uint64).tobytes())
        link.symlink_to(path.resolve())
        of_split[link.name] = len(ends) - 1
    return shards


def _outline(path: Path) -> tuple[list[int], list[int]]:
    """Byte offsets of a tar's samples and of the end of the last.

    And their levels, if they have any.
    """
    starts, levels, key = list[int](), list[int](), None
    with tarfile.open(path, "r:") as tar:
        for member in tar:
            place, _, part = member.name.rpartition("/")[2].partition(".")
            if place != key:
                starts.append(member.offset)
                key = place
            if part == "json":
                content = tar.extractfile(member)
                index = level_index(parse_json(content.read())) if content else None
                levels += [] if index is None else [index]
        end = tar.offset
    if levels and len(levels) != len(starts):
        raise UnusableError(f"{len(levels)} of its {len(starts)} samples have a `timestep`")
    return [*starts, end], levels
