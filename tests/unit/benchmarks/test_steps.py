"""Figures of several steps."""

from __future__ import annotations

import pytest
from measuring.steps import step_summary

from dit.config import Precision, RunConfig
from dit.models.dit.family import DitConfig
from dit.train.timers import TIMED_PARTS


def test_parts_and_the_rest_are_the_step(groups):
    config = RunConfig(model=DitConfig(precision=Precision.FP32))
    parts = {f"{part}_s": 0.1 * n for n, part in enumerate(TIMED_PARTS)}
    rates = {"tokens_per_s": 8.0, "samples_per_s": 4.0, "pack_fill": 0.5, "peak_memory_gb": 3.0}
    steps = [
        {"step_time_s": 1.0 + n, **parts, **rates, "model_tflops": 0.01 * n} for n in range(11)
    ]
    found = step_summary(config, steps)
    assert found["step_time_s"] == pytest.approx({"median": 6.0, "p5": 1.5, "p95": 10.5})
    assert found["other_s"]["median"] == pytest.approx(5.0)
    assert found["shares"]["forward_s"] == pytest.approx(0.1 / 6)
    assert sum(found["shares"].values()) == pytest.approx(1)
    ((kind, peak),) = found["peak_tflops"].items()
    assert kind == "measured, float32"
    assert found["mfu"][kind] == pytest.approx(0.05 / peak)
    assert found["peak_memory_gb"] == 3.0
