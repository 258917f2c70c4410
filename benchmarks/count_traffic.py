"""Memory traffic of a layer beside its products: bytes read and written, counted without a GPU.

1. samples   a pack of equal samples, without padding and with some at the end of each
2. count     bytes of inputs and outputs of every operation that is no view, forward and backward,
             with torch's operations (eager) and with the kernels of dit/models/kernels (fused)
3. report    units of (tokens x width x 2 bytes) for each layer; --operations: by name

    python benchmarks/count_traffic.py --models dit_xl
    python benchmarks/count_traffic.py --models wan2.1_t2v_14b lora.rank=32 lora.dropout=0.1

Attention kernels and products with a weight are left out: other figures tell of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measuring.memory_traffic import (
    ATTENTION,
    ONE_HOT_PRODUCTS,
    WEIGHT_PRODUCTS,
    LayerTraffic,
    PackShape,
    layer_traffic,
)
from rich.table import Table

from dit.command_line import OptionParser
from dit.config_loading import default_config, load_config
from dit.console import Console
from dit.distributed.process_groups import process_groups, start_processes


def main(arguments: Sequence[str] | None = None) -> None:
    options, overrides = _parser().parse_known_args(arguments)
    left_out = [ATTENTION, WEIGHT_PRODUCTS]
    left_out += [ONE_HOT_PRODUCTS] if options.without_products else []
    tight = PackShape(samples=options.samples, grid=tuple(options.grid), text=options.text)
    rows = []
    for name in options.models:
        keys = [f"model.name={name}", "model.precision=bf16", *overrides]
        config = load_config(default_config(), overrides=keys)
        model, lora = config.model, config.lora
        start_processes(seed=1, model=model)
        for samples, shape in (("tight", tight), ("padded", tight.padded)):
            for kernels in ("eager", "fused"):
                head = {"model": name, "kernels": kernels, "samples": samples}
                fused = kernels == "fused"
                found = layer_traffic(model, shape, process_groups(), fused=fused, lora=lora)
                rows += _rows(head, found, left_out)
    _print(rows, by_name=options.operations)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--models", nargs="+", default=["dit_xl", "cosmos_7b"], help="values of model.name")
    add("--samples", type=int, default=32, help="of a pack (%(default)s)")
    add("--grid", type=int, nargs=3, default=[1, 32, 32], help="frames, rows, columns in patches")
    add("--text", type=int, default=128, help="tokens of a caption (%(default)s)")
    add("--operations", action="store_true", help="what each operation moves, largest first")
    add(
        "--without-products",
        action="store_true",
        help="leave one-hot products out as well (the sums over the tokens of a sample)",
    )
    add("--json", type=Path, help="file for the numbers")
    return parser


def _rows(
    head: dict[str, str], found: Sequence[LayerTraffic], left_out: Sequence[str]
) -> list[dict[str, Any]]:
    return [
        head | {"pass": name} | _row(one, left_out)
        for name, one in zip(("forward", "backward"), found, strict=True)
    ]


def _row(one: LayerTraffic, left_out: Sequence[str]) -> dict[str, Any]:
    names = [n for n in sorted(one.bytes, key=lambda n: -one.bytes[n]) if n not in left_out]
    return {
        "operations": sum(one.count[name] for name in names),
        "bytes": sum(one.bytes[name] for name in names),
        "units": one.units(without=left_out),
        "by name": {n: (one.count[n], one.bytes[n] / one.unit) for n in names if one.count[n]},
    }


def _print(rows: list[dict[str, Any]], *, by_name: bool) -> None:
    console = Console()
    table = Table(title="Of one layer, beside attention and products with weights")
    about = ("model", "kernels", "samples", "pass")
    for name in (*about, "operations", "GB", "units"):
        table.add_column(name, justify="left" if name in about else "right")
    for row in rows:
        numbers = (str(row["operations"]), f"{row['bytes'] / 1e9:.2f}", f"{row['units']:.1f}")
        table.add_row(*(row[name] for name in about), *numbers)
    console.print(table)
    for row in rows if by_name else ():
        title = ", ".join(row[name] for name in about)
        table = Table("operation", "calls", "units", title=title)
        for name, (count, units) in row["by name"].items():
            table.add_row(name, str(count), f"{units:.2f}")
        console.print(table)


if __name__ == "__main__":
    main()
