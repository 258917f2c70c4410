"""The planner's parameters and optimizer state against those of real ranks."""

from __future__ import annotations

import json
import sys

import pytest

from dit.config import RunConfig
from dit.config_loading import load_config
from dit.sizing.memory import memory, parameters_here
from recipes.runs import dit_debug
from tests.launching import ROOT, run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "sizes", "kind"),
    [(4, {"tensor": 2, "pipeline": 2}, "adamw"), (2, {}, "adamw"), (2, {"tensor": 2}, "muon")],
)
def test_parameters_and_optimizer_of_every_rank_are_as_planned(processes, sizes, kind):
    keys = [f"model.{name}_model_parallel_size={size}" for name, size in sizes.items()]
    keys += ["dataset.mock=true", "train.global_batch_size=4", "model.hidden_size=128"]
    keys += [f"optimizer.kind={kind}"]
    config: RunConfig = load_config(dit_debug(), overrides=keys)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    program = [str(ROOT / "tests/rank_sizes.py"), "--recipe", "dit_debug", *keys]
    done = run([sys.executable, *launch, *program])
    assert done.returncode == 0, done.stderr
    ranks = json.loads(done.stdout.splitlines()[-1])
    assert max(rank["parameters"] for rank in ranks) == parameters_here(config.model)
    # States of float32 weights; the optimizer pads each rank's part.
    planned = memory(config, world_size=processes).optimizer
    assert max(rank["moments"] for rank in ranks) == pytest.approx(planned, rel=0.05)
