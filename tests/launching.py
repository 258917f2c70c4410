"""Real runs of the entry scripts, in processes of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader

from tests.warm_python import warm_python

ROOT = Path(__file__).resolve().parents[1]
SMALL = (
    "model.num_layers=2",
    "model.hidden_size=48",
    "model.num_attention_heads=2",
    "model.adaln_lora_dim=8",
    "dataset.task_encoder_seq_length=256",
    "dataset.packing_buffer_size=32",
    "dataset.shuffle_buffer_size=20",
    "scheduler.lr_warmup_iters=2",
    "logger.log_interval=1",
    "validation.num_captions=0",
)
"""Overrides that make conf/dit_digits.yaml a matter of seconds."""


def command(script: str, *arguments: str, nproc: int = 1, folder: str = "recipes") -> list[str]:
    """The command line that the documentation gives, for this interpreter."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    return [sys.executable, *launcher, str(ROOT / folder / script), *arguments]


def environment() -> dict[str, str]:
    """This environment, without what a launcher around the tests may have set."""
    outer = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {k: v for k, v in os.environ.items() if k not in outer} | {"OMP_NUM_THREADS": "1"}


def run(
    arguments: list[str],
    *,
    cwd: Path = ROOT,
    timeout: float = 240,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, `env` beside its environment; its output is in the result.

    Its processes are forks with torch and others imported; `run_cold` starts them as users do.
    """
    if arguments[0] == sys.executable:
        arguments = [warm_python(), *arguments[1:]]
        env = {"PYTHON_EXEC": warm_python()} | (env or {})
    return run_cold(arguments, cwd=cwd, timeout=timeout, env=env)


def run_cold(
    arguments: list[str],
    *,
    cwd: Path = ROOT,
    timeout: float = 240,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """`run` where it matters what a process imports, or who its parent is."""
    return subprocess.run(
        arguments,
        cwd=cwd,
        env=environment() | (env or {}),
        timeout=timeout,
        capture_output=True,
        text=True,
    )


def own_words(said: str) -> str:
    """What a launched run said itself; the launcher ends with a page of its own."""
    return said.partition('Traceback (most recent call last):\n  File "<frozen')[0]


def pretrain(
    folder: Path, *arguments: str, nproc: int = 1, config: str = "dit_digits.yaml"
) -> subprocess.CompletedProcess[str]:
    """Trains into `folder`; fails the test where the run fails."""
    done = run(
        command(
            "pretrain_dit.py",
            "--config-file",
            str(ROOT / "conf" / config),
            f"checkpoint.save={folder}",
            *SMALL,
            *arguments,
            nproc=nproc,
        )
    )
    assert done.returncode == 0, done.stdout + own_words(done.stderr)
    return done


def metrics(folder: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def numbers(folder: Path) -> list[dict]:
    """What metrics.jsonl says of the mathematics: everything but speed and memory."""
    timed = {"step_time_s", "tokens_per_s", "samples_per_s", "model_tflops", "peak_memory_gb"}
    timed |= {"validation_s", "sampling_s"}
    timed |= {"data_s", "forward_s", "backward_s", "communication_s", "optimizer_s"}
    return [{k: v for k, v in line.items() if k not in timed} for line in metrics(folder)]


def back_to_step_2(folder: Path, to: Path) -> Path:
    """A copy of a run of four steps as it was after two."""
    shutil.copytree(folder, to)
    shutil.rmtree(to / "checkpoints/step_00000004")
    (to / "checkpoints/LATEST").write_text("step_00000002")
    return to


def stored_tensors(folder: Path) -> dict[Any, bytes]:
    """Weights, moments and averages of the checkpoint after step 4, as they are stored."""
    place = folder / "checkpoints/step_00000004"
    files = {file.name: file.read_bytes() for file in place.glob("*.distcp")}
    index = FileSystemReader(place).read_metadata().storage_data
    parts = {key: (files[at.relative_path], at.offset, at.length) for key, at in index.items()}
    assert parts
    # From Megatron-Core 0.19 on the values of common.pt, which know of validations, are among them.
    common = "common_state/"
    return {k: c[at : at + n] for k, (c, at, n) in parts.items() if not k.fqn.startswith(common)}
