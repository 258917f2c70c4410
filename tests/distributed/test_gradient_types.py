"""The sums that gradients need follow from types of the forward pass: a second proof of layouts."""

from __future__ import annotations

import json
import sys
from functools import cache

import pytest

from tests.distributed.gradient_types_worker import BREAKS, LAYOUTS, SIZES
from tests.launching import ROOT, run


@cache
def _found() -> dict[str, dict[str, str]]:
    """What the checker refuses of each network, whole and broken; one process for all."""
    line = [sys.executable, "-m", "tests.distributed.gradient_types_worker"]
    done = run(line, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_types_of_networks_are_right() -> None:
    whole = _found()["whole"]
    assert len(whole) == len(SIZES) * len(LAYOUTS)
    assert {name: error for name, error in whole.items() if error} == {}


@pytest.mark.slow
def test_each_break_is_refused() -> None:
    broken = _found()["broken"]
    assert set(broken) == set(BREAKS)
    assert [name for name, error in broken.items() if not error] == []
