"""The ranks of a replica get the packs of a step while they compute the one before it."""

from __future__ import annotations

import shutil
import sys

import pytest

from tests.launching import ROOT, metrics, numbers, pretrain, run
from tests.stored import assert_same_stored

SIX = ("train.train_iters=6", "train.global_batch_size=3", "checkpoint.save_interval=3")
TENSOR = ("model.tensor_model_parallel_size=2", "model.sequence_parallel=true")


@pytest.mark.slow
def test_packs_arrive_while_ranks_compute():
    """The same ones; errors come up at their step, and who waits for whom is seen."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    line = [sys.executable, *launcher, str(ROOT / "tests/sharing.py")]
    done = run(line, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_takes_packs_ahead_is_the_run_that_does_not(digits, tmp_path, workers):
    """One process takes none ahead; and a run goes on where its packs were, not those under way."""
    settings = (*SIX, f"dataset.path={digits}", f"dataset.num_workers={workers}")
    settings += ("train.eval_interval=2", "train.eval_iters=2")
    one, two, again = (tmp_path / name for name in ("one", "two", "again"))
    pretrain(one, *settings)
    pretrain(two, *settings, *TENSOR, nproc=2)
    exact = ("step", "consumed_samples", "real_tokens", "pack_fill", "refused", "epoch")
    for mine, other in zip(metrics(one), metrics(two), strict=True):
        assert [mine[name] for name in exact] == [other[name] for name in exact]
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5)
    shutil.copytree(two, again)
    shutil.rmtree(again / "checkpoints/step_00000006")
    (again / "checkpoints/LATEST").write_text("step_00000003")
    pretrain(again, *settings, *TENSOR, nproc=2)
    assert numbers(again) == numbers(two)
    last = "checkpoints/step_00000006"
    assert_same_stored(again / last, two / last)
