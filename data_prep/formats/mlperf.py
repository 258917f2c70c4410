"""Reads the shards of MLPerf Training's FLUX.1.

A sample has the files `.t5.bytes`, `.clip.bytes`, `.mean.bytes` and `.logvar.bytes`, each an array
of uint16 with the bits of bfloat16, and a `.json`. A validation sample has the fixed noise level k
/ 8, where k is the whole number `timestep` of its `.json`. NVIDIA's converter writes the samples to
tars with an `index.txt`, without the metadata that Energon reads; a dataset can link to those tars
instead of copying them.
"""

from __future__ import annotations

import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from data_prep.formats.cached_samples import (
    CachedSample,
    RefusedRecord,
    checked_description,
    numbers,
    read_tars,
    tars_below,
)
from data_prep.inspect.read_shards import read_samples
from data_prep.planning.splits import Split, key_of
from data_prep.refusals import PrepError
from dit.codecs.normalization import Whitening
from dit.parsing import parse_json
from dit.safe_writing import write_atomically
from dit.stored_samples import (
    MLPERF,
    MLPERF_SCALE,
    MLPERF_SHIFT,
    UnusableError,
    check_regular,
    level_index,
    mlperf_nulls,
    mlperf_sizes,
    mlperf_tensors,
    tars_of_mlperf,
)
from dit.system_errors import reason


def holds_mlperf(folder: Path) -> bool:
    """Whether the tars below `folder` are of MLPerf's FLUX.1, judged by their first sample."""
    return tars_of_mlperf(tars_below(folder))


def read_mlperf(folder: Path) -> Iterator[CachedSample | RefusedRecord]:
    """Yields every sample of every MLPerf tar below `folder`, or its refusal.

    Latents are normalised as in the benchmark.
    """
    return read_tars(folder, _record)


def whitening(channels: int) -> Whitening:
    """MLPerf's normalisation of latents with `channels` channels."""
    return Whitening(mean=(MLPERF_SHIFT,) * channels, std=(1 / MLPERF_SCALE,) * channels)


def _record(name: str, _key: str, parts: dict[str, bytes]) -> CachedSample:
    about = _description(parts)
    tensors = mlperf_tensors(parts)
    sizes = mlperf_sizes(numbers(tensors["latent"], "CFHW", what="mean"))
    known = {"caption": "", "source": str(about.get("key", name)), "fps": None, **sizes}
    known |= {f"original_{side}": sizes[side] for side in ("height", "width")}
    if (level := level_index(about)) is not None:
        known["timestep"] = level
    return CachedSample(key=key_of(name), tensors=tensors, about=checked_description(known))


def _description(parts: Mapping[str, bytes]) -> dict[str, Any]:
    """The `.json` of a sample with the files `parts`, of which all others may be empty.

    Raises:
        ValueError: a file is missing, or the `.json` is not an object, or has no valid noise level.
    """
    if missing := {"json", *(one.part for one in MLPERF.values())}.difference(parts):
        found = ", ".join(f".{part}" for part in parts) or "nothing"
        raise UnusableError(f"there is no .{min(missing)}, only {found}; write the sample again")
    about = parse_json(parts["json"])
    if not isinstance(about, dict):
        raise UnusableError(
            f".json holds a {type(about).__name__}, not an object; write the sample again"
        )
    level_index(about)
    return about


def null_texts(folder: Path) -> dict[str, Tensor]:
    """Embeddings of the empty caption by tensor name, float32, from files anywhere below `folder`.

    Raises:
        PrepError: a file is missing or damaged.
    """
    try:
        return mlperf_nulls(lambda name: next(iter(sorted(folder.rglob(name))), folder / name))
    except UnusableError as error:
        raise PrepError(str(error)) from None


def link_shards(folder: Path, target: Path, levels: Counter[int]) -> dict[Split, dict[str, int]]:
    """Links every tar below `folder` into `target`, with an index of its samples.

    Tars whose samples have a fixed noise level go to the split val, all others to train. Adds the
    number of samples of each level k / 8 to `levels`, by k. Returns the samples of each shard, by
    split.

    Raises:
        PrepError: a tar cannot be read, or holds a sample that is not of MLPerf.
    """
    shards: dict[Split, dict[str, int]] = {}
    for path in tars_below(folder):
        try:
            check_regular(path)
            ends, found = _outline(path)
        except (OSError, tarfile.TarError, ValueError) as error:
            raise PrepError(f"{path}: {reason(error)}; restore it or move it elsewhere") from None
        if len(ends) == 1:
            continue  # no sample
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
    """Scans a tar without reading tensors, and returns (ends, levels).

    `ends` has the first byte of the first sample, and the first byte after each sample. `levels`
    has the k of each sample's fixed noise level k / 8; for training samples it is empty.

    Raises:
        UnusableError: a sample cannot be used, or only some of the samples have a level.
    """
    ends, levels = [0], list[int]()
    # The whole tar first: if it is cut short, that is what is wrong with its last sample.
    for span, key, parts in [*read_samples(path, ending=".json")]:
        ends[-1:] = span.start, span.stop
        try:
            level = level_index(_description(parts))
        except ValueError as error:
            raise UnusableError(f"key {key}: {error}") from error
        levels += [] if level is None else [level]
    if levels and len(levels) != len(ends) - 1:
        raise UnusableError(
            f"{len(levels)} of its {len(ends) - 1} samples have a `timestep`, and all or none must"
            " have one; pack training and validation samples into separate tars"
        )
    return ends, levels
