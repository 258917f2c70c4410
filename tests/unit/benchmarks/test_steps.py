"""Figures of several steps."""

from __future__ import annotations

import benchmark
import pytest
import torch
from measuring import steps as measuring_steps
from measuring.steps import fill_on_device, step_summary
from torch import nn

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
    found = step_summary(config.model, steps)
    assert found["step_time_s"] == pytest.approx({"median": 6.0, "p5": 1.5, "p95": 10.5})
    assert found["other_s"]["median"] == pytest.approx(5.0)
    assert found["shares"]["forward_s"] == pytest.approx(0.1 / 6)
    assert sum(found["shares"].values()) == pytest.approx(1)
    ((kind, peak),) = found["peak_tflops"].items()
    assert kind == "measured, float32"
    assert found["mfu"][kind] == pytest.approx(0.05 / peak)
    assert found["peak_memory_gb"] == 3.0


def test_weights_are_drawn_once_and_repeated(monkeypatch):
    monkeypatch.setattr(measuring_steps, "_TILE", 8)
    model = nn.Linear(5, 4)
    model.bytes = nn.Parameter(torch.zeros(2, 3, dtype=torch.uint8), requires_grad=False)
    fill_on_device(model, seed=1234)
    drawn = model.weight.flatten()
    assert torch.equal(drawn[8:16], drawn[:8]) and torch.equal(drawn[16:], drawn[:4])
    assert len(set(drawn.tolist())) == 8 and 0 < drawn.abs().max() < 0.1
    assert (model.bias == 1).all() and (model.bytes == 1).all()


def test_a_shape_of_the_plan_is_measured_by_its_name(capsys):
    shape = ["--shape", "flux-512", "model.num_layers=1", "--print-config"]
    assert benchmark.main(shape) == 0
    said = capsys.readouterr().out
    assert (
        "num_single_layers: 4" in said and " num_layers: 1" in said and "text_length: 256" in said
    )
