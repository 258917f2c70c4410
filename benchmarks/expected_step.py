"""Prints the planner's estimate of each shape that `make gpu` measures, by kind of cost.

    python benchmarks/expected_step.py

It is arithmetic: no device is needed. If activations do not fit into a device, the keys of
`model.recompute_granularity=auto` for it are planned as well.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measuring.shapes import SHAPES, WHOLE, shape_keys

from dit.command_line import OptionParser
from dit.config import Recompute, RunConfig
from dit.config_loading import default_config, load_config
from dit.device_specs import DEVICES, Device, device_named
from dit.planner.efficiency import EFFICIENCIES, Efficiency, efficiency_of
from dit.planner.tables import milliseconds, table_of, wide_console
from dit.planner.times import Times, expected_load, times
from dit.sizing.memory import memory
from dit.sizing.recomputation import choose_recomputation


def main(arguments: Sequence[str] | None = None) -> None:
    options, overrides = _parser().parse_known_args(arguments)
    efficiency, rows = EFFICIENCIES[options.attention], []
    for name in options.devices:
        device = DEVICES[name]
        room = device.memory * efficiency.memory
        for shape in options.shapes:
            for config in _configurations(shape, overrides, device):
                step = expected_step(config, device, efficiency)
                row = {"device": name, "shape": shape, "config": config, "step": step}
                rows.append(_PlannedStep(**row, room=room))
    console = wide_console()
    console.print("By arithmetic, not measured: milliseconds of a step, and shares")
    console.print(table_of("", [row.cells for row in rows]))
    for row in rows:
        if rate := whole_samples_per_s(row.shape, row.step.mfu * DEVICES[row.device].flops):
            whole = f"{row.device}, {row.shape}, {row.kernels}: the whole network at this MFU"
            console.print(f"{whole} trains {rate:.3g} samples/s")
    for name in options.devices:
        console.print(f"{name}: assumed are {efficiency.of(DEVICES[name])}")
    if options.json:
        options.json.write_text(json.dumps([row.numbers for row in rows], indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        description=(__doc__ or "").splitlines()[0],
        epilog="All other arguments are KEY=VALUE of all configurations.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--devices", nargs="+", choices=DEVICES, default=["h100", "h200"], help="(%(default)s)")
    shapes = ["xl", "7b", "flux-512"]
    add("--shapes", nargs="+", choices=SHAPES, default=shapes, help="(%(default)s)")
    add(
        "--attention",
        choices=EFFICIENCIES,
        default="plain",
        help="fused: FlashAttention-3 or TE's; plain is what torch brings (%(default)s)",
    )
    add("--json", type=Path, help="file for the numbers")
    return parser


def _configurations(shape: str, overrides: Sequence[str], device: Device) -> Iterator[RunConfig]:
    """Yields configurations of `shape`: eager kernels, fused kernels, and with recomputation.

    The one with recomputation is left out if the memory of `device` suffices without it.
    """
    for fused in ("false", "true"):
        keys = [*shape_keys(shape), f"model.fused_kernels={fused}", *overrides]
        yield load_config(default_config(), overrides=keys)
    config = load_config(default_config(), overrides=[*shape_keys(shape), *overrides])
    chosen = choose_recomputation(config, world_size=1, device_memory=device.memory).config
    if chosen.model.recompute_granularity is not Recompute.NONE:
        yield chosen


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedStep:
    """The planner's estimate of a step."""

    times: Times
    mfu: float
    """FLOP/s of the model over the peak of dense bfloat16 in the device's data sheet."""
    memory: int
    """Memory that the step needs, in bytes."""


def expected_step(config: RunConfig, device: Device, efficiency: Efficiency) -> ExpectedStep:
    """The planner's estimate of a step of full packs of `dataset.mock_samples` on `device`."""
    load = expected_load(config, fill=1.0)
    found = times(config, load, world_size=1, device=device, efficiency=efficiency)
    flops = 3 * load.flops * config.train.global_batch_size
    return ExpectedStep(
        times=found,
        mfu=flops / found.step / device.flops,
        memory=memory(config, world_size=1).total,
    )


def expected_here(config: RunConfig, name: str) -> dict[str, Any] | None:
    """The planner's estimate for the device named `name`, as a dict; None if the device is unknown.

    Keys are step_s, by_kind_s (seconds), mfu, memory_gb and assumed (the efficiencies).
    `model.attention_backend` must be the kernel that the measured step ran.
    """
    device = device_named(name)
    if device is None:
        return None
    efficiency = efficiency_of(config.model, config.train)
    step = expected_step(config, device, efficiency)
    return {
        "step_s": step.times.step,
        "mfu": step.mfu,
        "by_kind_s": step.times.by_kind,
        "memory_gb": step.memory / 1e9,
        "assumed": efficiency.of(device),
    }


def whole_samples_per_s(shape: str, flops: float) -> float | None:
    """Samples a second of the whole network, for a `shape` that has a few of its layers.

    It assumes that the whole network reaches `flops` FLOP/s, too. Packs are counted as full of
    samples without padding. None if `shape` does not stand for a larger network.
    """
    if shape not in WHOLE:
        return None
    config = load_config(default_config(), overrides=shape_keys(WHOLE[shape]))
    (sample,) = config.dataset.mock_samples
    taken = config.mock_tokens(sample) + sample.text_length  # in one attention
    packs_per_s = flops / (3 * expected_load(config, fill=1.0).flops)
    return packs_per_s * config.dataset.task_encoder_seq_length / taken


@dataclass(frozen=True, kw_only=True, slots=True)
class _PlannedStep:
    device: str
    shape: str
    config: RunConfig
    step: ExpectedStep
    room: float

    @property
    def kernels(self) -> str:
        model = self.config.model
        again = model.recompute_granularity is Recompute.FULL
        name = "fused" if model.fused_kernels else "eager"
        return name + (f", {model.recompute_num_layers} layers again" if again else "")

    @property
    def cells(self) -> dict[str, str]:
        kinds = {
            kind: text
            for kind, text in milliseconds(self.step.times).items()
            if kind not in ("communication", "host copies", "bubble")  # one device has none
        }
        fits = "" if self.step.memory <= self.room else " (too much)"
        head = {"device": self.device, "shape": self.shape, "kernels": self.kernels}
        need = f"{self.step.memory / 1e9:.0f}{fits}"
        return head | kinds | {"MFU": f"{self.step.mfu:.1%}", "GB": need}

    @property
    def numbers(self) -> dict[str, Any]:
        head = {"device": self.device, "shape": self.shape, "kernels": self.kernels}
        step = {"step_s": self.step.times.step, "by_kind_s": self.step.times.by_kind}
        return head | step | {"mfu": self.step.mfu, "memory": self.step.memory}


if __name__ == "__main__":
    main()
