"""Measures the rate of the loader against a plain read of its shards, and its buffer's memory.

    python benchmarks/benchmark_loader.py --samples 20000 1000 --memory 4096

1. shards    writes samples of about 4 kB (small pictures), then of 400 kB (video)
2. rates     takes turns between three ways to read them, and prints the median of each:
             - tarfile, with the decoding and checks of the loader, one sample after the other
             - the same, and packs them in the order of the shards
             - our loader
3. memory    of a process that has filled a packing buffer, over one with a buffer of 32 samples

With the loader in this process, rates are per CPU second. With worker processes, as in a run, they
are per second of the clock, which needs an idle machine.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dit.command_line import OptionParser
from dit.config import DatasetConfig
from dit.planner.tables import table_of, wide_console


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    # Imported late: --help answers without torch.
    from measuring.loader import KINDS, memory, rates, write_dataset

    found: dict[str, list[dict[str, Any]]] = {"rates": [], "memory": []}
    for kind, samples in zip(KINDS, options.samples, strict=True):
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            folder = Path(name)
            write_dataset(folder, kind, samples)
            for workers in options.workers if options.repeats else ():
                about = {"payload": kind.name, "workers": workers}
                measured = rates(folder, kind, samples, options, workers)
                found["rates"].append(about | measured)
            for buffer in options.memory:
                found["memory"].append(memory(folder, kind, buffer))
    console = wide_console()
    titles = ("Samples per second; CPU seconds where workers = 0", "Memory")
    for title, rows in zip(titles, found.values(), strict=True):
        if rows:
            console.print(table_of(title, [{n: _written(v) for n, v in r.items()} for r in rows]))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


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


def _written(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if value > 50 else f"{value:.2f}"
    return str(value)


if __name__ == "__main__":
    main()
