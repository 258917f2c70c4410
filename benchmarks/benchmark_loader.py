"""Rate of the loader against a plain read of the same shards, and the memory of its buffer.

python benchmarks/benchmark_loader.py --samples 20000 1000 --memory 4096

1. shards    of samples of about 4 kB (small pictures) and 400 kB (video), in turn
2. rates     medians of alternating passes: tarfile with the decoding and checks of the loader, one
             sample after the other; the same, packed in the order of the shards; and our loader.
             In CPU seconds with the loader in this process; in seconds of the clock with worker
             processes, as in a run, which needs an idle machine
3. memory    of a process that has filled a packing buffer, over one with a buffer of 32 samples
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from data_prep.planning.splits import Split
from data_prep.writing.dataset_folder import publish
from data_prep.writing.tar_shards import ShardSeries, sample_parts
from dit.batch import LatentSample
from dit.command_line import OptionParser
from dit.config import DatasetConfig, RunConfig, TrainConfig
from dit.data import build_train_loader
from dit.data.cook import Expected, cook
from dit.data.pack import pack_samples
from dit.models.registry import named_model
from dit.planner.tables import table_of, wide_console


@dataclass(frozen=True, kw_only=True)
class ShardKind:
    """Sizes of the samples of one set of shards."""

    name: str
    latent: tuple[int, int, int, int]
    text: tuple[int, int]
    capacity: int  # tokens of a pack


KINDS = (
    ShardKind(name="4 kB", latent=(4, 1, 16, 16), text=(8, 128), capacity=4096),
    ShardKind(name="400 kB", latent=(16, 5, 32, 32), text=(116, 1024), capacity=16384),
)


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    rates, memory = [], []
    for kind, samples in zip(KINDS, options.samples, strict=True):
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            folder = Path(name)
            write_dataset(folder, kind, samples)
            for workers in options.workers if options.repeats else ():
                about = {"payload": kind.name, "workers": workers}
                rates.append(about | _rates(folder, kind, samples, options, workers))
            for buffer in options.memory:
                memory.append(_memory(folder, kind, buffer))
    console = wide_console()
    tables = {"Samples per second; CPU seconds where workers = 0": rates, "Memory": memory}
    for title, rows in tables.items():
        if rows:
            console.print(table_of(title, [{n: _written(v) for n, v in r.items()} for r in rows]))
    if options.json:
        options.json.write_text(json.dumps({"rates": rates, "memory": memory}, indent=1) + "\n")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = OptionParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add = parser.add_argument
    add("--samples", type=int, nargs=2, default=[20_000, 1_000], help="of 4 kB and of 400 kB")
    add("--repeats", type=int, default=5, help="passes of each, in turns; 0: none (%(default)s)")
    add("--buffer", type=int, default=64, help="dataset.packing_buffer_size (%(default)s)")
    workers = "dataset.num_workers, one or several; 0: in this process (%(default)s)"
    add("--workers", type=int, nargs="+", default=[0, DatasetConfig().num_workers], help=workers)
    add("--memory", type=int, nargs="*", default=[], help="packing buffers to measure, in samples")
    add("--folder", type=Path, help="where shards are written and removed (default: temporary)")
    add("--json", type=Path, help="file for the numbers")
    return parser.parse_args(arguments)


def write_dataset(folder: Path, kind: ShardKind, samples: int) -> None:
    """A dataset of `samples` samples, as data_prep leaves one."""
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


def _rates(
    folder: Path, kind: ShardKind, samples: int, options: argparse.Namespace, workers: int
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
    """Reads every sample in order, with tarfile and the decoding of the loader."""
    return sum(1 for _ in _decoded(folder, expected))


def read_in_order(folder: Path, expected: Expected) -> int:
    """As `read_plainly`, and packs the samples in the order of the shards."""
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
    """Reads packs of the loader until they have this many samples."""
    count = 0
    while count < samples:
        count += next(loader).num_samples
    return count


def _memory(folder: Path, kind: ShardKind, buffer: int) -> dict[str, Any]:
    # A process of its own for each size, because freed memory does not return to the system.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        sizes = [pool.apply(resident_mb, (folder, kind, size), {}) for size in (32, buffer)]
    return {"payload": kind.name, "buffer": buffer, "MB more than with 32": sizes[1] - sizes[0]}


def resident_mb(folder: Path, kind: ShardKind, buffer: int) -> float:
    """Resident memory of this process after the first pack, when the buffer is full."""
    loader = build_train_loader(config_of(folder, kind, buffer=buffer), rank=0, world_size=1)
    next(loader)
    size = psutil.Process().memory_info().rss / 1e6
    loader.close()
    return size


def _written(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value > 50 else f"{value:.2f}"
    return str(value)


if __name__ == "__main__":
    main()
