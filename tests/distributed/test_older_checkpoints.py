"""Runs that an earlier version began go on as they would have there."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launching import command, metrics, run
from tests.older_runs import RECORDED, unpack


@pytest.mark.parametrize("name", ["tp2", "dp2"])
def test_a_run_of_an_earlier_version_goes_on_with_the_same_numbers(tmp_path, name):
    """2 tensor ranks; 2 data ranks with 2 workers each. Weights, moments, average and data."""
    unpack("data", tmp_path)
    config = unpack(name, tmp_path / name) / "checkpoints/step_00000003/config.yaml"
    steps = ("--config-file", str(config), "train.train_iters=6")
    done = run(command("pretrain_dit.py", *steps, nproc=2), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "continuing after step 3" in done.stdout
    recorded, found = RECORDED["resumed"][name], metrics(tmp_path / name)
    for before, now in zip(recorded, found, strict=True):
        for key, value in before.items():
            assert now[key] == (value if key in _COUNTS else _as_recorded(value)), key


_COUNTS = ("step", "consumed_samples", "real_tokens", "epoch")


def _as_recorded(value: Any) -> Any:
    """To the last bit where it was recorded; other processors and versions round differently."""
    number = float.fromhex(value) if isinstance(value, str) else value
    same = (RECORDED["torch"], RECORDED["processor"]) == (torch.__version__, _processor())
    return number if same else pytest.approx(number, rel=2e-4)


def _processor() -> str:
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
