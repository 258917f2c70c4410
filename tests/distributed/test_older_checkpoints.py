"""Runs that an earlier version began go on as they would have there."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launching import command, metrics, run
from tests.older_runs import RECORDED, unpack


@pytest.mark.slow
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
    """Not to the last bit: processors of one name, and versions of torch, round differently."""
    number = float.fromhex(value) if isinstance(value, str) else value
    return pytest.approx(number, rel=2e-5)
