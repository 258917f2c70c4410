"""Measures the rate of writing shards and ledger, and that of webdataset.ShardWriter.

python benchmarks/benchmark_writing.py --samples 20000 --bytes 4000 40000
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from data_prep.engine.ranks import ALONE
from data_prep.planning.splits import SplitFractions, key_of
from data_prep.writing.pack_options import PackOptions
from dit.command_line import OptionParser
from dit.console import Console

if TYPE_CHECKING:
    from data_prep.media.clips import Entry

_SHARD = 10_000  # samples
_BLOCK = 32  # samples between two flushes, as data_prep has it for images


def main(arguments: Sequence[str] | None = None) -> None:
    parser = OptionParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add = parser.add_argument
    add("--samples", type=int, default=20_000, help="samples of a run (%(default)s)")
    add("--bytes", type=int, nargs="+", default=[4_000, 40_000], help="of a sample's tensors")
    add("--repeats", type=int, default=5, help="runs of each, in turns (%(default)s)")
    add("--folder", type=Path, help="where shards are written and removed (default: temporary)")
    options = parser.parse_args(arguments)
    table = Table(title=f"Samples per second, median of {options.repeats}", title_justify="left")
    for name in ("bytes", "data_prep", "ShardWriter", "ratio"):
        table.add_column(name, justify="right")
    for size in options.bytes:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            ours, theirs = _rates(Path(folder), options.samples, size, options.repeats)
        table.add_row(f"{size:,}", f"{ours:,.0f}", f"{theirs:,.0f}", f"{ours / theirs:.2f}")
    Console().print(table)


def _rates(folder: Path, samples: int, size: int, repeats: int) -> tuple[float, float]:
    parts = {"safetensors": os.urandom(size), "json": b'{"caption": "%s"}' % (b"word " * 40)}
    entries = [planned(f"folder/picture_{number:08d}.png") for number in range(samples)]
    ours, theirs = [], []
    for _ in range(repeats):
        for write, seconds in ((write_resumably, ours), (write_plainly, theirs)):
            target = folder / "shards"
            target.mkdir()
            seconds.append(write(target, entries, parts))
            shutil.rmtree(target)
    return samples / statistics.median(ours), samples / statistics.median(theirs)


def planned(source: str) -> Entry:
    from data_prep.media.clips import Entry

    return Entry(
        key=key_of(source),
        source=source,
        width=16,
        height=16,
        caption="word " * 40,
        caption_from=".txt",
        resized=(16, 16),
        size=(16, 16),
        tokens=16,
        notes=("caption from .txt",),
    )


def write_resumably(target: Path, entries: list[Entry], parts: dict[str, bytes]) -> float:
    """Writes planned samples as shards, with a ledger; returns the seconds that it took."""
    # Imported late, as below: --help answers without torch.
    from data_prep.engine.block_worker import EncodedSample
    from data_prep.planning.plan import write_plan
    from data_prep.writing.dataset_folder import LEDGER
    from data_prep.writing.shard_writer import RankBlocks, Writer

    (target / LEDGER).mkdir()
    everything = SplitFractions(train=1, val=0, test=0)
    plan = write_plan(entries, target / "plan.jsonl", everything)
    limits = PackOptions(
        split=everything, shard_size=_SHARD, max_shard_bytes=2**40, max_bad_fraction=0
    )
    writer = Writer(folder=target, options=limits, ranks=ALONE)
    share = RankBlocks(plan=plan, size=_BLOCK, ranks=ALONE)
    packed = EncodedSample(
        parts=parts, size=(1, 16, 16), notes=("caption from .txt",), moments=(768, 0.12, 1.23)
    )
    start = time.perf_counter()
    with writer.resumed(writer.progress(share)):
        for block in share.after(0):
            writer.write(block, [packed] * len(block))
    return time.perf_counter() - start


def write_plainly(target: Path, entries: list[Entry], parts: dict[str, bytes]) -> float:
    from webdataset.writer import ShardWriter

    start = time.perf_counter()
    pattern = str(target / "shard-%06d.tar")
    with ShardWriter(pattern, maxcount=_SHARD, verbose=0) as shards:
        for entry in entries:
            shards.write({"__key__": entry.key, **parts})
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
