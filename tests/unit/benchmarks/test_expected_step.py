"""What the planner expects of the shapes that `make gpu` measures, and its place beside them."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import replace

import pytest
from gpu_run import steps
from gpu_run.expected import expected_here, expected_step, with_fitting_pack
from gpu_run.page import page
from gpu_run.parts import PARTS
from gpu_run.schedule import State

from benchmarks import expected_step as program
from dit.config import RunConfig
from dit.device_specs import DEVICES
from dit.models.cost import memory
from dit.planner.efficiency import FUSED, PLAIN


def config_of(name: str, size: str = "full"):
    return steps._config(next(one for one in PARTS if one.name == name), size, ())[0]


def test_the_program_prints_shapes_by_kind(tmp_path, capsys):
    file = tmp_path / "found.json"
    program.main(["--json", str(file)])
    rows = json.loads(file.read_text())
    said = capsys.readouterr().out
    assert [(row["device"], row["shape"], row["kernels"]) for row in rows] == [
        ("h100", "xl", "eager"), ("h100", "xl", "fused"), ("h100", "xl", "fused, 2 layers again"),
        ("h100", "7b", "eager"), ("h100", "7b", "fused"), ("h100", "7b", "fused, 3 layers again"),
        ("h200", "xl", "eager"), ("h200", "xl", "fused"),
        ("h200", "7b", "eager"), ("h200", "7b", "fused"),
    ]  # fmt: skip
    for row in rows:
        assert sum(row["by_kind_s"].values()) == pytest.approx(row["step_s"])
        assert f"{row['mfu']:.1%}" in said and f"{1e3 * row['step_s']:.1f}" in said
        fits = row["memory"] <= 0.9 * DEVICES[row["device"]].memory
        assert fits == (row["device"] == "h200" or "again" in row["kernels"])
    assert said.count("too much") == 4
    assert "attention 37% forward and 25% backward" in said and "4.8 TB/s" in said


def test_keys_and_choices_of_the_program_count(tmp_path):
    def found(*arguments: str) -> list[dict]:
        file = tmp_path / "found.json"
        program.main(["--devices", "h200", "--shapes", "7b", "--json", str(file), *arguments])
        return json.loads(file.read_text())

    (_, plain), (_, fused), (_, deep) = (
        found(*arguments) for arguments in ((), ("--attention", "fused"), ("model.num_layers=3",))
    )
    ratio = plain["by_kind_s"]["attention"] / fused["by_kind_s"]["attention"]
    both = (1 / one.attention_forward + 2 / one.attention_backward for one in (PLAIN, FUSED))
    assert ratio == pytest.approx(next(both) / next(both))
    assert deep["by_kind_s"]["attention"] == pytest.approx(plain["by_kind_s"]["attention"] / 2)


def test_expected_here_goes_by_the_device(monkeypatch):
    config = config_of("xl-fused")
    assert expected_here(config, "CPU") is None
    plain = expected_step(config, DEVICES["h200"], PLAIN)
    found = expected_here(config, "NVIDIA H200")
    assert found == {
        "step_s": plain.times.step,
        "mfu": plain.mfu,
        "by_kind_s": plain.times.by_kind,
        "memory_gb": plain.memory / 1e9,
        "assumed": PLAIN.of(DEVICES["h200"]),
    }
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    assert expected_here(config, "NVIDIA H200") == found
    installed = {"flash_attn_interface"}
    monkeypatch.setattr("dit.models.attention.fit.find_spec", lambda name: name in installed)
    assert expected_here(config, "NVIDIA H200") != found
    # MFU by hand: packs are full, of 32 samples of 1,024 tokens.
    flops = 3 * 32 * (28 * 2 * (1024 * 1152**2 * (3 + 1 + 2 + 8)))
    assert plain.mfu == pytest.approx(flops / plain.times.step / 989.4e12, rel=0.25)


def test_eager_steps_are_expected_to_be_slower():
    eager, fused = (
        expected_here(config_of(f"xl-{one}"), "NVIDIA H200") for one in ("eager", "fused")
    )
    assert (
        eager
        and fused
        and eager["by_kind_s"]["memory traffic"] > 3 * fused["by_kind_s"]["memory traffic"]
    )
    again = expected_here(config_of("xl-fused-recompute"), "NVIDIA H200")
    assert again and again["by_kind_s"]["matrix products"] == pytest.approx(
        4 / 3 * fused["by_kind_s"]["matrix products"]
    )


@pytest.mark.parametrize(
    ("name", "device", "tokens"),
    [
        ("xl-fused", "h100", 24576),
        ("7b-fused", "h100", 16384),
        ("7b-fused-recompute", "h100", 32768),
        ("xl-fused", "h200", 32768),
        ("7b-profile", "h200", 32768),
        ("xl-eager", None, 32768),
    ],
)
def test_packs_fit_into_the_memory_of_the_device(name, device, tokens):
    size = DEVICES[device].memory if device else None
    config, why = with_fitting_pack(config_of(name), size)
    assert config.dataset.task_encoder_seq_length == tokens
    assert why.startswith(f"packs of {tokens:,} tokens, for 32,768 need") == (tokens < 32768)
    if size is not None:
        assert memory(config, world_size=1).total <= 0.9 * size
        more = replace(config.dataset, task_encoder_seq_length=tokens + 8192)
        larger = memory(replace(config, dataset=more), world_size=1).total
        assert tokens == 32768 or larger > 0.9 * size


def test_a_pack_that_never_fits_is_the_smallest_and_one_that_is_asked_for_stays(monkeypatch):
    config, why = with_fitting_pack(config_of("xl-eager"), 1e9)
    assert config.dataset.task_encoder_seq_length == 8192 and why
    monkeypatch.setattr(steps, "device_memory", lambda: 1e9)
    (part,) = [one for one in PARTS if one.name == "xl-eager"]
    asked = "dataset.task_encoder_seq_length=16384"
    for keys, tokens in (((), 8192), ((asked,), 16384)):
        config, why = steps._config(part, "full", keys)
        assert config.dataset.task_encoder_seq_length == tokens and bool(why) == (not keys)


def test_a_part_hands_back_what_was_expected(monkeypatch):
    """Tiny steps on this machine, which is taken for a device of the table."""

    def measured(_config: RunConfig, *, around: AbstractContextManager, **_: object) -> tuple:
        with around:
            return {"device": "NVIDIA H200", "step_time_s": {"median": 0.5}}, []

    monkeypatch.setattr("benchmark.measure", measured)
    for name, run in (("xl-fused", steps.steps), ("xl-profile", steps.profile)):
        part = next(one for one in PARTS if one.name == name)
        found = run(part, size="tiny", keys=())["found"]
        assert found["expected"] == expected_here(config_of(name, "tiny"), "NVIDIA H200")


def test_the_page_shows_expected_beside_measured():
    kinds = {"matrix products": 0.170, "attention": 0.098, "memory traffic": 0.040}
    kinds |= {"optimizer": 0.012, "launches": 0.002, "communication": 0.0, "bubble": 0.0}
    expected = {"step_s": 0.322, "mfu": 0.372, "by_kind_s": kinds, "memory_gb": 89.0}
    expected["assumed"] = "989 TFLOP/s"
    times = {"gemm": (0.2, 1), "flash": (0.1, 1), "triton": (0.05, 1), "adam": (0.02, 1)}
    found = steps.kernel_times(times, steps=1, step_s=0.4) | {"expected": expected}
    content = {"about": {}, "parts": {"xl-profile": {"state": State.DONE, "found": found}}}
    text = page(content)
    assert "| matrix products | 170.0 | 200.0 |\n| attention | 98.0 | 100.0 |" in text
    assert "layers and optimizer | 52.0 | 70.0 |\n| between kernels | 2.0 | 30.0 |" in text
    assert "expects of 989 TFLOP/s:" in text
    assert "| step | 322.0 | 400.0 |" in text
    found["expected"] = None
    assert "expects" not in page(content)
