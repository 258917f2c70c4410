"""The plan of a run on a GPU: its order, its limits, and going on after errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest
from measuring.kernels import kernel_times
from measuring.shapes import SHAPES, SIZES

from dit.models.cost import memory
from tools.gpu import __main__ as program
from tools.gpu import checks, steps, worker
from tools.gpu.__main__ import Results, run_rows
from tools.gpu.page import page
from tools.gpu.plan import IMPORTS, PLAN, SMOKE, Row, State, chosen
from tools.gpu.worker import Worker, environment

DONE = {"state": State.DONE}


def run(rows: list[Row], *, ends_at: float, broken: str = "") -> tuple[dict, dict]:
    """Seconds that each row was given, and the outcomes; a row takes 30 s."""
    now, given = [1000.0], {}

    def one(row: Row, seconds: float) -> dict:
        given[row.name], now[0] = seconds, now[0] + 30
        if row.name == broken:
            raise RuntimeError("no such kernel")
        return dict(DONE)

    found = run_rows(rows, run=one, clock=lambda: now[0], ends_at=ends_at)
    return given, {row.name: outcome for row, outcome in found}


def test_what_does_not_fit_is_named_and_later_rows_still_run():
    seconds = {"first": 5, "broken": 10, "long": 41, "short": 10, "last": 10}
    given, kept = run([Row(*one) for one in seconds.items()], ends_at=1100, broken="broken")
    # 100 s in all: the limit of a row, or what is left.
    assert given == {"first": 75, "broken": 70, "short": 40, "last": 10}
    assert kept["broken"]["state"] == State.FAILED and "no such kernel" in kept["broken"]["why"]
    why = "40 s were left, and it takes about 41"
    assert kept["long"] == {"state": State.NOT_BEGUN, "why": why}
    assert kept["first"] == DONE | {"took_s": 30.0}


def test_nothing_is_measured_after_a_smoke_test_that_fails():
    given, kept = run([SMOKE, Row("next", 10)], ends_at=2000, broken="smoke")
    assert [*given] == ["smoke"] and "wrong numbers" in kept["next"]["why"]
    assert kept["next"]["state"] == State.NOT_BEGUN
    assert [*run([SMOKE, Row("next", 10)], ends_at=2000)[0]] == ["smoke", "next"]


def test_the_order_is_that_of_worth():
    names = [one.name for one in PLAN]
    order = [*("smoke", "ceilings", "xl-fused", "xl-fused-flash_2", "xl-fused-sdpa", "7b-fused")]
    order += ["flux-512-fused", "flux-fused", "attention", "fused", "xl-profile"]
    order += ["flux12b-lora-recompute", "flux12b-lora-fp8base-recompute", "xl-eager"]
    order += ["xl-compiled", "xl-fused-offload", "tests", "padded-loop"]
    assert [name for name in names if name in order] == order and len({*names}) == len(names)
    assert sum(one.expected_s for one in PLAN[: names.index("tests")]) < 560
    assert chosen("", done=names) == [*PLAN]
    some = chosen("tests, ceilings xl-eager", done=())
    assert [one.name for one in some] == ["ceilings", "xl-eager", "tests"]
    assert [one.name for one in chosen("missing", done=names[2:])] == names[:2]
    with pytest.raises(ValueError, match="no part is named xl-fast; there are smoke, ceilings"):
        chosen("xl-fast", done=())


def test_results_are_on_disk_at_once_and_a_later_run_goes_on(tmp_path):
    file = tmp_path / "cpu.json"
    first = Results(file, about={"device": "CPU", "date": "a"})
    first.put("ceilings", DONE | {"found": {"copy": 1.5}})
    assert json.loads(file.read_text())["rows"]["ceilings"]["found"] == {"copy": 1.5}
    first.put("tests", {"state": State.FAILED, "why": "x"})
    second = Results(file, about={"date": "b"})
    assert second.names(State.DONE) == ["ceilings"]
    assert second.content["about"] == {"device": "CPU", "date": "b"}
    for name in ("ceilings", "tests", "padded-loop"):
        second.put(name, {"state": State.NOT_BEGUN, "why": "no time"})
    states = {name: one["state"] for name, one in json.loads(file.read_text())["rows"].items()}
    assert states == {"ceilings": "done", "tests": "failed", "padded-loop": "not begun"}


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


FAKE = """
import json, os, sys, time
for line in sys.stdin:
    name = line.strip()
    sys.stderr.write(f"--- {name}\\nat {name}\\n")
    for count in ("device", "two"):
        print(json.dumps({count: name}), flush=True)
    if name == "crash":
        os._exit(3)
    if name == "hang":
        time.sleep(60)
    end = {"state": "done", "pid": os.getpid(), "again": name != "spoils"}
    print(json.dumps(end | {"settings": sys.argv[1:]}), flush=True)
"""


@pytest.fixture
def fake(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that answers in the worker's place."""
    (tmp_path / "tools/gpu").mkdir(parents=True)
    (tmp_path / "tools/gpu/worker.py").write_text(FAKE)
    return os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}


def test_a_process_that_ends_or_hangs_costs_its_own_row_from_there_on(tmp_path, fake):
    asking = Worker(environment=fake, log=tmp_path / "log", settings=["tiny", "a=1"])

    def outcome(name: str, seconds: float = 50) -> dict:
        asking.begin(Row(name, 10))
        return asking.outcome(Row(name, 10), seconds)

    try:
        names = ("a", "spoils", "b", "crash", "c")
        first, spoils, fresh, crash, after = (outcome(name) for name in names)
        known = DONE | {"pid": first["pid"], "settings": ["tiny", "a=1"]}
        assert first == known | {"found": {"device": "a", "two": "a"}}
        assert spoils["pid"] == first["pid"] and spoils["state"] == State.DONE
        assert len({one["pid"] for one in (first, fresh, after)}) == 3
        assert crash["state"] == State.FAILED and "exit code 3" in crash["why"]
        assert crash["log"] == "at crash\n" and [*crash["found"]] == ["device", "two"]
        hang = outcome("hang", 0.5)
        assert hang["state"] == State.ENDED and hang["why"] == "took longer than 0 s"
        assert hang["log"] == "at hang\n" and [*hang["found"]] == ["device", "two"]
        with pytest.raises(ProcessLookupError):
            os.kill(after["pid"], 0)
    finally:
        asking.close()


def test_a_smoke_test_that_is_left_out_answers_for_no_other_row(tmp_path, fake, monkeypatch):
    """It has begun before the results of an earlier run are known."""
    monkeypatch.setattr(program, "environment", lambda _: fake)
    rows = {one.name: DONE for one in PLAN if one.name not in ("tests", "fused")}
    (file := tmp_path / "imports.json").write_text(json.dumps({"rows": rows}))  # of its "device"
    assert program.main(["--parts", "missing", "--output", str(tmp_path)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [rows[name]["found"]["two"] for name in ("tests", "fused")] == ["tests", "fused"]


def test_each_row_has_a_function_whose_error_is_its_result(monkeypatch, capsys):
    assert all(callable(resolve_name(f"tools.gpu.{one.kind}")) for one in (*PLAN, IMPORTS))

    def fails(*_: object, **__: object) -> None:
        raise SystemExit("error: no such option")

    monkeypatch.setattr(steps, "steps", fails)
    outcome = worker._end(Row("xl-fused", 30))
    assert outcome["state"] == "failed" and "no such option" in outcome["why"]
    assert "Traceback" in capsys.readouterr().err  # which is the log


def test_how_each_test_ended_is_told_as_soon_as_it_has(tmp_path, monkeypatch):
    (folder := tmp_path / "tests/gpu").mkdir(parents=True)
    (folder / "test_some.py").write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 0.1 < 0.05\n"
        "def test_c(): pytest.skip('no GPU')\ndef test_other(): assert 0\n"
    )
    (folder / "test_broken.py").write_text("import no_such_package\n")
    monkeypatch.setattr(checks, "ROOT", tmp_path)
    told: list[dict] = []
    why = checks.run_tests(Row("tests", 80, tests="not other"), report=told.append)
    found = {name.split("/")[-1]: said for one in told for name, said in one.items()}
    assert why.startswith("2 tests failed: ") and "test_b" in why and len(told) == 4
    assert found["test_some.py::test_a"] == "passed"
    assert found["test_some.py::test_b"] == "failed: E   assert 0.1 < 0.05"
    assert found["test_some.py::test_c"] == "skipped: Skipped: no GPU"
    assert "No module named 'no_such_package'" in found["test_broken.py"]


def test_segments_grow_unless_the_user_says_otherwise(monkeypatch, tmp_path):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    made = environment(tmp_path)
    assert made["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert str(tmp_path) in made["PYTHONPATH"].split(os.pathsep)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environment(None)


def test_missing_packages_are_named(tmp_path, monkeypatch):
    broken = tmp_path / "tests/gpu/test_none.py"
    broken.parent.mkdir(parents=True)
    broken.touch()
    monkeypatch.setattr(checks, "ROOT", tmp_path)
    monkeypatch.setattr(checks, "MODULES", ("json", "no_such_package"))
    monkeypatch.setenv("COMMIT", "1234abc")
    told: list[dict] = []
    why = checks.check_imports(IMPORTS, report=told.append, size="tiny", keys=["a=1"])
    about = {"size": "tiny", "keys": ["a=1"], "commit": "1234abc"}
    assert about.items() <= told[0].items() and told[0]["versions"]["torch"]
    assert "No module named 'no_such_package'" in why
    assert "tests.gpu.test_none: " in why and "json" not in why


def test_the_page_shows_all_that_was_measured_and_why_the_rest_was_not():
    shares = {f"{one}_s": 0.2 for one in ("forward", "backward", "optimizer", "data", "other")}
    found = {
        **{"step_time_s": {"median": 0.4321}, "tokens_per_s": {"median": 75000.0}},
        **{"model_tflops": {"median": 445.0}, "shares": shares | {"communication_s": 0.0}},
        "mfu": {"data sheet, bfloat16": 0.45, "measured, bfloat16": 0.5625},
        **{"peak_memory_gb": 88.25, "reserved_memory_gb": 90.5, "attention_backend": "cudnn"},
        "expected": {"mfu": 0.372, "memory_gb": 70.5},
        **{"pack": "packs of 24,576 tokens", "whole_samples_per_s": 21.82},
    }
    kernels = kernel_times({"a|b": (1.0, 2)}, steps=1, step_s=2.0)
    kernels |= {"attention_backend": "flash_2", "pack": "", "expected": None}
    tests = {"a.py::one": "passed", "a.py::two": "failed: 0.1 > 0.05", "a.py::three": "passed"}
    padded = {"tokens_per_s": {"ours": 3000.0}, "ratio": {"ours": 1.5}}
    content = {
        "about": {"device": "NVIDIA H200", "size": "full", "versions": {"torch": "2.11.0"}},
        "rows": {
            "ceilings": DONE | {"found": {"copy": 4.3, "attention": "RuntimeError: no"}},
            "xl-fused": DONE | {"found": found},
            "xl-profile": DONE | {"found": kernels},
            "7b-eager": {"state": State.FAILED, "why": "out of memory\nsecond line"},
            "padded-loop": DONE | {"found": {"large": padded}},
            "tests": {"state": State.ENDED, "why": "took longer", "found": tests},
        },
    }
    text = page(content)
    assert text.startswith("# NVIDIA H200\n") and "torch 2.11.0" in text and "trial" not in text
    line = (
        "| xl-fused | cudnn | 0.4321 | 75,000 | 445 | 45.0% | 37.2% | 56.2% | 20.0% | 20.0% | 20.0%"
        " | 20.0% | 20.0% | 88.2 | 70.5 | 90.5 |"
    )
    assert line in text and "- `xl-fused`: packs of 24,576 tokens" in text
    assert "trains 21.8 samples/s" in text and "| large | 3,000 (1.50x) |" in text
    assert "| attention | RuntimeError: no |" in text and "| copy | 4.3 |" in text
    assert "| `a\\|b` | 1000 | 2 |" in text and "\nattention by flash_2.\n" in text
    assert "2 passed, 0 skipped, 1 failed.\n- `a.py::two`: failed: 0.1 > 0.05\n" in text
    assert (
        "- `7b-eager`: failed: out of memory\n- `tests`: ended at its limit: took longer\n" in text
    )
    content["about"]["size"] = "tiny"
    assert "no measurement" in page(content)


def test_nothing_but_the_standard_library_is_needed_to_start(repo_root: Path):
    """The program must be able to say that torch or a package is missing."""
    code = "import sys, tools.gpu.__main__, tools.gpu.wheelhouse\n"
    code += "print({*sys.modules} & {'torch', 'numpy'})"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=repo_root, capture_output=True, text=True, env={}
    )
    assert done.stdout == "set()\n", done.stderr
