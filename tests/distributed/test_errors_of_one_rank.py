"""An error on one rank is shown, and ends the run, though its process groups cannot end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import ROOT, SMALL, command, metrics, run

TWO = ("dataset.num_workers=1", "train.global_batch_size=2", "ddp.overlap_grad_reduce=true")


def _run(
    folder: Path, fault: str, *more: str, rank: int = 1, nproc: int = 2
) -> subprocess.CompletedProcess[str]:
    config = ("--mock", "--config-file", str(ROOT / "conf/dit_digits.yaml"), *SMALL)
    steps = ("train.train_iters=6", "checkpoint.save_interval=2", "train.eval_interval=0")
    arguments = (fault, str(rank), *config, *steps, f"checkpoint.save={folder}", *more)
    words = command("blocked_end.py", *arguments, nproc=nproc, folder="tests")
    if nproc == 1:  # without a launcher
        words = [sys.executable, str(ROOT / "tests/blocked_end.py"), *arguments]
    done = run(words, env={"PYTHONPATH": str(ROOT)}, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "waits" not in done.stderr
    return done


def _below(done: subprocess.CompletedProcess[str], error: str, *, rank: int) -> list[str]:
    """The lines that are ours below the traceback of this error, which is there once."""
    said, *_ = done.stderr.partition("\nTraceback (most recent call last):")  # the launcher's
    assert said.count("Traceback (most recent call last):") == 1, said
    assert said.count(f"[rank{rank}]: {error}\n") == 1, said
    if done.stderr != said:
        assert f"traceback : error: {error} (its traceback is above)" in done.stderr
    others = ("torch/distributed/elastic/", "stopping: a checkpoint")  # the launcher stops the rest
    below = said.partition(f"{error}\n")[2].splitlines()
    return [line for line in below if line and not any(other in line for other in others)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "rank", "settings"),
    [
        ("forward", 1, TWO),
        ("packs", 0, (*TWO[:1], "train.global_batch_size=1", "model.tensor_model_parallel_size=2")),
        # The average is put in the place of the weights, and back, by all ranks together.
        ("validation", 1, (*TWO, "train.eval_interval=3", "train.eval_iters=2")),
    ],
)
def test_the_traceback_is_shown_and_the_run_ends(tmp_path, fault, rank, settings):
    done = _run(tmp_path, fault, *settings, rank=rank)
    assert _below(done, f"RuntimeError: a fault in {fault}", rank=rank) == []
    assert metrics(tmp_path)[-1]["step"] == 2
    assert (tmp_path / "checkpoints/LATEST").read_text() == "step_00000002"


@pytest.mark.slow
def test_a_full_device_says_what_it_held_and_which_keys_help(tmp_path):
    alone = ("dataset.num_workers=0", "train.global_batch_size=1")
    done = _run(tmp_path, "memory", *alone, rank=0, nproc=1)
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    held, less = _below(done, error, rank=0)
    assert held.startswith("[rank0]: held: weights 0.0005"), held
    assert all(f", {what} 0.0" in held for what in ("gradients", "optimizer", "average")), held
    assert "less memory: model.recompute_granularity=full" in less
    assert "a smaller dataset.task_encoder_seq_length (now 256)" in less


SAVE = ("dataset.num_workers=0", "checkpoint.async_save=true", "train.global_batch_size=1")


@pytest.mark.slow
def test_a_save_under_way_is_lost_by_name_where_others_would_have_to_finish_it(tmp_path):
    done = _run(tmp_path, "save", *SAVE[:2], "train.global_batch_size=2")
    below = _below(done, "RuntimeError: a fault in save", rank=1)
    lost = "step_00000002, which was being written, is lost"
    assert below == [f"{lost}; earlier checkpoints are whole"]
    assert not (tmp_path / "checkpoints/LATEST").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "finished"), [("save", True), ("late save", False)])
def test_one_process_finishes_a_save_under_way_within_a_limit(tmp_path, fault, finished):
    done = _run(tmp_path, fault, *SAVE, rank=0, nproc=1)
    below = _below(done, f"RuntimeError: a fault in {fault}", rank=0)
    assert (f"saved {tmp_path}/checkpoints/step_00000002" in done.stdout) == finished
    assert (tmp_path / "checkpoints/step_00000002").exists() == finished
    lost = "step_00000002, which was being written, is lost: it did not end within 2 s"
    assert below == ([] if finished else [lost])
