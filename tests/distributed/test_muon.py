"""Muon on several processes: the numbers of one, and checkpoints that other layouts go on from."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launching import ROOT, own_words, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LAYOUTS = ("tp2+dp2+muon", "dp4+hsdp2+muon", "pp2+cp2+muon", "tp2+dp2+fsdp+muon", "tp2+whole+muon")
ONE_TOKEN = (
    "dataset.mock_samples=[{frames: 1, height: 8, width: 8, text_length: 1, weight: 1.0},"
    " {frames: 1, height: 4, width: 6, text_length: 1, weight: 1.0}]"
)


def _checked(folder: Path, *words: str) -> list[Any]:
    """What the layout check finds, of layouts that it compares with another one."""
    numbers = folder / "numbers.json"
    script = str(ROOT / "recipes/check_layouts.py")
    flags = ["--nproc", "4", "--output", str(numbers), *words]
    done = run([sys.executable, script, *flags, "objective.name=edm"], timeout=500)
    assert numbers.exists(), done.stdout + done.stderr
    return [one for one in json.loads(numbers.read_text()) if "one" not in one["layout"]]


def test_every_tensor_is_that_of_one_process(tmp_path):
    found = _checked(tmp_path, "--layouts", *LAYOUTS, "optimizer.muon_period=2")
    assert [one["layout"] for one in found] == [*LAYOUTS]
    for one in found:
        assert not one["faults"], one["layout"]


def test_a_gradient_of_rounding_alone_does_not_make_layouts_differ(tmp_path):
    """Where each caption has one token, softmax has no choice, and queries have no gradient."""
    (one,) = _checked(tmp_path, "--layouts", "tp2+dp2+muon", "optimizer.lr=1e-2", ONE_TOKEN)
    weights = one["tensors"]["weight"]
    queries = [apart for n, apart in weights.items() if "cross_attention.linear_q.w" in n]
    assert len(queries) == 4 and max(queries) <= 1e-2  # a step of full size is 4
    assert not one["faults"]


@pytest.fixture(scope="module")
def found(once) -> dict[str, Any]:
    folder = once("muon", _launch)
    names = ("load_tensor", "load_data")
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in names}


def _launch(folder: Path) -> None:
    script = str(ROOT / "tests/distributed/muon_worker.py")
    for name, ranks in (("save", 3), ("load_tensor", 2), ("load_data", 2)):
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        line = [sys.executable, *launcher, script, str(folder), name]
        done = run(line, timeout=300, env={"PYTHONPATH": str(ROOT)})
        assert done.returncode == 0, done.stdout + own_words(done.stderr)


@pytest.mark.parametrize("sharding", ["optimizer", "weights"])
@pytest.mark.parametrize("name", ["load_tensor", "load_data"])
def test_a_checkpoint_of_three_ranks_goes_on_on_two(found, name, sharding):
    proof = found[name][sharding]
    assert not proof["different"]
    assert proof["furthest"] <= 1e-5
