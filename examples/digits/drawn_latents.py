"""Measures the effect of drawing latents anew at each visit, in a small run on noisy digits.

    python examples/digits/drawn_latents.py runs/drawn_latents

1. pack   digits of 16 x 16 pixels in blocks of 2
2. write  a few training digits in three forms: as their mean, drawn once as in a cache of latents,
          and as the distribution from which each visit draws; validation has distributions
3. train  a run for each form and seed, with the same network and steps
4. table  losses of held-out digits, drawn by seed and sample, at fixed levels
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # examples/ is not installed

from data_prep.cli.parser import main as data_prep
from data_prep.planning.splits import Split
from dit.command_line import OptionParser
from dit.distributed.entry import run
from dit.planner.tables import table_of, wide_console
from examples.digits.mlperf_twin import trained

ARMS = ("mean", "drawn once", "drawn anew")
_KEYS = (
    *("model.hidden_size=64", "model.rope_axes=[4,6,6]", "dataset.task_encoder_seq_length=1088"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Packs, writes and trains all datasets, and prints the table; returns the exit code."""
    parser = OptionParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("output", type=Path, help="folder of the datasets and runs")
    add("--digits", type=int, default=100, help="to train on (%(default)s)")
    add("--std", type=float, default=0.3, help="of the noise, where latents have 1 (%(default)g)")
    add("--steps", type=int, default=500, help="of 16 digits (%(default)s)")
    add("--seeds", nargs="+", type=int, default=[1234, 1235, 1236])
    options = parser.parse_args(arguments)
    packed = options.output / "packed"
    words = ["--side", "16", "--pixel_block", "2", "--pooled_text", "--output_dir", str(packed)]
    if code := data_prep(["digits", *words]):
        return code
    rows = []
    for arm in ARMS:
        data = options.output / arm.replace(" ", "_")
        write(packed, data / "data", arm, digits=options.digits, std=options.std)
        curves = [_trained(options, data, seed) for seed in options.seeds]
        best, last = [min(one) for one in curves], [one[-1] for one in curves]
        rows.append({"latents": arm} | _columns("lowest", best) | _columns("last", last))
    wide_console().print(table_of("loss of held-out digits", rows))
    return 0


def write(packed: Path, folder: Path, arm: str, *, digits: int, std: float) -> None:
    """Writes the dataset of `arm` into `folder`, with `digits` of the training digits in `packed`.

    `arm` decides the form of the latents; `std` is the standard deviation of their noise. The
    validation split always has all its digits, as distributions.
    """
    import safetensors.torch  # late: --help answers without torch
    import torch

    from data_prep.inspect.read_shards import read_samples
    from data_prep.writing.dataset_folder import prepare_folder, publish
    from data_prep.writing.tar_shards import ShardSeries, sample_parts
    from dit.codecs.dataset_card import read_card

    prepare_folder(folder, overwrite=False)
    counts: dict[Split, dict[str, int]] = {}
    for split, most in ((Split.TRAIN, digits), (Split.VAL, None)):
        has_distribution = arm == "drawn anew" or split is Split.VAL
        rng = torch.Generator().manual_seed(0)
        with ShardSeries(folder / split, max_samples=10**4, max_bytes=2**30) as series:
            for _, key, parts in islice(read_samples(packed / split / "shard-000000.tar"), most):
                tensors = safetensors.torch.load(parts["safetensors"])
                mean = tensors["latent"] = tensors["latent"].float()
                if has_distribution:
                    tensors["latent_logvar"] = torch.full_like(mean, 2 * math.log(std))
                elif arm == "drawn once":
                    tensors["latent"] = mean + std * torch.randn(mean.shape, generator=rng)
                series.write(key, sample_parts(tensors, json.loads(parts["json"])))
        counts[split] = series.counts
    null_text = safetensors.torch.load_file(packed / "null_text.safetensors")
    publish(folder, shards=counts, card=read_card(packed), null_text=null_text)


def _trained(options: Any, folder: Path, seed: int) -> list[float]:
    told = [f"rng.seed={seed}", f"train.train_iters={options.steps}", *_KEYS]
    told += [f"dataset.path={folder / 'data'}"]
    return [fmean(row) for row in trained(folder / str(seed), told)["losses"]]


def _columns(name: str, losses: Sequence[float]) -> dict[str, str]:
    return {name: ", ".join(f"{x:.4f}" for x in losses), f"mean {name}": f"{fmean(losses):.4f}"}


if __name__ == "__main__":
    sys.exit(run(main))
