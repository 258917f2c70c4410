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
from collections.abc import Iterable, Iterator
from pathlib import Path

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
from data_prep.inspect.read_shards import key_and_part, tar_files
from data_prep.planning.splits import Split, key_of
from data_prep.refusals import PrepError, Reason, RefusedError
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
    if lacking := _lacking(parts):
        raise RefusedError(Reason.UNREADABLE, lacking)
    tensors, about = mlperf_tensors(parts), parse_json(parts["json"])
    if not isinstance(about, dict):
        raise RefusedError(
            Reason.UNREADABLE, f".json holds a {type(about).__name__}, not an object"
        )
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
        PrepError: a tar or the level of a sample cannot be read.
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


def _lacking(parts: Iterable[str]) -> str | None:
    """A message that names a missing file of a sample; None if `parts` has them all."""
    missing = {"json", *(one.part for one in MLPERF.values())}.difference(parts)
    found = ", ".join(f".{part}" for part in parts) or "nothing"
    return f"there is no .{min(missing)}, only {found}" if missing else None


def _outline(path: Path) -> tuple[list[int], list[int]]:
    """Scans a tar, and returns (offsets, levels).

    `offsets` has the byte at which each sample begins, and as its last number the byte at which the
    last sample ends. `levels` has the k of each sample's fixed noise level k / 8; it is empty if
    the tar has training samples.

    Raises:
        UnusableError: a sample lacks a part, or only some of the samples have a level.
    """
    starts, levels, last, end = list[int](), list[int](), None, 0
    parts: dict[str, list[str]] = {}
    for member, content in tar_files(path, wanted=lambda name: name.endswith(".json")):
        key, part = key_and_part(member.name)
        parts.setdefault(key, []).append(part)
        if key != last:
            starts.append(member.offset)
            last = key
        if part == "json" and content is not None:
            levels += _level_of(key, content)
        end = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    for key, found in parts.items():
        if lacking := _lacking(found):
            raise UnusableError(f"key {key}: {lacking}")
    if levels and len(levels) != len(starts):
        raise UnusableError(f"only {len(levels)} of its {len(starts)} samples have a `timestep`")
    return [*starts, end], levels


def _level_of(key: str, content: bytes) -> list[int]:
    """The k of the fixed noise level k / 8 in a sample's `.json`, as [k]; [] if it has none.

    Raises:
        UnusableError: `content` is no JSON, or its level is not valid.
    """
    try:
        index = level_index(parse_json(content))
    except ValueError as error:
        raise UnusableError(f"key {key}: {error}") from error
    return [] if index is None else [index]
