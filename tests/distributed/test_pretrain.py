"""Runs of pretrain_dit.py: data parallelism, resume, validation, signals."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from tests.launching import ROOT, SMALL, command, environment, metrics, numbers, pretrain, run
from tests.warm_python import warm_python

SIX = ("train.train_iters=6", "train.global_batch_size=2", "checkpoint.save_interval=3")


@pytest.fixture(scope="module")
def finished(digits, tmp_path_factory):
    """Six steps of one process that reads with two workers."""
    folder = tmp_path_factory.mktemp("run")
    arguments = (*SIX, f"dataset.path={digits}", "train.eval_interval=2", "train.eval_iters=2")
    pretrain(folder, *arguments, "dataset.num_workers=2")
    return folder, arguments


@pytest.fixture(scope="module")
def on_two(finished, tmp_path_factory):
    """The same on two processes that read with one worker each."""
    folder = tmp_path_factory.mktemp("on_two")
    pretrain(folder, *finished[1], "dataset.num_workers=1", nproc=2)
    return folder


def _back_at_step_3(folder, to):
    """A copy of a finished run as it was when half of it was done."""
    shutil.copytree(folder, to)
    shutil.rmtree(to / "checkpoints/step_00000006")
    (to / "checkpoints/LATEST").write_text("step_00000003")
    return to


def _alone(script: str, *arguments: str) -> None:
    """Runs a few lines of Python that need a process group of their own."""
    done = run([sys.executable, "-W", "ignore", "-c", script, *arguments])
    assert done.returncode == 0, done.stdout + done.stderr


COMPARE = """
import sys, torch
from dit.models.dit.family import DitConfig
from dit.distributed.process_groups import start_processes
start_processes(seed=1, model=DitConfig())
from megatron.core import dist_checkpointing
loaded = (dist_checkpointing.load_plain_tensors(path) for path in sys.argv[1:3])
a, b = ({k: v for k, v in state.items() if torch.is_tensor(v)} for state in loaded)
assert a.keys() == b.keys() and any(name.startswith("ema.") for name in a)
different = [name for name in a if not torch.equal(a[name], b[name])]
assert not different, different
"""


def test_loss_falls_and_everything_is_written_down(finished):
    folder, _ = finished
    lines = metrics(folder)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert [line["step"] for line in lines if "val_loss" in line] == [2, 4, 6]
    for line in lines:
        assert line["real_tokens"] == 2 * 256
        assert line["pack_fill"] == 1
        assert line["refused"] == 0
        assert line["tokens_per_s"] == pytest.approx(line["real_tokens"] / line["step_time_s"])
    assert [line["consumed_samples"] for line in lines] == [32 * n for n in range(1, 7)]
    assert list((folder / "tensorboard").glob("events.*"))
    assert (folder / "config.yaml").is_file()
    assert (folder / "checkpoints/LATEST").read_text() == "step_00000006"


def test_two_processes_equal_one_with_twice_the_accumulation(finished, on_two):
    for one, two in zip(metrics(finished[0]), metrics(on_two), strict=True):
        for name in ("loss", "grad_norm"):
            assert two[name] == pytest.approx(one[name], rel=1e-5)
        for name in ("consumed_samples", "real_tokens", "lr", "pack_fill"):
            assert two[name] == one[name]
        for name in ("val_loss", "val_loss_ema"):
            assert (name in one) == (name in two) == (one["step"] % 2 == 0)
            assert two.get(name, 0) == pytest.approx(one.get(name, 0), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_resumed_run_equals_the_uninterrupted_one_bit_for_bit(finished, tmp_path, workers):
    folder, arguments = finished
    arguments = (*arguments, f"dataset.num_workers={workers}")
    if workers != 2:
        folder = tmp_path / "whole"
        pretrain(folder, *arguments)
    again = _back_at_step_3(folder, tmp_path / "again")
    # A kill may cut the last line short; a resume cuts the file at the loaded step anyway.
    with (again / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    said = pretrain(again, *arguments).stdout
    assert "continuing after step 3" in said
    assert numbers(again) == numbers(folder)
    steps = [str(place / "checkpoints/step_00000006") for place in (folder, again)]
    _alone(COMPARE, *steps)


@pytest.mark.slow
def test_a_run_of_two_processes_goes_on_in_one(finished, on_two, tmp_path):
    again = _back_at_step_3(on_two, tmp_path / "again")
    said = " ".join(pretrain(again, *finished[1], "dataset.num_workers=2").stdout.split())
    assert "data-parallel size 2 x dataset.num_workers 1 when saved, 1 x 2 now" in said
    assert "the same 2 readers go on" in said
    for one, other in zip(metrics(finished[0])[3:], metrics(again)[3:], strict=True):
        for name in ("loss", "grad_norm"):
            assert other[name] == pytest.approx(one[name], rel=1e-5)
        assert other["consumed_samples"] == one["consumed_samples"]


@pytest.mark.slow
def test_training_is_the_same_without_validation(finished, tmp_path):
    folder, arguments = finished
    pretrain(tmp_path, *arguments, "dataset.num_workers=2", "train.eval_interval=0")
    with_validation = [
        {k: v for k, v in line.items() if not k.startswith("val_")} for line in numbers(folder)
    ]
    assert numbers(tmp_path) == with_validation


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_and_leaves_with_its_exit_code(digits, tmp_path, sent):
    arguments = [f"dataset.path={digits}", "train.train_iters=100000", "train.eval_interval=0"]
    conf = str(ROOT / "conf/dit_digits.yaml")
    # Started as users start it in test_lost_streams.py, and by a launcher in test_ends_of_a_run.py.
    script = [warm_python(), str(ROOT / "recipes/pretrain_dit.py"), "--config-file", conf]
    run_folder = tmp_path / "run"
    process = subprocess.Popen(
        [*script, f"checkpoint.save={run_folder}", *SMALL, *arguments],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    written = run_folder / "metrics.jsonl"
    while process.poll() is None and not (written.exists() and written.read_text()):
        time.sleep(0.1)
    process.send_signal(sent)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 75, said
    assert said.count("stopping: a checkpoint is saved after this step\n") == 1
    last = metrics(run_folder)[-1]["step"]
    assert (run_folder / "checkpoints/LATEST").read_text() == f"step_{last:08d}"


def test_mock_runs_through_the_same_path(tmp_path):
    arguments = ("--mock", "train.train_iters=3", "dataset.task_encoder_seq_length=512")
    spent = ("logger.price_per_gpu_hour=1800", "logger.watts_per_gpu=5e5")
    done = pretrain(tmp_path, *arguments, *spent, config="dit_debug.yaml")
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3]
    told = re.search(
        r"(\S+) hours of 1 x cpu together since this start:"
        r" (\S+) at logger\.price_per_gpu_hour=1800, (\S+) kWh at logger\.watts_per_gpu=500000$",
        done.stderr + done.stdout,
        re.MULTILINE,
    )
    assert told, done.stderr + done.stdout
    hours, price, energy = map(float, told.groups())
    assert 0 < hours < 1
    assert price == pytest.approx(1800 * hours, rel=0.01, abs=0.01)
    assert energy == pytest.approx(500 * hours, rel=0.01)


@pytest.mark.slow
def test_every_switch_of_data_parallelism_runs_in_bfloat16(digits, tmp_path):
    pretrain(
        tmp_path,
        f"dataset.path={digits}",
        "train.train_iters=3",
        "train.global_batch_size=4",
        "train.eval_interval=2",
        "model.precision=bf16",
        "model.recompute_granularity=full",
        "ddp.overlap_grad_reduce=true",
        "ddp.overlap_param_gather=true",
        "objective.name=flow",
        "objective.loss_mean=sample",
        "scheduler.lr_warmup_iters=0",
        nproc=2,
    )
    losses = [line["loss"] for line in metrics(tmp_path)]
    assert len(losses) == 3
    assert all(torch.isfinite(torch.tensor(losses)))


@pytest.mark.slow
def test_error_is_said_once_whatever_the_number_of_processes(tmp_path):
    words = ["--config-file", str(ROOT / "conf/dit_digits.yaml"), *SMALL]
    words += [f"dataset.path={tmp_path}/nowhere", f"checkpoint.save={tmp_path}/run"]
    done = run(command("pretrain_dit.py", *words, "train.global_batch_size=2", nproc=2))
    assert done.returncode != 0
    assert "Traceback (most recent call last)" not in done.stdout.split("error:")[0]
    ours, page, launchers = (done.stdout + done.stderr).partition("Root Cause")
    assert page and ours.count("error:") == launchers.count(": error:") == 1  # it repeats it
    assert f"{tmp_path}/nowhere" in ours and f"{tmp_path}/nowhere" in launchers
