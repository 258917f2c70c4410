"""The parts of the studies on MLPerf's twin that need no training."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import safetensors.torch
import torch

from data_prep.cli import parser as data_prep
from data_prep.inspect.read_shards import read_samples
from dit.stored_samples import LEVELS as OF_SHARDS
from examples.digits.drawn_latents import ARMS, write
from examples.digits.mlperf_twin import LEVELS, LossByTime, trained

_LEVELS = [[8.0, 1.0], [4.0, 0.0], [4.5, 2.0]]  # of validations after 25, 50 and 75 steps


def test_a_curve_has_the_steps_of_the_cheapest_training_and_is_a_line_between_validations() -> None:
    one, other = ({"step_s": step_s, "losses": _LEVELS} for step_s in (0.4, 0.2))
    curve = LossByTime.of(one, [one, other], [0])
    assert curve.seconds == pytest.approx([5, 10, 15]) and curve.losses == [8, 4, 4.5]
    assert curve.at(7.5) == pytest.approx(6) and curve.at(99) == 4.5
    assert curve.first_at(5) == pytest.approx(8.75)
    assert curve.first_at(4) == pytest.approx(10) and curve.first_at(3.9) is None
    assert curve.first_at(9) == pytest.approx(5)  # of what is before, nothing is known
    assert LossByTime.of(one, [one], [0, 1]).losses == [4.5, 2, 3.25]
    assert LEVELS == OF_SHARDS


def test_a_training_that_is_done_is_read(tmp_path: Path) -> None:
    (tmp_path / "training.json").write_text('{"step_s": 0.5, "losses": [[1.0]]}')
    assert trained(tmp_path, ["no.such=key"]) == {"step_s": 0.5, "losses": [[1.0]]}


def test_arms_hold_the_same_digits_with_and_without_noise(tmp_path: Path) -> None:
    words = ["--side", "16", "--pixel_block", "2", "--pooled_text", "--num_samples", "90"]
    assert data_prep.main(["digits", *words, "--output_dir", str(tmp_path / "packed")]) == 0
    found = dict[str, dict[str, list[dict[str, torch.Tensor]]]]()
    for arm in ARMS:
        write(tmp_path / "packed", tmp_path / arm, arm, digits=60, std=0.3)
        found[arm] = {
            split: [
                safetensors.torch.load(parts["safetensors"])
                for _, _, parts in read_samples(tmp_path / arm / split / "shard-000000.tar")
            ]
            for split in ("train", "val")
        }
    mean, once, anew = (found[arm]["train"] for arm in ARMS)
    assert len(mean) == len(once) == len(anew) == 60
    means = torch.stack([one["latent"] for one in mean])
    assert torch.equal(means, torch.stack([one["latent"] for one in anew]))
    noise = torch.stack([one["latent"] for one in once]) - means
    assert noise.std().item() == pytest.approx(0.3, rel=0.02) and noise.mean().abs() < 0.01
    assert "latent_logvar" not in mean[0] | once[0]
    for sample in anew + [one for arm in ARMS for one in found[arm]["val"]]:
        assert sample["latent_logvar"].unique().tolist() == pytest.approx([2 * math.log(0.3)])
