"""The parts of a first run on a GPU: their order, their limits, and going on after errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import fields, replace
from functools import partial
from pkgutil import resolve_name

import pytest
import torch
from gpu_run import bounds, checks, steps, worker
from gpu_run.checks import counted
from gpu_run.install import install
from gpu_run.page import page
from gpu_run.parts import IMPORTS, PARTS, SIZES, Part, chosen, configuration, shape_keys
from gpu_run.schedule import Results, State, run_parts
from gpu_run.worker import Worker
from measuring.steps import call_seconds

from dit.config_loading import default_config, load_config
from dit.models.cost import memory
from dit.models.stacks.frozen_blocks import ByteRows
from tests.tables import table
from tests.tiny_wheels import write_wheel

DONE = {"state": State.DONE}


def part(name: str, *, expected: float = 10, limit: float = 50) -> Part:
    return Part(name=name, kind="steps", expected_s=expected, limit_s=limit)


class Clock:
    """Time that passes when a part runs."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_what_does_not_fit_is_named_and_later_parts_still_run():
    clock, given, kept = Clock(), {}, {}

    def run(one: Part, seconds: float) -> dict:
        given[one.name] = seconds
        clock.now += 30
        if one.name == "broken":
            raise RuntimeError("no such kernel")
        return dict(DONE)

    parts = [
        *(part("first"), part("broken", limit=500), part("long", expected=41), part("short")),
        part("last"),
    ]
    left_out = run_parts(
        parts, run=run, keep=lambda p, o: kept.update({p.name: o}), ends_at=1100, clock=clock
    )
    # 100 s in all: the limit of a part, or what is left.
    assert given == {"first": 50, "broken": 70, "short": 40, "last": 10}
    assert left_out == ["long"]
    assert kept["broken"]["state"] == State.FAILED and "no such kernel" in kept["broken"]["why"]
    assert kept["long"] == {
        "state": State.NOT_BEGUN,
        "why": "40 s were left, and it takes about 41",
    }
    assert kept["first"] == DONE | {"took_s": 30.0}


def test_the_order_is_that_of_worth():
    names = [one.name for one in PARTS]
    first = ["ceilings", "attention", "fused", "xl-fused", "xl-eager", "wan14b-fused-recompute"]
    assert names[:6] == first
    assert names.index("flux-profile") < names.index("tests") < names.index("7b-eager")
    assert len(set(names)) == len(names)
    assert {"xl-eager-recompute", "7b-compiled-recompute", "padded-loop"} <= {*names}
    assert chosen("", done=names) == [*PARTS]
    some = chosen("tests, ceilings 7b-eager", done=())
    assert [one.name for one in some] == ["ceilings", "tests", "7b-eager"]
    assert [one.name for one in chosen("missing", done=names[2:])] == names[:2]
    with pytest.raises(ValueError, match="no part is named xl-fast; there are ceilings, attention"):
        chosen("xl-fast", done=())


def test_results_are_on_disk_at_once_and_a_later_run_goes_on(tmp_path):
    file = tmp_path / "cpu.json"
    first = Results(file, about={"device": "CPU", "date": "a"})
    first.put("ceilings", DONE | {"found": {"copy": 1.5}})
    assert json.loads(file.read_text())["parts"]["ceilings"]["found"] == {"copy": 1.5}
    first.put("tests", {"state": State.FAILED, "why": "x"})
    second = Results(file, about={"date": "b"})
    assert second.done() == ["ceilings"] and second.content["about"] == {
        "device": "CPU",
        "date": "b",
    }
    for name in ("ceilings", "tests", "padded-loop"):
        second.put(name, {"state": State.NOT_BEGUN, "why": "no time"})
    states = {name: one["state"] for name, one in json.loads(file.read_text())["parts"].items()}
    assert states == {"ceilings": "done", "tests": "failed", "padded-loop": "not begun"}


TOKENS = {"wan14b": (32_760, 48), "flux": (4096, 16)}  # of a sample; 1,024 and 64 of the others


@pytest.mark.parametrize("size", SIZES)
def test_every_configuration_resolves(size):
    base, small = default_config(), size == "tiny"
    for one in PARTS:
        if not one.shape:
            continue
        config = load_config(base, overrides=configuration(one, size))
        (sample,) = config.dataset.mock_samples
        real = sample.frames * sample.height * sample.width // 4
        assert real == TOKENS.get(one.shape, (1024, 64))[small] - one.shape.endswith("padded")
        assert config.dataset.task_encoder_seq_length >= config.mock_tokens(sample)
        again = one.name.endswith("recompute")
        assert (config.model.recompute_granularity == "full") == again
        assert config.model.compile == ("compiled" in one.name)
        if not small:  # one GPU of 80 GB takes them, or most of their pack
            need = memory(config, world_size=1).total
            assert need < (80e9 if one.shape in TOKENS else 107e9)


@pytest.mark.parametrize(
    ("shape", "name"), [("wan14b", "wan2.1_t2v_14b"), ("flux", "flux1_schnell")]
)
def test_shapes_are_those_of_their_networks(shape: str, name: str):
    ours = load_config(default_config(), overrides=shape_keys(shape)).model
    theirs = load_config(default_config(), overrides=[f"model.name={name}"]).model
    others = {"num_layers", "num_single_layers", "name", "text_pad_to"}
    for field in {one.name for one in fields(theirs)} - others:
        assert getattr(ours, field) == getattr(theirs, field), field


def test_bounds_are_work_a_second_and_a_fault_is_its_own(monkeypatch):
    monkeypatch.setattr(bounds, "call_seconds", lambda calls, device: len([c() for c in calls]))
    found = bounds.bounds(PARTS[0], size="tiny")["found"]
    assert found["product, xl: 256 x 48 x 144, TFLOP/s"] == 2 * 256 * 48 * 144 / 1e12 / 2
    found = bounds.bounds(PARTS[1], size="tiny")["found"]
    assert found["sdpa: heads of 72, samples of 64, backward, TFLOP/s"] == pytest.approx(
        2 * 4 * 256 * 64 * 2 * 72 / 1e12 / 2
    )
    assert len(found) == 2 * 2 * 2
    found = bounds.bounds(PARTS[2], size="tiny")["found"]  # kernels need a GPU
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


FAKE = """
import json, os, sys, time
for line in sys.stdin:
    asked = json.loads(line)
    name = asked["part"]["name"]
    sys.stderr.write(f"at {name}\\n")
    if name == "crash":
        os._exit(3)
    if name == "hang":
        time.sleep(60)
    print(json.dumps({"state": "done", "pid": os.getpid(), "size": asked["size"]}), flush=True)
"""


def test_a_process_that_ends_or_hangs_costs_its_own_part(tmp_path):
    (tmp_path / "gpu_run").mkdir()
    (tmp_path / "gpu_run/worker.py").write_text(FAKE)
    variables = os.environ | {"PYTHONPATH": str(tmp_path)}
    asking = Worker(environment=variables, log=tmp_path / "log", settings={"size": "tiny"})
    try:
        first, again = (asking.run(part(name), 50) for name in ("a", "b"))
        assert first == again and first["size"] == "tiny"  # one process for both
        crash = asking.run(part("crash"), 50)
        assert crash["state"] == State.FAILED and "exit code 3" in crash["why"]
        assert crash["log"] == "at crash\n"
        after = asking.run(part("c"), 50)
        assert after["state"] == "done" and after["pid"] != first["pid"]
        hang = asking.run(part("hang"), 0.5)
        assert hang["state"] == State.ENDED and hang["why"] == "took longer than 0 s"
        assert hang["log"] == "at hang\n"
        with pytest.raises(ProcessLookupError):
            os.kill(after["pid"], 0)
        last = asking.run(part("d"), 50)
        tests = asking.run(replace(part("tests"), kind="tests"), 50)
        assert last["state"] == tests["state"] == "done" and last["pid"] != tests["pid"]
        assert asking.process is None  # what tests leave is not seen by later parts
    finally:
        asking.close()


def test_errors_of_a_part_are_its_result(monkeypatch, capsys):
    def fails(*_: object, **__: object) -> dict:
        raise SystemExit("error: no such option")

    monkeypatch.setattr(steps, "steps", fails)
    outcome = worker._outcome(part("padded-loop"), {})
    assert outcome["state"] == "failed" and "no such option" in outcome["why"]
    assert "Traceback" in capsys.readouterr().err  # which is the log


def test_each_kind_of_part_has_a_function():
    kinds = {one.kind for one in (*PARTS, IMPORTS)}
    assert kinds == {*worker._FUNCTIONS}
    assert all(callable(resolve_name(name)) for name in worker._FUNCTIONS.values())


def test_rows_of_bytes_are_filled_with_numbers():
    class Rows(torch.Tensor):
        def to_local(self):
            return self.detach().as_subclass(torch.Tensor)

    model = torch.nn.Module()
    rows = torch.full((64, 65), 255, dtype=torch.uint8).as_subclass(Rows)  # none is a number
    model.weight = torch.nn.Parameter(rows, requires_grad=False)
    steps.fill_on_device(model, default_config())
    filled = ByteRows.unpack(rows.to_local(), torch.float32)
    assert 0.019 < filled.std() < 0.021


def test_failed_tests_are_named(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite>"
        '<testcase classname="tests.gpu.a" name="one"/>'
        '<testcase classname="tests.gpu.a" name="two"><skipped message="no"/></testcase>'
        '<testcase classname="tests.gpu.b" name="x[1]"><failure message="0.1 > 0.05">t</failure>'
        "</testcase></testsuite></testsuites>"
    )
    outcome = counted(report)
    assert outcome["state"] == State.FAILED and "tests.gpu.b::x[1]" in outcome["why"]
    assert outcome["found"] == {
        **{"passed": 1, "skipped": 1, "failed": 1},
        "failures": {"tests.gpu.b::x[1]": "0.1 > 0.05"},
    }


def test_wheels_are_installed_once_and_never_torch(tmp_path):
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    write_wheel(wheels, "alpha", "1.0", needs=["beta"])
    assert install(wheels, site) == 1
    mark = site / "alpha/mark"
    mark.touch()
    assert install(wheels, site) == 1 and mark.exists()
    write_wheel(wheels, "torch", "2.6")
    with pytest.raises(ValueError, match="the wheels bring torch"):
        install(wheels, site)
    assert not mark.exists() and (site / "alpha/__init__.py").is_file()
    with pytest.raises(ValueError, match="has no wheels"):
        install(tmp_path / "none", site)


def test_missing_packages_and_another_torch_are_named(tmp_path, monkeypatch):
    broken = tmp_path / "tests/gpu/test_none.py"
    broken.parent.mkdir(parents=True)
    broken.touch()
    monkeypatch.setattr(checks, "ROOT", tmp_path)
    monkeypatch.setattr(checks, "MODULES", ("json", "no_such_package"))
    torch_file = str(sys.modules["torch"].__file__)
    settings = {"size": "tiny", "keys": ["a=1"]}
    found = checks.check_imports(IMPORTS, torch_file=torch_file, **settings)
    assert settings.items() <= found["about"].items() and found["about"]["commit"] is None
    assert found["about"]["versions"]["torch"] and found["state"] == State.FAILED
    assert "No module named 'no_such_package'" in found["why"]
    assert "tests.gpu.test_none: " in found["why"] and "json" not in found["why"]
    other = checks.check_imports(IMPORTS, torch_file=str(tmp_path / "torch.py"))
    assert other["state"] == State.FAILED and not other["about"]
    assert f"the machine's is {tmp_path / 'torch.py'}" in other["why"]


def test_own_name_and_version_are_found_beside_the_wheels(tmp_path, repo_root):
    write_wheel(tmp_path / "wheels", "alpha", "1.0")
    install(tmp_path / "wheels", tmp_path / "site")
    (metadata,) = (tmp_path / "site").glob("megatron_dit-*.dist-info/METADATA")
    version = metadata.read_text().split("Version: ")[-1].strip()
    assert f'version = "{version}"' in (repo_root / "pyproject.toml").read_text()


def test_kernels_are_summed_by_kind_and_the_longest_come_first():
    times = {f"ampere_bf16_gemm_{n}": (0.2 * n, 2 * n) for n in range(1, 13)}
    times |= {"flash_fwd_kernel": (3.0, 4), "Memcpy HtoD": (0.5, 2), "sort": (0.1, 2)}
    found = steps.kernel_times(times, steps=2, step_s=12.0)
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
    assert steps.kind_of(name) == kind


def test_the_page_shows_all_that_was_measured_and_why_the_rest_was_not():
    shares = {f"{one}_s": 0.2 for one in ("forward", "backward", "optimizer", "data", "other")}
    found = {
        "step_time_s": {"median": 0.4321},
        "tokens_per_s": {"median": 75000.0},
        "model_tflops": {"median": 445.0},
        "mfu": {"data sheet, bfloat16": 0.45, "measured, bfloat16": 0.5625},
        "shares": shares | {"communication_s": 0.0},
        "peak_memory_gb": 88.25,
        "expected": {"mfu": 0.372, "memory_gb": 70.5},
        "smaller_pack": "packs of 24,576 tokens",
    }
    kernels = steps.kernel_times({"a|b": (1.0, 2)}, steps=1, step_s=2.0)
    kinds = ("matrix products", "attention", "communication", "memory traffic", "optimizer")
    planned = {kind: 0.1 for kind in (*kinds, "launches")}
    kernels["expected"] = {"assumed": "rates", "by_kind_s": planned, "step_s": 0.6}
    content = {
        "about": {"device": "NVIDIA H200", "size": "full", "versions": {"torch": "2.11.0"}},
        "parts": {
            "ceilings": DONE | {"found": {"copy": 4.3, "attention": "RuntimeError: no"}},
            "xl-fused": DONE | {"found": found},
            "xl-profile": DONE | {"found": kernels},
            "7b-eager": {"state": State.FAILED, "why": "out of memory\nsecond line"},
            "tests": {"state": State.NOT_BEGUN, "why": "no time"},
        },
    }
    text = page(content)
    assert text.startswith("# NVIDIA H200\n") and "torch 2.11.0" in text and "trial" not in text
    row = (
        "| DiT-XL | fused | 0.4321 | 75,000 | 445 | 45.0% | 37.2% | 56.2% | 20.0% | 20.0% | 20.0%"
        " | 20.0% | 20.0% | 88.2 | 70.5 |"
    )
    assert row in text
    assert "- `xl-fused`: packs of 24,576 tokens" in text
    assert "| attention | RuntimeError: no |" in text and "| copy | 4.3 |" in text
    assert "| `a\\|b` | 1000 | 2 |" in text
    assert "Furthest off: between kernels, 900.0 ms more than expected." in text
    assert "- `7b-eager`: failed: out of memory\n- `tests`: not begun: no time\n" in text
    content["about"]["size"] = "tiny"
    assert "no measurement" in page(content)


def test_nothing_but_the_standard_library_is_needed_to_start(repo_root):
    """The program must be able to say that torch or a package is missing."""
    code = "import sys; import first_gpu, wheelhouse; print({*sys.modules} & {'torch', 'numpy'})"
    flags = ["-S", "-c", f"import sys; sys.path.insert(0, 'benchmarks'); {code}"]
    done = subprocess.run(
        [sys.executable, *flags], cwd=repo_root, capture_output=True, text=True, env={}
    )
    assert done.stdout == "set()\n", done.stderr
