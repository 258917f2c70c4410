"""Counts the bytes that a layer reads and writes outside its matrix products, without a GPU.

1. samples   a pack of equal samples, without padding and with some at the end of each
2. count     bytes of inputs and outputs of every operation except views, forward and backward,
             with torch's operations (eager) and with the kernels of dit/models/kernels (fused)
3. report    units of (tokens x width x 2 bytes) for each layer; --operations: by name

    python benchmarks/count_traffic.py --models dit_xl
    python benchmarks/count_traffic.py --models wan2.1_t2v_14b lora.rank=32 lora.dropout=0.1
    python benchmarks/count_traffic.py --table dit/planner/layer_units.json

The last command writes the planner's table. Attention kernels and products with a weight are left
out: the planner counts them by their FLOPs.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from dit.command_line import OptionParser
from dit.config import Precision
from dit.config_loading import default_config, load_config
from dit.console import Console
from dit.models.registry import named_model

if TYPE_CHECKING:
    from measuring.memory_traffic import LayerTraffic
    from megatron.core.process_groups_config import ProcessGroupCollection

LAYERS: Mapping[str, tuple[str, Mapping[str, int], Mapping[str, int]]] = {
    "cross": ("dit_xl", {"num_layers": 1}, {"num_layers": 2}),
    "cross, learned positions": ("cosmos_7b", {"num_layers": 1}, {"num_layers": 2}),
    "cross, table": ("wan2.1_t2v_14b", {"num_layers": 1}, {"num_layers": 2}),
    "double": (
        "flux1_schnell",
        {"num_layers": 1, "num_single_layers": 1},
        {"num_layers": 2, "num_single_layers": 1},
    ),
    "double, no norm": ("sd3", {"num_layers": 2}, {"num_layers": 3}),
    "double, second attention": (
        "sd3.5_medium",
        {"num_layers": 3, "dual_attention_layers": 1},
        {"num_layers": 4, "dual_attention_layers": 2},
    ),
    "sequential": (
        "zimage",
        {"num_layers": 1, "num_refiner_layers": 1},
        {"num_layers": 2, "num_refiner_layers": 1},
    ),
    "sequential, grouped heads": (
        "lumina2",
        {"num_layers": 1, "num_refiner_layers": 1},
        {"num_layers": 2, "num_refiner_layers": 1},
    ),
    "double, gated": (
        "flux2_klein_4b",
        {"num_layers": 1, "num_single_layers": 1},
        {"num_layers": 2, "num_single_layers": 1},
    ),
    "single": (
        "flux1_schnell",
        {"num_layers": 1, "num_single_layers": 1},
        {"num_layers": 1, "num_single_layers": 2},
    ),
    "parallel, gated": (
        "flux3_klein_base",
        {"num_layers": 1, "num_single_layers": 1},
        {"num_layers": 1, "num_single_layers": 2},
    ),
    "single, gated": (
        "flux2_klein_4b",
        {"num_layers": 1, "num_single_layers": 1},
        {"num_layers": 1, "num_single_layers": 2},
    ),
}
"""The layers of the planner's table by name of the row (`dit.planner.layer_traffic.row_of`). A
value is (named model size, keys of a first network, keys of a second network); the second network
has one layer of this kind more than the first."""


def main(arguments: Sequence[str] | None = None) -> None:
    options, overrides = _parser().parse_known_args(arguments)
    # Imported late, as below: --help answers without torch.
    from measuring.memory_traffic import (
        ATTENTION,
        ONE_HOT_PRODUCTS,
        WEIGHT_PRODUCTS,
        PackShape,
        layer_traffic,
    )

    from dit.distributed.process_groups import process_groups, start_processes

    if options.table:
        start_processes(seed=1, model=named_model("dit_xl"))
        write_table(options.table, process_groups())
        return
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
    add("--table", type=Path, help="file for the units of all kinds of layers; prints nothing")
    return parser


def write_table(file: Path, groups: ProcessGroupCollection) -> None:
    """Writes the planner's table to `file`, one line for each layer of `LAYERS`."""
    lines = []
    for name in LAYERS:
        columns = {kind: layer_columns(name, kind, groups) for kind in ("eager", "fused")}
        lines.append(f"{json.dumps(name)}: {json.dumps(columns)}")
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def layer_columns(
    name: str, kernels: str, groups: ProcessGroupCollection
) -> dict[str, dict[str, float]]:
    """Memory traffic of one layer of `LAYERS`, as {"forward" or "backward": {quantity: units}}.

    A unit is 2 bytes times the width of the network. `kernels` is eager or fused. The quantities
    are:

    latents  units for each latent token, besides those under hidden
    text     units for each text token, besides those under hidden
    hidden   units for each token in the feed-forward, to be multiplied by the MLP ratio
    """
    from measuring.memory_traffic import PackShape, layer_traffic

    pack = PackShape(samples=8, text=128)
    size, *counts = LAYERS[name]
    share, ratio = pack.text / math.prod(pack.grid), 4  # text tokens for each latent token
    joint = not name.startswith("cross")  # whether text passes the feed-forward

    def units(*, text: int = 1, hidden: int = 1) -> list[float]:
        keys = {"mlp_ratio": ratio * hidden, "text_pad_to": None, "precision": Precision.BF16}
        model = replace(named_model(size), name="custom", **keys)
        shape = replace(pack, text=text * pack.text)
        found = layer_traffic(model, shape, groups, fused=kernels == "fused", counts=counts)
        return [one.units() for one in found]

    columns = {}
    for way, one, wide, long in zip(
        ("forward", "backward"), units(), units(hidden=2), units(text=2), strict=True
    ):
        hidden = (wide - one) / ratio / (1 + joint * share)
        text = (long - one) / share - joint * ratio * hidden
        latents = one - text * share - hidden * ratio * (1 + joint * share)
        found = {"latents": latents, "text": text, "hidden": hidden}
        columns[way] = {column: round(value, 2) for column, value in found.items()}
    return columns


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
