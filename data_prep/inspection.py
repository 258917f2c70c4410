"""Reads a finished dataset folder back: counts, shapes, statistics, and every checksum."""

# C latent channels, F frames, H rows, W columns, L text tokens, E text width

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from data_prep import processors, text
from data_prep.cards import NULL_TEXT_NAME, read_card
from data_prep.folder import META
from data_prep.refusals import PrepError
from data_prep.whitening import Moments
from dit.json_text import parse_json

# What tarfile makes of garbled headers, which may say that a name has terabytes.
_DAMAGE = (tarfile.TarError, OSError, ValueError, OverflowError, RecursionError, MemoryError)


@dataclass
class ShardReport:
    """What one shard holds, and what is wrong with it."""

    name: str  # relative to the dataset folder
    samples: int = 0
    bytes: int = 0
    shapes: list[tuple[int, ...]] = field(default_factory=list)  # [C, F, H, W] of each latent
    text_lengths: list[int] = field(default_factory=list)  # tokens
    moments: Moments = field(default_factory=Moments)
    problems: list[str] = field(default_factory=list)


def shard_counts(folder: Path) -> dict[str, int]:
    """Samples of each shard, as `.nv-meta` lists them.

    Raises:
        PrepError: there is no readable `.nv-meta`.
    """
    path = folder / META / ".info.json"
    try:
        counts = parse_json(path.read_bytes())["shard_counts"]
        if all(type(count) is int and count >= 0 for count in counts.values()):
            return counts
    except OSError:
        raise PrepError(
            f"{folder} has no {META}/.info.json: it is no dataset, or packing was interrupted;"
            " pack it again with --overwrite"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise PrepError(f"{path} is damaged; pack the data again with --overwrite")


def check_encoders(folder: Path) -> list[str]:
    """What would keep generation from rebuilding text encoder and decoder of a dataset."""
    path = folder / NULL_TEXT_NAME
    try:
        card = read_card(folder)
        processors.from_card(card)
        null_text_LE = safetensors.torch.load(path.read_bytes())["text"]
        if not torch.equal(null_text_LE, text.from_card(card).encode("")):
            return [f"{path} is not the text encoder's embedding of the empty string"]
    except PrepError as error:
        return [str(error)]
    except (OSError, KeyError, SafetensorError) as error:
        return [f"{path} cannot be read: {error}"]
    return []


def inspect_shard(folder: Path, name: str, *, expected: int) -> ShardReport:
    """Reads every byte of a shard; what is wrong is reported, not raised."""
    report, path = ShardReport(name=name), folder / name
    try:
        report.bytes = path.stat().st_size
        starts = []
        for start, key, parts in read_samples(path):
            starts.append(start)
            report.samples += 1
            _check_sample(report, key, parts)
        _check_index(report, path, starts)
    except _DAMAGE as error:
        report.problems.append(
            f"{name} is damaged or cut short after {report.samples} samples: {error!r}"
        )
    if report.samples != expected:
        report.problems.append(f"{name} has {report.samples} samples, {META} says {expected}")
    return report


def read_samples(path: Path) -> Iterator[tuple[int, str, dict[str, bytes]]]:
    """Offset, key and files of each sample.

    Raises:
        TarError: the shard is damaged. A sparse member would ask for terabytes of zeros.
    """
    start, current, parts = 0, "", dict[str, bytes]()
    whole = path.stat().st_size
    with tarfile.open(path, "r:") as tar:
        for member in tar:
            key, _, part = member.name.partition(".")
            if key != current and parts:
                yield start, current, parts
                parts = {}
            if not parts:
                start, current = member.offset, key
            if member.issparse() or not 0 <= member.size <= whole:
                raise tarfile.ReadError(f"{member.name!r} is of {member.size} bytes, or sparse")
            content = tar.extractfile(member)
            parts[part] = content.read() if content else b""
        if parts:
            yield start, current, parts


def _check_index(report: ShardReport, path: Path, starts: list[int]) -> None:
    index = np.fromfile(path.with_suffix(".tar.idx"), np.uint64).tolist()
    if index[:-1] != starts:
        report.problems.append(f"{report.name}.idx does not fit {report.name}")
    elif index[-1] + 2 * tarfile.BLOCKSIZE > report.bytes:
        report.problems.append(f"{report.name} is cut short: its end-of-archive blocks are missing")


def _check_sample(report: ShardReport, key: str, parts: dict[str, bytes]) -> None:
    where = f"{report.name}, key {key}"
    try:
        payload = parts["safetensors"]
        wanted = parse_json(parts["json"])["crc32"]["safetensors"]
        found = f"{zlib.crc32(payload):08x}"
        if found != wanted:
            report.problems.append(
                f"{where}: checksum of .safetensors is {found}, .json says {wanted}"
            )
            return
        tensors = safetensors.torch.load(payload)
        _add(report, where, tensors["latent"], tensors["text"])
    except KeyError as missing:
        report.problems.append(f"{where}: {missing} is missing")
    except (ValueError, TypeError, SafetensorError) as error:
        report.problems.append(f"{where}: cannot be read: {error}")


def _add(report: ShardReport, where: str, latent_CFHW: Tensor, text_LE: Tensor) -> None:
    if latent_CFHW.dim() != 4 or text_LE.dim() != 2:
        shapes = f"latent {list(latent_CFHW.shape)}, text {list(text_LE.shape)}"
        report.problems.append(f"{where}: {shapes}, not [C, F, H, W] and [L, E]")
        return
    if not (torch.isfinite(latent_CFHW).all() and torch.isfinite(text_LE).all()):
        report.problems.append(f"{where}: NaN or Inf")
        return
    report.shapes.append(tuple(latent_CFHW.shape))
    report.text_lengths.append(len(text_LE))
    report.moments.add(latent_CFHW)
