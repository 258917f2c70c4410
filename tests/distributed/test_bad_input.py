"""What is wrong with the input is said once, with what to do, or counted; no traceback, no hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.entering import Enter, Outcome
from tests.launching import ROOT, SMALL, command, environment, metrics, own_words
from tests.shard_edits import SHARD, edited

DIGITS = ("--config-file", str(ROOT / "conf/dit_digits.yaml"), *SMALL)
QUICK = ("dataset.num_workers=0", "train.train_iters=5", "train.global_batch_size=4")
"""Five steps of four packs of 16 digits: 320, which is more than one pass over the 215."""

Train = Callable[..., Outcome]


@pytest.fixture
def train(enter: Enter, tmp_path: Path) -> Train:
    """Trains on a dataset for a few steps, into the folder `run`, without validation."""

    def call(dataset: Path, *arguments: str) -> Outcome:
        places = (f"dataset.path={dataset}", f"checkpoint.save={tmp_path / 'run'}")
        asked = (*DIGITS, *places, *QUICK, "train.eval_interval=0", *arguments)
        return enter("pretrain_dit", *asked)

    return call


def _with_nan(tensors):
    tensors["latent"][0, 0, 0, 0] = torch.nan
    return tensors


def _without_text(tensors):
    return {"latent": tensors["latent"]}


@pytest.mark.parametrize(
    ("fault", "reason"), [(_with_nan, "latent has NaN or Inf"), (_without_text, "text is missing")]
)
def test_one_bad_sample_is_counted_and_the_run_goes_on(train, digits, tmp_path, fault, reason):
    data = edited(digits, tmp_path / "data", fault, count=1)
    done = train(data)
    assert done.code == 0, done.said
    lines = metrics(tmp_path / "run")
    refused = [line["refused"] for line in lines]
    assert refused[-1] in (1, 2)  # in the first pass, perhaps again in the second
    assert refused == sorted(refused)
    assert all(line["pack_fill"] == 1 for line in lines)
    assert f"{lines[-1]['refused']} {reason}" in done.said
    named = (tmp_path / "run/refused_samples.jsonl").read_text().splitlines()
    (first,) = map(json.loads, named)  # once, though it is met again in the second pass
    assert (first["shard"], first["dataset"]) == (SHARD, str(data))
    assert reason in first["reason"] and first["key"] in done.said
    assert f"{data}/{SHARD}, key " in done.said


def _picture(path: Path) -> tuple[str, ...]:
    asked = ("--checkpoint_path", str(path), "--prompt", "a handwritten seven", "--num_steps", "2")
    return (*asked, "--output_dir", str(path / "pictures"))


def test_resume_with_other_workers(train, digits, tmp_path):
    three = ("train.train_iters=3", "checkpoint.save_interval=2")
    assert train(digits, *three).code == 0
    done = train(digits, "dataset.num_workers=3")
    assert done.code == 0, done.said
    assert "data-parallel size 1 x dataset.num_workers 0 when saved, 1 x 3 now" in done.said
    assert "none is left out or repeated" in done.said
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5]


def test_no_checkpoint_to_generate_from(enter, tmp_path):
    error = enter("generate_dit", *_picture(tmp_path)).error()
    assert f"--checkpoint_path {tmp_path} holds no check" in error


def test_prompt_for_a_model_without_its_text_encoder_and_too_few_processes(enter, tmp_path):
    mock = ("--mock", "dataset.task_encoder_seq_length=512", "train.global_batch_size=1")
    steps = ("train.train_iters=3", "train.eval_interval=0", f"checkpoint.save={tmp_path}")
    conf = str(ROOT / "conf/dit_debug.yaml")
    done = enter("pretrain_dit", "--config-file", conf, *SMALL[:4], *mock, *steps)
    assert done.code == 0, done.said
    error = enter("generate_dit", *_picture(tmp_path)).error()
    assert all(part in error for part in (str(tmp_path), "without a text encoder", "train on a"))
    error = enter("generate_dit", *_picture(tmp_path), "--context_parallel_size", "2").error()
    assert "the number of processes (1)" in error and "--nproc-per-node 2" in error


@pytest.mark.slow
def test_killed_loader_process_ends_the_run(digits, tmp_path):
    places = (f"dataset.path={digits}", f"checkpoint.save={tmp_path / 'run'}")
    endless = ("train.train_iters=1000000", "train.eval_interval=0", "dataset.num_workers=1")
    asked = (*DIGITS, *places, "train.global_batch_size=2", *endless)
    process = subprocess.Popen(
        command("pretrain_dit.py", *asked, nproc=2),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    written = tmp_path / "run/metrics.jsonl"
    while process.poll() is None and not (written.exists() and written.read_text()):
        time.sleep(0.1)
    trainers = _children(process.pid)
    os.kill(_loaders(trainers[-1])[0], signal.SIGKILL)
    family = [*trainers, *(child for trainer in trainers for child in _children(trainer))]
    _, said = process.communicate(timeout=60)
    assert process.returncode != 0
    error = Outcome(1, own_words(said)).error()
    for part in ("a loader process has died", "Lower dataset.num_workers", "resumes"):
        assert part in error
    deadline = time.monotonic() + 20  # the kernel ends orphans a moment later
    while (left := [pid for pid in family if _alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def _children(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for one in threads for child in (one / "children").read_text().split()]


def _loaders(trainer: int) -> list[int]:
    """Forked children: they show the command of the trainer itself."""
    mine = Path(f"/proc/{trainer}/cmdline").read_bytes()
    forked = [p for p in _children(trainer) if Path(f"/proc/{p}/cmdline").read_bytes() == mine]
    assert forked
    return forked


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
