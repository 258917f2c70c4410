"""The plan of a run on a GPU: its order, its limits, and going on after errors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from pkgutil import resolve_name

import pytest

from tools.gpu import __main__ as program
from tools.gpu import checks, worker
from tools.gpu.__main__ import Results, run_rows
from tools.gpu.page import page
from tools.gpu.plan import IMPORTS, PLAN, SMOKE, Row, State, chosen
from tools.gpu.worker import Worker, environment

DONE = {"state": State.DONE}


def run(broken: str) -> tuple[dict, dict]:
    """Seconds that rows were given of 130, and outcomes; each takes 30 s, and one raises."""
    now, given = [1000.0], {}

    def one(row: Row, seconds: float) -> dict:
        given[row.name], now[0] = seconds, now[0] + 30
        if row.name == broken:
            raise RuntimeError("no such kernel")
        return dict(DONE)

    seconds = {"first": 5, "broken": 10, "long": 41, "short": 10, "last": 10}
    rows = [SMOKE, *(Row(*one) for one in seconds.items())]
    found = run_rows(rows, run=one, clock=lambda: now[0], ends_at=1130)
    return given, {row.name: outcome for row, outcome in found}


def test_what_does_not_fit_is_named_and_later_rows_still_run():
    given, kept = run("broken")  # the limit of a row, or what is left
    assert given == {"smoke": 130, "first": 75, "broken": 70, "short": 40, "last": 10}
    assert kept["broken"]["state"] == State.FAILED and "no such kernel" in kept["broken"]["why"]
    why = "40 s were left, and it takes about 41"
    assert kept["long"] == {"state": State.NOT_BEGUN, "why": why}
    assert kept["first"] == DONE | {"took_s": 30.0}


def test_nothing_is_measured_after_a_smoke_test_that_fails():
    given, (_, *later) = run("smoke")[0], run("smoke")[1].values()
    assert [*given] == ["smoke"] and {one["state"] for one in later} == {State.NOT_BEGUN}
    assert all("wrong numbers" in one["why"] for one in later)


def test_rows_are_chosen_by_name_in_the_order_of_the_plan():
    names = [one.name for one in PLAN]
    assert names[:3] == ["smoke", "ceilings", "xl-fused"] and len({*names}) == len(names)
    assert sum(one.expected_s for one in PLAN[: names.index("tests")]) < 560
    assert chosen("", done=names) == [*PLAN]
    some = chosen("tests, ceilings xl-eager", done=())
    assert [one.name for one in some] == ["ceilings", "xl-eager", "tests"]
    assert [one.name for one in chosen("missing", done=names[2:])] == names[:2]
    with pytest.raises(
        ValueError, match="no part is named xl-fast; choose some of smoke, ceilings"
    ):
        chosen("xl-fast", done=())


FAKE = """
import json, os, sys, time
for line in sys.stdin:
    name = line.strip()
    sys.stderr.write(f"--- {name}\\nat {name}\\n")
    for count in ("device", "two"):
        print(json.dumps({count: name}), flush=True)
    if name in ("crash", "fused"):
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

    try:
        names = ("a", "spoils", "b", "crash", "c")
        asking.begin(Row("a", 10))  # what has begun does not begin again
        first, spoils, fresh, crash, after = (asking.outcome(Row(one, 10), 50) for one in names)
        known = DONE | {"pid": first["pid"], "settings": ["tiny", "a=1"]}
        assert first == known | {"found": {"device": "a", "two": "a"}}
        assert spoils["pid"] == first["pid"] and spoils["state"] == State.DONE
        assert len({one["pid"] for one in (first, fresh, after)}) == 3
        assert crash["state"] == State.FAILED and "exit code 3" in crash["why"]
        assert crash["log"] == "at crash\n" and [*crash["found"]] == ["device", "two"]
        hang = asking.outcome(Row("hang", 10), 0.5)
        assert hang["state"] == State.ENDED and hang["why"] == "took longer than 0 s"
        assert hang["log"] == "at hang\n" and [*hang["found"]] == ["device", "two"]
        with pytest.raises(ProcessLookupError):
            os.kill(after["pid"], 0)
    finally:
        asking.close()


def test_a_later_run_keeps_what_is_there_and_measures_the_rest(tmp_path, fake, monkeypatch):
    """The smoke test has begun before it is known to be done, and answers for no other row."""
    monkeypatch.setattr(program, "environment", lambda _: fake)
    failed = {"state": State.FAILED, "why": "x"}
    first = Results(file := tmp_path / "imports.json", about={"date": "a"})  # of its "device"
    for one in PLAN:
        if one.name not in ("tests", "fused"):
            first.put(one.name, failed if one.name == "tests-compiled" else DONE)
    asked = ["--parts", "missing", "--limit", "190", "--output", str(tmp_path)]
    assert program.main(asked) == 1
    found = json.loads(file.read_text())
    assert found["about"] == {"date": "a", "device": "imports", "two": "imports"}
    rows = found["rows"]
    assert rows["tests"]["state"] == "done" and rows["fused"]["state"] == "failed"
    assert "--- tests\n" in (tmp_path / "tests.log").read_text()  # of a process of their own
    assert [rows[name]["found"]["two"] for name in ("tests", "fused")] == ["tests", "fused"]
    assert rows["tests-compiled"] == failed and rows["smoke"] == DONE  # no time for the former


def test_each_row_has_a_function_whose_error_is_its_result(capsys):
    assert all(callable(resolve_name(f"tools.gpu.{one.kind}")) for one in (*PLAN, IMPORTS))
    outcome = worker._end(Row("exits", 30, "worker:sys.exit"))
    assert outcome["state"] == State.FAILED and "SystemExit: Row(name='exits'" in outcome["why"]
    assert "Traceback" in capsys.readouterr().err  # which is the log


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> None:
    """Tests for a GPU of which one file cannot be imported."""
    (folder := tmp_path / "tests/gpu").mkdir(parents=True)
    (folder / "test_some.py").write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 0.1 < 0.05\n"
        "def test_c(): pytest.skip('no GPU')\ndef test_other(): assert 0\n"
    )
    (folder / "test_broken.py").write_text("import no_such_package\n")
    monkeypatch.setattr(checks, "ROOT", tmp_path)


def test_how_each_test_ended_is_told_as_soon_as_it_has(checkout):
    told: list[dict] = []
    why = checks.run_tests(Row("tests", 80, tests="not other"), report=told.append)
    found = {name.split("/")[-1]: said for one in told for name, said in one.items()}
    assert why.startswith("2 tests failed: ") and "test_b" in why and len(told) == 4
    assert "No module named 'no_such_package'" in found.pop("test_broken.py")
    assert {name.split("::")[1]: said for name, said in found.items()} == {
        "test_a": "passed",
        "test_b": "failed: E   assert 0.1 < 0.05",
        "test_c": "skipped: Skipped: no GPU",
    }


def test_segments_grow_unless_the_user_says_otherwise(monkeypatch, tmp_path):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    made = environment(tmp_path)
    assert made["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert str(tmp_path) in made["PYTHONPATH"].split(os.pathsep)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environment(None)


def test_missing_packages_are_named(checkout, monkeypatch):
    monkeypatch.setattr(checks, "MODULES", ("json", "no_such_package"))
    monkeypatch.setenv("COMMIT", "1234abc")
    told: list[dict] = []
    why = checks.check_imports(IMPORTS, report=told.append, size="tiny", keys=["a=1"])
    about = {"size": "tiny", "keys": ["a=1"], "commit": "1234abc"}
    assert about.items() <= told[0].items() and told[0]["versions"]["torch"]
    assert "No module named 'no_such_package'" in why
    assert "tests.gpu.test_broken: " in why and "json" not in why


def test_the_page_shows_all_that_was_measured_and_why_the_rest_was_not():
    place = Path(__file__)
    content = json.loads(place.with_suffix(".json").read_text())
    assert page(content) == place.with_suffix(".md").read_text()
    content["about"]["size"] = "tiny"
    assert "no measurement" in page(content)
