"""Measures the rates of the loader and of plain loops, and the memory of the loader's buffer."""

from __future__ import annotations

import multiprocessing
import statistics
import tarfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from data_prep.planning.splits import Split
from data_prep.writing.dataset_folder import publish
from data_prep.writing.tar_shards import ShardSeries, sample_parts
from dit.batch import LatentSample
from dit.config import DatasetConfig, RunConfig, TrainConfig
from dit.data import build_train_loader
from dit.data.cook import Expected, cook
from dit.data.pack import pack_samples
from dit.models.registry import named_model


@dataclass(frozen=True, kw_only=True)
class ShardKind:
    """The sizes of samples in one set of shards."""

    name: str
    latent: tuple[int, int, int, int]
    text: tuple[int, int]
    capacity: int  # tokens of a pack


KINDS = (
    ShardKind(name="4 kB", latent=(4, 1, 16, 16), text=(8, 128), capacity=4096),
    ShardKind(name="400 kB", latent=(16, 5, 32, 32), text=(116, 1024), capacity=16384),
)


def write_dataset(folder: Path, kind: ShardKind, samples: int) -> None:
    """Writes a dataset of `samples` equal samples to `folder`, in the form of data_prep."""
    rng = torch.Generator().manual_seed(0)
    tensors = {
        "latent": torch.randn(kind.latent, generator=rng).bfloat16(),
        "text": torch.randn(kind.text, generator=rng).bfloat16(),
    }
    about = {"format_version": 1, "caption": "word " * 20, "fps": None}
    parts = sample_parts(tensors, about)
    with ShardSeries(folder / "train", max_samples=10_000, max_bytes=2**27) as series:
        for number in range(samples):
            series.write(f"{number:08d}", parts)
    null = {"text": torch.zeros(1, kind.text[1])}
    publish(folder, shards={Split.TRAIN: series.counts}, card={}, null_text=null)


def config_of(folder: Path, kind: ShardKind, *, buffer: int, workers: int = 0) -> RunConfig:
    data = DatasetConfig(
        path=str(folder),
        task_encoder_seq_length=kind.capacity,
        packing_buffer_size=buffer,
        num_workers=workers,
    )
    model = replace(
        named_model("dit_xl"), in_channels=kind.latent[0], crossattn_emb_size=kind.text[1]
    )
    return RunConfig(model=model, dataset=data, train=TrainConfig(global_batch_size=1))


def rates(
    folder: Path, kind: ShardKind, samples: int, options: Namespace, workers: int
) -> dict[str, Any]:
    config = config_of(folder, kind, buffer=options.buffer, workers=workers)
    expected, loader = Expected.of(config), build_train_loader(config, rank=0, world_size=1)
    next(loader)  # from here on the buffer is full
    ways: dict[str, Callable[[], int]] = {
        "plain": lambda: read_plainly(folder, expected),
        "plain packs": lambda: read_in_order(folder, expected),
        "ours": lambda: read_packed(loader, samples),
    }
    clock = time.perf_counter if workers else time.process_time
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.repeats):
        for name, read in ways.items():
            began = clock()
            count = read()
            seconds[name].append((clock() - began) / count)
    loader.close()
    medians = {name: statistics.median(seconds[name]) for name in ways}
    return {name: 1 / medians[name] for name in ways} | {
        f"ours / {name}": medians[name] / medians["ours"] for name in ways if name != "ours"
    }


def read_plainly(folder: Path, expected: Expected) -> int:
    """Reads samples in shard order with tarfile and the loader's decoding; returns their number."""
    return sum(1 for _ in _decoded(folder, expected))


def read_in_order(folder: Path, expected: Expected) -> int:
    """Reads samples with tarfile and packs them in shard order; returns the number packed.

    The samples left in an unfinished pack at the end are not counted.
    """
    count, waiting, tokens = 0, list[LatentSample](), 0
    for sample in _decoded(folder, expected):
        length = expected.layout.padded_tokens(sample.latent_CFHW)
        if tokens + length > expected.capacity:
            pack_samples(waiting, expected.layout)
            count, waiting, tokens = count + len(waiting), [], 0
        waiting.append(sample)
        tokens += length
    return count


def _decoded(folder: Path, expected: Expected) -> Iterator[LatentSample]:
    for path in sorted((folder / "train").glob("*.tar")):
        with tarfile.open(path, "r:") as tar:
            parts: dict[str, bytes] = {}
            while (member := tar.next()) is not None:
                key, _, part = member.name.partition(".")
                stream = tar.extractfile(member)
                assert stream is not None
                parts[part] = stream.read()
                if len(parts) == 2:
                    yield cook(parts, expected, key=key)
                    parts = {}


def read_packed(loader: Any, samples: int) -> int:
    """Reads packs from the loader until they have `samples` samples; returns their number."""
    count = 0
    while count < samples:
        count += next(loader).num_samples
    return count


def memory(folder: Path, kind: ShardKind, buffer: int) -> dict[str, Any]:
    # A process of its own for each size, because freed memory does not return to the system.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        sizes = [pool.apply(resident_mb, (folder, kind, size), {}) for size in (32, buffer)]
    return {"payload": kind.name, "buffer": buffer, "MB more than with 32": sizes[1] - sizes[0]}


def resident_mb(folder: Path, kind: ShardKind, buffer: int) -> float:
    """Resident memory of this process in MB (10^6 bytes) with a full buffer of `buffer` samples."""
    loader = build_train_loader(config_of(folder, kind, buffer=buffer), rank=0, world_size=1)
    next(loader)
    size = psutil.Process().memory_info().rss / 1e6
    loader.close()
    return size
