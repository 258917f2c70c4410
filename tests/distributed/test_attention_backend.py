"""All ranks compute attention with one kernel, and a run that goes on keeps it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launching import ROOT, command, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    """What each rank of `attention_worker.py` has found."""
    folder = tmp_path_factory.mktemp("attention")
    words = command("attention_worker.py", str(folder), nproc=2, folder="tests/distributed")
    done = run(words, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(Path(folder / f"rank_{rank}.json").read_text()) for rank in (0, 1)]


def _both(found: list[dict], name: str) -> dict:
    """What both ranks have found alike; only the first one times."""
    first, other = (dict(rank[name]) for rank in found)
    assert not other.pop("timed", [])
    timed = first.pop("timed", [])
    assert first == other
    return first | {"timed": timed}


def test_all_ranks_take_the_choice_of_the_first_one_and_store_it(found):
    new = _both(found, "new")
    assert (new["used"], new["stored"]) == (["flash_3"], "flash_3")
    (line,) = new["said"]
    assert line.startswith("attention by flash_3 (ms a pack in all layers: flash_3 1, flash_4 2")


def test_a_resume_keeps_it_whatever_the_clock_says(found):
    resumed = _both(found, "resumed")
    assert (resumed["used"], resumed["stored"]) == (["flash_3"], "flash_3")
    assert not resumed["said"] and resumed["step"] == "step_00000002"


def test_a_resume_says_what_changed_where_the_kernel_is_gone_on_one_rank(found):
    gone = _both(found, "gone")
    assert gone["backend"] == "flash_4" and "flash_3" not in gone["timed"]
    without, line = gone["said"]
    assert without == (
        "attention without flash_3, which does not work: ImportError: undefined symbol: _ZN3c10"
    )
    assert line.startswith("attention by flash_4 (ms a pack")
    assert line.endswith("; flash_3, as in the checkpoint, cannot be used here")


def test_steps_that_go_on_elsewhere_keep_it_and_weights_alone_do_not(found):
    assert _both(found, "loaded") == {"backend": "flash_3", "said": [], "timed": []}
    assert _both(found, "finetuned")["timed"]


def test_nothing_is_timed_for_measurements_determinism_and_named_kernels(found):
    likely = _both(found, "without timing")
    assert likely == {"backend": "flash_4", "said": ["attention by flash_4"], "timed": []}
    assert _both(found, "deterministic")["backend"] == "flash_2"
    assert not _both(found, "deterministic")["timed"]
    assert _both(found, "named") == {"backend": "flash_4", "said": [], "timed": []}


def test_a_named_kernel_that_cannot_be_used_ends_the_run_with_the_reason(found):
    assert _both(found, "unfit")["error"].startswith(
        "model.attention_backend=cudnn cannot be used: it is not deterministic"
    )
    broken = _both(found, "named and broken")["error"]
    assert "flash_3 cannot be used: ImportError: undefined symbol: _ZN3c10; set" in broken
    assert "model.attention_backend=auto" in broken


def test_ranks_never_choose_for_themselves_on_gpus(found):
    assert _both(found, "nothing works")["backend"] == "sdpa"
    assert _both(found, "on CPUs") == {"backend": "auto", "said": [], "timed": []}
