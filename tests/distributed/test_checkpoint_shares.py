"""What each rank does with a checkpoint, counted as it happens."""

from __future__ import annotations

import json

import pytest

from tests.launching import ROOT, command, run

CONF = ("--config-file", str(ROOT / "conf/dit_debug.yaml"), "--mock")
BUCKET = 2**18


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "keys"),
    [
        (8, ["model.num_layers=8"]),
        (4, ["model.tensor_model_parallel_size=2", "model.sequence_parallel=true"]),
        (4, ["model.context_parallel_size=2", "model.precision=bf16"]),
        (4, ["ddp.dp_replicate_size=2"]),
        (2, ["ddp.use_distributed_optimizer=false"]),
        (2, ["ddp.sharding=weights"]),
    ],
)
def test_each_rank_does_its_share(tmp_path, ranks, keys):
    options = ["--json", "ranks.json", "--bucket", str(BUCKET)]
    program = command(
        "benchmark_checkpoint.py", *CONF, *options, *keys, nproc=ranks, folder="benchmarks"
    )
    done = run(program, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "ranks.json").read_text())
    even = sum(rank["written"] for rank in found) / ranks
    largest = max(rank["largest"] for rank in found)
    assert largest < even / 3  # else the bounds would say nothing
    bound = 1.2 * even + largest
    for rank in found:
        assert rank["written"] <= bound
        assert rank["read"] <= bound
        assert max(rank["held_at_save"], rank["held_at_load"]) <= bound + BUCKET
    if "ddp.sharding=weights" in keys:
        # A rank writes whole weights with their states, and has a row in so many of each.
        rows = sum(rank["weights"] for rank in found) + sum(rank["state"] for rank in found)
        for name in ("sent_at_save", "sent_at_load"):
            assert sum(rank[name] for rank in found) <= 1.05 * rows * (ranks - 1) / ranks
        return
    assert all(rank["sent_at_save"] <= rank["state"] for rank in found)
    copies = 2 if "ddp.dp_replicate_size=2" in keys else 1
    kept = sum(rank["state"] for rank in found)
    assert sum(rank["sent_at_save"] for rank in found) <= kept / copies / 4
    data_ranks = ranks // 2 if "model.tensor_model_parallel_size=2" in keys else ranks
    weights = sum(rank["weights"] for rank in found) / data_ranks  # of all tensor ranks
    assert sum(rank["sent_at_load"] for rank in found) <= (data_ranks - 1) * weights + kept
