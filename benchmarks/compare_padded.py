"""Compares real tokens a second of a packed step and of Diffusers' model in a plain loop.

1. samples   draws random samples of a mixture and packs them; plain loops get the same samples,
             noise and levels
2. start     gives both networks equal weights; where nothing is padded, the losses of the first
             step must agree
3. steps     runs the methods in turn, so that other load on the machine affects all alike, and
             prints medians

    python benchmarks/compare_padded.py --steps 7 --family flux

Any key of a run may follow (model.name=dit_xl model.precision=bf16 ...). One process.
"""

# C latent channels, F H W frames, rows, columns

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from dit.command_line import OptionParser
from dit.config import EmaKind, MockGeometry, ObjectiveName, Precision, RunConfig
from dit.config_loading import load_config
from dit.console import Console
from dit.distributed.entry import run
from dit.models.registry import default_family

OURS = "packed, ours"
_WIDTH_256 = [
    *("model.name=custom", "model.num_layers=2", "model.hidden_size=256"),
    *("model.num_attention_heads=4", "model.crossattn_emb_size=256", "model.precision=fp32"),
]
SMALL = {
    "dit": ["model.family=dit", *_WIDTH_256, "model.adaln_lora_dim=32"],
    "flux": [
        *("model.family=flux", *_WIDTH_256, "model.num_single_layers=4", "model.pooled_size=64"),
        *("model.rope_axes=[16,24,24]", "objective.guidance=1.0"),
    ],
}
"""Overrides for a network that two cores train in seconds, by family."""

_MIXTURES = {
    "equal": (MockGeometry(height=32, width=32, text_length=64, weight=12),),
    "mixed": (
        MockGeometry(frames=8, height=32, width=32, text_length=128, fps=24, weight=1),
        MockGeometry(frames=4, height=24, width=32, text_length=96, fps=24, weight=2),
        MockGeometry(height=32, width=32, text_length=64, weight=3),
        MockGeometry(height=24, width=32, text_length=32, weight=3),
        MockGeometry(height=16, width=24, text_length=16, weight=3),
    ),
}
"""Mixtures of samples by name: samples of one size, and one whose longest video has five times the
mean number of tokens."""
_LARGE = {
    "large": (
        MockGeometry(frames=4, height=128, width=128, text_length=256, fps=24, weight=1),
        MockGeometry(height=128, width=128, text_length=128, weight=4),
        MockGeometry(height=96, width=96, text_length=128, weight=6),
        MockGeometry(height=64, width=64, text_length=128, weight=9),
    ),
}
"""Mixture for --large: a video of 16,384 tokens and pictures of 1,024 to 4,096 tokens, in four
packs. With the small mixtures a GPU computes a pack faster than the host can start it."""

# In bfloat16 Diffusers rounds noise levels, modulation and predictions, which are float32 in ours.
_TOLERANCE = {Precision.FP32: 1e-3, Precision.BF16: 3e-2}


def main(argv: Sequence[str] | None = None) -> int:
    compare(argv)
    return 0


def compare(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Runs the comparison with the options in `argv`, and prints a table.

    Returns one dict of figures for each mixture, with its name under `samples`. With --json the
    same list is written to a file.
    """
    options, overrides = _parser().parse_known_args(argv)
    small = load_config(_base(large=options.large), overrides=SMALL[options.family])
    base = load_config(small, config_file=options.config_file, overrides=overrides)
    found = []
    for name, mixture in (_LARGE if options.large else _MIXTURES).items():
        dataset = replace(base.dataset, mock=True, mock_samples=mixture, num_workers=0)
        config = replace(base, dataset=dataset)
        numbers = _compare(config, options)
        found.append({"samples": name} | numbers)
    _print(found)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config-file", type=Path)
    parser.add_argument("--family", choices=SMALL, default="dit", help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=7, help="timed ones (%(default)s)")
    parser.add_argument(
        "--batch", type=int, default=4, help="samples that are padded to the longest (%(default)s)"
    )
    parser.add_argument(
        "--large",
        action="store_true",
        help="for a GPU: packs of 32,768 tokens, pictures and videos, which it computes for longer"
        " than the host prepares them",
    )
    parser.add_argument(
        "--cpu-seconds",
        action="store_true",
        help="of this process, for a CPU that other programs use as well",
    )
    parser.add_argument("--json", type=Path, help="file for the numbers")
    return parser


def _base(*, large: bool) -> RunConfig:
    base, capacity = RunConfig(model=default_family().default()), 32_768 if large else 4096
    return replace(
        base,
        dataset=replace(base.dataset, task_encoder_seq_length=capacity, packing_buffer_size=64),
        objective=replace(base.objective, name=ObjectiveName.FLOW, text_dropout=0.0),
        ema=replace(base.ema, kind=EmaKind.NONE),  # the plain loops keep none
    )


def _compare(config: RunConfig, options: argparse.Namespace) -> dict[str, Any]:
    clock = time.process_time if options.cpu_seconds else time.perf_counter
    contenders, tokens = _contenders(config, options.batch)
    losses = {name: step() for name, step in contenders.items()}  # warm-up as well
    _wait()
    _check_losses(losses, tolerance=_TOLERANCE[config.model.precision])
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(options.steps):
        for name, step in contenders.items():
            began = clock()
            step()
            _wait()
            seconds[name].append(clock() - began)
    rates = {name: tokens / median(taken) for name, taken in seconds.items()}
    # Ratios are taken within a round, because other load slows down all contenders of a round.
    ratios = {
        name: median(b / a for a, b in zip(seconds[OURS], taken, strict=True))
        for name, taken in seconds.items()
    }
    return {"real_tokens": tokens, "tokens_per_s": rates, "ratio": ratios, "seconds": seconds}


def _contenders(config: RunConfig, batch: int) -> tuple[dict[str, Callable[[], float]], int]:
    """The training steps to compare, and the number of real tokens in a step.

    Returns (steps, tokens): steps maps the name of each method to a function that runs one training
    step and returns its loss. `batch` is the number of samples of a padded batch.
    """
    from measuring.padded import (
        Batching,
        PlainLoop,
        diffusers_network,
        diffusers_weights,
        examples,
        rectangles,
    )

    from dit.distributed.process_groups import device, process_groups, start_processes
    from dit.models.layers.parallel_linear import dtype
    from dit.train.model_and_optimizer import build_model_and_optimizer, randomise
    from dit.train.step import forward_backward, optimizer_step

    logging.getLogger("diffusers").setLevel(logging.ERROR)  # it warns of parts that are not there
    start_processes(seed=config.rng.seed, model=config.model)
    model = build_model_and_optimizer(config, process_groups(), fill=partial(randomise, seed=1))
    items = _items(config)
    network: Any = model.chunks[0].module
    weights = diffusers_weights(network, config.model)
    real = sum(batch.real_tokens for batch, _ in items)

    def ours() -> float:
        report = forward_backward(model, items, objective=config.objective)
        loss = report.total / report.count
        optimizer_step(model, config=config, number=1, loss=loss)
        return loss

    found: dict[str, Callable[[], float]] = {OURS: ours}
    # In their order of arrival: a plain loop does not know the lengths of samples in advance.
    asked = sorted(
        (one for item in items for one in examples(config, *item)),
        key=lambda one: int(one.key),
    )
    for batching in Batching:
        theirs = diffusers_network(config)
        theirs.load_state_dict(weights)
        theirs.to(device(), dtype(config.model))
        loop = PlainLoop(theirs, config)
        batches = rectangles(
            asked,
            batching,
            batch=batch,
            capacity=config.dataset.task_encoder_seq_length,
            dtype=dtype(config.model),
        )
        numbers = real * config.model.patch_features
        found[str(batching)] = partial(loop.step, batches, numbers=numbers)
    return found, real


def _items(config: RunConfig) -> list[Any]:
    """The micro-batches of a step, as (packed batch, training problem) on the device.

    The packs hold the random samples of the mixture `dataset.mock_samples`.
    """
    from dit.bin_packing import best_fit_decreasing
    from dit.data import null_inputs
    from dit.data.pack import SampleSize, pack_samples
    from dit.distributed.process_groups import device
    from dit.models.patch_layout import PatchLayout
    from dit.objectives.registry import training_objective
    from dit.objectives.training_target import training_problem
    from dit.pack_wire import pack_to

    layout, dataset = PatchLayout.of(config), config.dataset
    samples = list(_samples(config))
    lengths = [SampleSize.of(sample, layout).tokens for sample in samples]
    bins = best_fit_decreasing(lengths, capacity=dataset.task_encoder_seq_length)
    packs = [
        pack_samples([samples[i] for i in sorted(one, key=lengths.__getitem__)], layout)
        for one in bins
    ]
    null = null_inputs(config, device())
    settings = {"seed": config.rng.seed, "step": 1, "null": null, "options": config.objective}
    objective = training_objective(config.objective)
    return [training_problem(objective, pack_to(pack, device()), **settings) for pack in packs]


def _samples(config: RunConfig) -> Iterator[Any]:
    """Yields random samples of every kind in `dataset.mock_samples`, in random order.

    Each kind has twice as many samples as its rounded weight. A sample's key is its position in the
    order.
    """
    import torch

    from dit.batch import TEXT, LatentSample
    from dit.models.family import InputKind
    from dit.models.registry import family_of

    model = config.model
    kinds = [g for g in config.dataset.mock_samples for _ in range(2 * round(g.weight))]
    random = torch.Generator().manual_seed(config.rng.seed)
    for place, number in enumerate(torch.randperm(len(kinds), generator=random).tolist()):
        kind = kinds[number]
        size = (model.in_channels, kind.frames, kind.height, kind.width)
        latent_CFHW = torch.randn(size, generator=random)
        shapes = {
            one.name: (kind.text_length, one.width) if one.kind is InputKind.TEXT else (one.width,)
            for one in family_of(model).inputs(model)
            if one.kind in (InputKind.TEXT, InputKind.VECTOR)
        }
        inputs = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
        yield LatentSample(
            key=str(place),
            latent_CFHW=latent_CFHW,
            text_LE=inputs.pop(TEXT),
            fps=kind.fps or float("nan"),
            others=inputs,
        )


def _check_losses(losses: dict[str, float], *, tolerance: float) -> None:
    from measuring.padded import Batching

    packed, plain = losses[OURS], losses[str(Batching.BUCKETS)]
    if not abs(packed - plain) <= tolerance * abs(plain):
        raise ValueError(
            f"the first step's loss is {packed:.6g} packed and {plain:.6g} in buckets: the two do"
            " not compute the same; find the first layer whose outputs differ"
        )


def _wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _print(found: list[dict[str, Any]]) -> None:
    table = Table(title="Real tokens a second, and ours over theirs", title_justify="left")
    for name in ("samples", *found[0]["tokens_per_s"]):
        table.add_column(name, justify="right")
    for one in found:
        cells = [
            f"{rate:,.0f}" + ("" if name == OURS else f"  ({one['ratio'][name]:.2f}x)")
            for name, rate in one["tokens_per_s"].items()
        ]
        table.add_row(one["samples"], *cells)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(run(main))
