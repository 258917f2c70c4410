"""What the planner expects of the shapes that `make gpu` measures, and its place beside them."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import fields, replace

import expected_step as program
import pytest
from expected_step import expected_here, expected_step, whole_samples_per_s
from measuring.kernels import kernel_times
from measuring.shapes import SHAPES, SIZES, shape_keys

from dit.config import AttentionBackend, RunConfig
from dit.config_loading import default_config, load_config
from dit.device_specs import DEVICES
from dit.planner.efficiency import FUSED, PLAIN
from dit.sizing.memory import memory
from tools.gpu import steps
from tools.gpu.page import page
from tools.gpu.plan import PLAN, Row, State


def row_of(name: str) -> Row:
    return next(one for one in PLAN if one.name == name)


def config_of(name: str, size: str = "full", *more: str) -> RunConfig:
    return steps.fitting_config(row_of(name), size, more)[0]


def named(config: RunConfig, backend: str) -> RunConfig:
    model = replace(config.model, attention_backend=AttentionBackend(backend))
    return replace(config, model=model)


def test_the_program_prints_shapes_by_kind(tmp_path, capsys):
    file = tmp_path / "found.json"
    program.main(["--json", str(file)])
    rows = json.loads(file.read_text())
    said = capsys.readouterr().out
    assert [(row["device"], row["shape"], row["kernels"]) for row in rows] == [
        ("h100", "xl", "eager"), ("h100", "xl", "fused"), ("h100", "xl", "fused, 2 layers again"),
        ("h100", "7b", "eager"), ("h100", "7b", "fused"), ("h100", "7b", "fused, 3 layers again"),
        ("h100", "flux-512", "eager"), ("h100", "flux-512", "fused"),
        ("h200", "xl", "eager"), ("h200", "xl", "fused"),
        ("h200", "7b", "eager"), ("h200", "7b", "fused"),
        ("h200", "flux-512", "eager"), ("h200", "flux-512", "fused"),
    ]  # fmt: skip
    for row in rows:
        assert sum(row["by_kind_s"].values()) == pytest.approx(row["step_s"])
        assert f"{row['mfu']:.1%}" in said and f"{1e3 * row['step_s']:.1f}" in said
        fits = row["memory"] <= 0.9 * DEVICES[row["device"]].memory
        small = row["device"] == "h200" or row["shape"] == "flux-512"
        assert fits == (small or "again" in row["kernels"])
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


def test_expected_here_goes_by_the_device_and_the_kernel():
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
    assert expected_here(named(config, "flash_2"), "NVIDIA H200") == found
    fused = expected_here(named(config, "cudnn"), "NVIDIA H200")
    assert fused and fused["assumed"] == FUSED.of(DEVICES["h200"])
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
    ("device", "shape", "tokens"),
    [("h100", "xl", 16384), ("h100", "7b", 16384), ("h200", "xl", 32768), (None, "xl", 32768)],
)
def test_rows_of_a_shape_share_the_pack_of_the_neediest(device, shape, tokens, monkeypatch):
    size = DEVICES[device].memory if device else None
    monkeypatch.setattr(steps, "device_memory", lambda: size)
    found = [steps.fitting_config(one, "full") for one in PLAN if one.shape == shape]
    assert {config.dataset.task_encoder_seq_length for config, _ in found} == {tokens}
    said = f"packs of {tokens:,} tokens; with 32,768 a row of this shape needs"
    assert all(why.startswith(said) == (tokens < 32768) for _, why in found)
    if size is not None:
        needs = [memory(config, world_size=1).total for config, _ in found]
        assert max(needs) <= 0.9 * size
        more = [
            replace(one, dataset=replace(one.dataset, task_encoder_seq_length=tokens + 8192))
            for one, _ in found
        ]
        larger = max(memory(one, world_size=1).total for one in more)
        assert tokens == 32768 or larger > 0.9 * size


LATENTS = {"wan14b": (32_760, 48), "flux": (4096, 16), "flux12b": (4096, 16), "flux-512": (256, 16)}
"""Tokens of a sample, by size; 1,024 and 64 of the others."""


@pytest.mark.parametrize("size", SIZES)
def test_every_configuration_resolves_and_fits_into_80_gb(size, monkeypatch):
    monkeypatch.setattr(steps, "device_memory", lambda: 80e9)
    for one in (one for one in PLAN if one.shape in SHAPES):
        config, _ = steps.fitting_config(one, size)
        (sample,) = config.dataset.mock_samples
        real = sample.frames * sample.height * sample.width // 4
        wanted = LATENTS.get(one.shape, (1024, 64))[size == "tiny"]
        assert real == wanted - one.shape.endswith("padded")
        again, words = config.model.recompute_granularity == "full", one.name.split("-")
        assert again == ("recompute" in words) and config.model.compile == ("compiled" in words)
        assert config.dataset.task_encoder_seq_length >= config.mock_tokens(sample)
        assert memory(config, world_size=1).total < 0.9 * 80e9


def test_a_pack_that_never_fits_is_small_and_one_that_is_asked_for_stays(monkeypatch):
    monkeypatch.setattr(steps, "device_memory", lambda: 1e9)
    asked = "dataset.task_encoder_seq_length=16384"
    for keys, tokens in (((), 8192), ((asked,), 16384)):
        config, why = steps.fitting_config(row_of("xl-eager"), "full", keys)
        assert config.dataset.task_encoder_seq_length == tokens and bool(why) == (not keys)
    config = config_of("flux12b-lora-recompute")  # a pack holds a sample whatever fits
    assert config.dataset.task_encoder_seq_length == 4608


def test_the_kernel_that_ran_is_told_and_the_planner_is_asked_for_it(monkeypatch):
    """Tiny steps on this machine, which is taken for a device of the table with cuDNN."""
    ran, keys = [], ("model.precision=bf16",)

    def measured(config: RunConfig, *, around: AbstractContextManager, **_: object) -> tuple:
        ran.append(config.model.attention_backend)
        with around:
            return {
                "device": "NVIDIA H200",
                **{"step_time_s": {"median": 0.5}, "model_tflops": {"median": 400.0}},
            }, []

    def chosen(config: RunConfig, *, timed: bool) -> tuple[RunConfig, list[str]]:
        assert not timed
        return named(config, "cudnn"), []

    monkeypatch.setattr("benchmark.measure", measured)
    monkeypatch.setattr(steps, "with_attention", chosen)
    for name, run in (("flux-512-fused", steps.steps), ("xl-profile", steps.profile)):
        found = {}
        run(row_of(name), size="tiny", keys=keys, report=found.update)
        config = named(config_of(name, "tiny", *keys), "cudnn")
        assert found["expected"] == expected_here(config, "NVIDIA H200")
        assert found["attention_backend"] == ran.pop() == "cudnn"
        whole = whole_samples_per_s("flux-512", 400e12)
        assert found.get("whole_samples_per_s") == (whole if name[0] == "f" else None)


def test_flux_of_512_tokens_stands_for_all_of_its_layers():
    """MLPerf's 430 TFLOP/s and 21 samples/s on an H100 are one figure by our FLOPs."""
    few, whole = (
        load_config(default_config(), overrides=shape_keys(name)).model
        for name in ("flux-512", "flux-512-whole")
    )
    assert (few.num_layers, whole.num_layers) == (2, 19)
    assert whole_samples_per_s("flux-512", 430e12) == pytest.approx(21, rel=0.02)
    assert whole_samples_per_s("xl", 430e12) is None


def test_the_page_shows_expected_beside_measured():
    kinds = {"matrix products": 0.170, "attention": 0.098, "memory traffic": 0.040}
    kinds |= {"optimizer": 0.012, "launches": 0.002, "communication": 0.0, "bubble": 0.0}
    expected = {"step_s": 0.322, "mfu": 0.372, "by_kind_s": kinds, "memory_gb": 89.0}
    expected["assumed"] = "989 TFLOP/s"
    times = {"gemm": (0.2, 1), "flash": (0.1, 1), "a|b": (0.05, 2), "adam": (0.02, 1)}
    found = kernel_times(times, steps=1, step_s=0.4) | {"expected": expected}
    found |= {"attention_backend": "flash_2", "pack": ""}
    content = {"about": {}, "rows": {"xl-profile": {"state": State.DONE, "found": found}}}
    text = page(content)
    assert "| matrix products | 170.0 | 200.0 |\n| attention | 98.0 | 100.0 |" in text
    assert "layers and optimizer | 52.0 | 70.0 |\n| between kernels | 2.0 | 30.0 |" in text
    assert "expects of 989 TFLOP/s:" in text and "\nattention by flash_2.\n" in text
    assert "| `a\\|b` | 50 | 2 |" in text
    assert "Furthest off: matrix products, 30.0 ms more than expected." in text
    assert "| step | 322.0 | 400.0 |" in text
    found["expected"] = None
    assert "expects" not in page(content)


@pytest.mark.parametrize(
    ("shape", "name"),
    [("wan14b", "wan2.1_t2v_14b"), ("flux", "flux1_schnell"), ("flux-512", "flux1_schnell")],
)
def test_shapes_are_those_of_their_networks(shape: str, name: str):
    ours = load_config(default_config(), overrides=shape_keys(shape)).model
    theirs = load_config(default_config(), overrides=[f"model.name={name}"]).model
    others = {"num_layers", "num_single_layers", "name", "text_pad_to"}
    for field in {one.name for one in fields(theirs)} - others:
        assert getattr(ours, field) == getattr(theirs, field), field
