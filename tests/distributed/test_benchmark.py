"""The benchmark as a user types it."""

from __future__ import annotations

import json
import re

import pytest

from dit.train.metrics import writers
from tests.launching import ROOT, SMALL, command, run

CONF = ("--config-file", str(ROOT / "conf/dit_digits.yaml"), "--mock", *SMALL)


def benchmark(*arguments: str, nproc: int = 1) -> list[str]:
    return command("benchmark.py", *CONF, *arguments, nproc=nproc, folder="benchmarks")


@pytest.mark.slow
def test_benchmark_reports_where_the_time_goes(tmp_path):
    options = ["--steps", "4", "--warm-up", "1", "--json", "out/numbers.json", "--profile"]
    keys = ["dataset.num_workers=0", "train.global_batch_size=2"]
    done = run(benchmark(*options, *keys, nproc=2), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out/numbers.json").read_text())
    assert "2 x CPU" in done.stdout and "MFU of" in done.stdout
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert min(found["shares"].values()) >= 0
    assert found["forward_s"]["p5"] <= found["forward_s"]["median"] <= found["step_time_s"]["p95"]
    assert [step["step"] for step in found["steps"]] == [2, 3, 4, 5]
    assert list(found["peak_tflops"]) == ["measured, float32"]
    # Under the names that writers.jsonl has, each of which is explained.
    families = ("loss_q", "grad_norm_", "tokens_per_sample_")
    written = {name for name in found["steps"][0] if not name.startswith(families)}
    assert written <= set(re.findall(r"\w+", writers.__doc__ or ""))
    traces = {f"numbers_trace_rank{rank}.json" for rank in (0, 1)}
    assert {one.name for one in tmp_path.rglob("*.json")} == {"numbers.json"} | traces
    events = json.loads((tmp_path / "out/numbers_trace_rank1.json").read_text())["traceEvents"]
    assert any("mm" in str(event.get("name")) for event in events)


@pytest.mark.slow
def test_benchmark_refuses_what_training_refuses(tmp_path):
    done = run(benchmark("--steps", "0"), cwd=tmp_path)
    assert done.returncode == 1 and "--steps" in done.stderr
    done = run(benchmark("model.num_layer=2"), cwd=tmp_path)
    assert done.returncode == 1 and "model.num_layers" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_weights_in_shares_are_measured_in_turns(tmp_path):
    """Both do the same work, as their losses say."""
    options = ["--rounds", "1", "--steps", "2", "--warm-up", "1", "--json", "turns.json"]
    keys = ["dataset.num_workers=0", "train.global_batch_size=2"]
    beside = ["--beside", "ddp.sharding=weights"]
    done = run(benchmark(*options, *keys, *beside, nproc=2), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ratio" in done.stdout
    turns = json.loads((tmp_path / "turns.json").read_text())
    assert [*turns] == ["as given", "ddp.sharding=weights"]
    (given,), (shares,) = turns.values()
    assert shares["last_loss"] == pytest.approx(given["last_loss"], rel=1e-5)
    assert min(given["step_time_s"], shares["user_cpu_s"], shares["tokens_per_s"]) > 0
    # The second has the other keys: these two do not go together.
    done = run(benchmark(*beside, "--beside", "ddp.use_distributed_optimizer=false"), cwd=tmp_path)
    assert done.returncode == 1 and "sharding=weights" in done.stderr
