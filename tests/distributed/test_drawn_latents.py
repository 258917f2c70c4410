"""Drawn latents of a run on shards of MLPerf: exact after a resume, and equal on another layout."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from data_prep.cli.parser import main
from tests.launching import back_to_step_2, command, numbers, run
from tests.unit.data_prep.formats.test_mlperf import OVERRIDES, null_texts, parts_of, write

RUN = (
    *(*OVERRIDES, "dataset.mock=false", "dataset.task_encoder_seq_length=48"),
    *("train.global_batch_size=2", "train.train_iters=4", "checkpoint.save_interval=2"),
    *("train.eval_interval=2", "train.eval_iters=4", "validation.latents=drawn"),
    *("optimizer.lr=1e-3", "logger.log_interval=1"),
)


@pytest.mark.slow
def test_latents_are_the_same_after_a_resume_and_on_another_layout(tmp_path: Path) -> None:
    theirs, data = tmp_path / "theirs", tmp_path / "data"
    write(theirs / "train", [parts_of(n) for n in range(12)])
    write(theirs / "val", [parts_of(100 + n, timestep=n) for n in range(8)])
    for name, value in null_texts().items():
        np.save(theirs / f"{name}_empty.npy", value.numpy())
    assert main(["convert", str(theirs), "--link", "--output_dir", str(data)]) == 0

    def trained(folder: Path, *more: str, nproc: int = 1) -> list[dict]:
        told = ("--config-file", "conf/flux_debug.yaml", *RUN, f"dataset.path={data}", *more)
        done = run(command("pretrain_dit.py", *told, f"checkpoint.save={folder}", nproc=nproc))
        assert done.returncode == 0, done.stdout + done.stderr
        return numbers(folder)

    whole = trained(tmp_path / "whole")
    assert trained(back_to_step_2(tmp_path / "whole", tmp_path / "resumed")) == whole
    split = trained(tmp_path / "split", "model.context_parallel_size=2", nproc=2)
    assert [line["step"] for line in split] == [line["step"] for line in whole] == [1, 2, 3, 4]
    for one, other in zip(whole, split, strict=True):
        for name in ("loss", "val_loss"):
            assert (name in one) == (name in other)
            assert math.isclose(one.get(name, 1), other.get(name, 1), rel_tol=1e-5)
