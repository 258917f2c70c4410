"""A distillation by DMD2 that is killed at each step of its cycle, or goes on at another layout.

The student learns in every third step, and every second step is saved: the run is killed after the
critic has learned and before the student does, and goes on from each step of the cycle.
"""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch

from tests.launching import ROOT, SMALL, command, metrics, numbers, run
from tests.stored import assert_same_stored, stored

LAST = 9
RUN = (
    *("--config-file", str(ROOT / "conf/dit_debug.yaml"), *SMALL, "objective.name=flow"),
    *(f"train.train_iters={LAST}", "checkpoint.save_interval=2", "checkpoint.keep_last=0"),
    *("train.eval_interval=0", "train.global_batch_size=2", "dataset.num_workers=0"),
    "dataset.task_encoder_seq_length=512",
    *("lora.rank=3", "objective.sampling_levels=lcm", "distill.method=dmd", "distill.steps=2"),
    *("distill.student_every=3", "distill.critic_lr=1e-3", "distill.critic_ema_decay=0.5"),
)
TWO = ("model.tensor_model_parallel_size=2", "model.sequence_parallel=true")
KILLS = ((3, "student", 2), (6, "student", 4), (8, "critic", 6))
"""(step, network that does not learn any more, checkpoint from which the run goes on)."""
DYING = """
import os, signal, sys
from dit.distributed import entry
from dit.distributed.process_groups import run_megatron_on_cpu

def main():
    run_megatron_on_cpu()
    from dit.train import trainer
    from recipes import pretrain_dit

    learn, (step, network, *arguments) = trainer._learn, sys.argv[1:]

    def until_then(run, turn, *of, **told):
        if run.progress.step + 1 == int(step) and turn.critic == (network == "critic"):
            os.kill(os.getpid(), signal.SIGKILL)
        return learn(run, turn, *of, **told)

    trainer._learn = until_then
    return pretrain_dit.main(arguments)

if __name__ == "__main__":
    sys.exit(entry.run(main))
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing stops."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    _train(folder)
    return folder


def _train(folder: Path, *more: str, nproc: int = 1) -> str:
    line = command("pretrain_dit.py", *RUN, f"checkpoint.save={folder}", *more, nproc=nproc)
    script = line.index(str(ROOT / "recipes/pretrain_dit.py"))
    done = run(line if nproc > 1 else [sys.executable, *line[script:]])
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _kill(folder: Path, step: int, network: str) -> None:
    """The run, from its newest checkpoint, to a network's turn in a step."""
    script = folder.with_name("dying.py")
    script.write_text(DYING)
    line = [sys.executable, str(script), str(step), network, *RUN, f"checkpoint.save={folder}"]
    done = run(line, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr


def test_a_killed_distillation_is_the_one_that_was_never_killed(whole, tmp_path):
    folder = tmp_path / "run"
    for step, network, checkpoint in KILLS:
        _kill(folder, step, network)
        assert (folder / "checkpoints/LATEST").read_text() == f"step_{checkpoint:08d}"
    _train(folder)
    assert numbers(folder) == numbers(whole)
    last = f"checkpoints/step_{LAST:08d}"
    names = stored(whole / last)
    for part in ("critic.optimizer.", "critic.ema.", "optimizer.", "ema."):
        assert any(name.startswith(part) for name in names), part
    assert_same_stored(folder / last, whole / last)


def test_a_distillation_goes_on_at_another_layout_within_its_cycle(whole, tmp_path):
    """With equal packs and draws, or no loss would be equal."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    for step in (6, 8, LAST):
        shutil.rmtree(folder / f"checkpoints/step_{step:08d}")
    (folder / "checkpoints/LATEST").write_text("step_00000004")
    assert "continuing after step 4" in _train(folder, *TWO, nproc=2)
    for one, two in zip(metrics(whole)[4:], metrics(folder)[4:], strict=True):
        assert two["consumed_samples"] == one["consumed_samples"]
        assert ("loss" in one) == (one["step"] in (6, LAST))
        for name in one:
            if name.endswith(("loss", "grad_norm", "_mean", "_std", "weight_norm")):
                assert two[name] == pytest.approx(one[name], rel=1e-5), (one["step"], name)
    last = [stored(place / f"checkpoints/step_{LAST:08d}") for place in (whole, folder)]
    weights = [name for name in last[0] if name.endswith((".A", ".B"))]
    weights = [name for name in weights if ".optimizer." not in name]
    assert any(name.startswith("critic.ema.") for name in weights)
    for name in weights:
        torch.testing.assert_close(last[1][name], last[0][name], rtol=0, atol=1e-5)
