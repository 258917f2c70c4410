"""Bounds of a device, and kernels of a profile by their kind."""

from __future__ import annotations

import time
from collections import Counter
from functools import partial

import pytest
import torch
from measuring import bounds
from measuring.kernels import kernel_times, kind_of
from measuring.steps import call_seconds

from tests.tables import table


def test_bounds_are_work_a_second_and_a_fault_is_its_own(monkeypatch):
    monkeypatch.setattr(bounds, "call_seconds", lambda calls, device: len([c() for c in calls]))
    told = []

    def of(name: str) -> dict:
        return bounds.bounds(name, size="tiny", report=told.append)

    found = of("ceilings")
    assert found["product, xl: 256 x 48 x 144, TFLOP/s"] == 2 * 256 * 48 * 144 / 1e12 / 2
    assert told == [{name: rate} for name, rate in found.items()]  # as soon as it is known
    found = of("attention")
    assert found["sdpa: heads of 72, samples of 64, backward, TFLOP/s"] == pytest.approx(
        2 * 4 * 256 * 64 * 2 * 72 / 1e12 / 2
    )
    assert len(found) == 2 * 2 * 2
    found = of("fused")  # kernels need a GPU
    assert len(found) == 7
    assert all(isinstance(value, str) and "Error" in value for value in found.values())
    # What a fused kernel moves: 4 reads and writes of the tokens forward, and little else.
    h_TD = 256 * 144 * 4
    forward, backward = bounds._gated_norm(256, 144, 72, torch.device("meta")).moved()
    assert 4 * h_TD < forward < 5.5 * h_TD and 6 * h_TD < backward < 10 * h_TD


def test_calls_are_repeated_back_to_back_until_they_take_long_enough(monkeypatch):
    now, made = [0.0], Counter()
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def call(name: str, seconds: float) -> None:
        made[name] += 1
        now[0] += seconds

    calls = [partial(call, "a", 0.001), partial(call, "b", 0.003)]
    assert call_seconds(calls, torch.device("cpu")) == pytest.approx(0.002)
    assert made["a"] == made["b"] and sum(made.values()) * 0.002 >= 0.05


def test_kernels_are_summed_by_kind_and_the_longest_come_first():
    times = {f"ampere_bf16_gemm_{n}": (0.2 * n, 2 * n) for n in range(1, 13)}
    times |= {"flash_fwd_kernel": (3.0, 4), "Memcpy HtoD": (0.5, 2), "sort": (0.1, 2)}
    found = kernel_times(times, steps=2, step_s=12.0)
    assert found["by_kind_s"] == pytest.approx(
        {"matrix products": 7.8, "attention": 1.5, "copies": 0.25, "everything else": 0.05}
    )
    assert found["kernels_s"] == pytest.approx(9.6)
    assert [row["name"] for row in found["longest"]][:2] == [
        *("flash_fwd_kernel", "ampere_bf16_gemm_12")
    ]
    assert len(found["longest"]) == 10
    assert found["longest"][0] == {"name": "flash_fwd_kernel", "seconds": 1.5, "calls": 2}
    assert found["of_no_kind"] == [{"name": "sort", "seconds": 0.05, "calls": 1}]


@pytest.mark.parametrize(("name", "kind"), table(__file__, "kernels"))
def test_kernels_fall_under_their_kind(name: str, kind: str):
    assert kind_of(name) == kind
