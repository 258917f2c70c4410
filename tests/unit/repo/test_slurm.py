"""docs/slurm_pretrain.sbatch is run by bash, with stand-ins for Slurm's own commands."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

STAND_INS = {
    # The launchers: end by themselves with $LAUNCHER_CODE, or wait for SIGTERM, "save" and end.
    "srun": """
echo "$@" > arguments
[ "$LAUNCHER_CODE" = wait ] || exit "$LAUNCHER_CODE"
trap 'sleep 0.5; touch saved; exit "$STOPPED_CODE"' TERM
echo $$ > launcher.tmp && mv launcher.tmp launcher
while :; do sleep 0.05; done
""",
    "scancel": 'kill -TERM "$(cat launcher)"',
    "scontrol": """
[ "$1" = show ] && printf 'node-1\\nnode-2\\n' && exit
[ -e saved ] && echo "$@" > requeued
""",
}


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """An environment in which Slurm's commands are the stand-ins."""
    for name, body in STAND_INS.items():
        script = tmp_path / "bin" / name
        script.parent.mkdir(exist_ok=True)
        script.write_text(f"#!/usr/bin/env bash\n{body}")
        script.chmod(0o755)
    return os.environ | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node-[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_JOB_ID": "42",
    }


def start(root: Path, folder: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    script = root / "docs" / "slurm_pretrain.sbatch"
    command = ["bash", str(script), "--config-file", "conf/a b.yaml", "train.train_iters=5"]
    return subprocess.Popen(command, cwd=folder, env=environment)


@pytest.mark.parametrize("code", [0, 1])
def test_exit_code_is_the_launchers(
    repo_root: Path, tmp_path: Path, slurm: dict[str, str], code: int
) -> None:
    assert start(repo_root, tmp_path, slurm | {"LAUNCHER_CODE": str(code)}).wait(30) == code
    assert not (tmp_path / "requeued").exists()
    arguments = (tmp_path / "arguments").read_text()
    assert "--nnodes 2 --nproc-per-node 8" in arguments
    assert "--rdzv-endpoint node-1:29500 --rdzv-id 42" in arguments
    assert "--config-file conf/a b.yaml train.train_iters=5" in arguments


@pytest.mark.parametrize("code", [0, 1])
def test_stopped_job_saves_and_is_queued_again_unless_it_is_complete(
    repo_root: Path, tmp_path: Path, slurm: dict[str, str], code: int
) -> None:
    slurm |= {"LAUNCHER_CODE": "wait", "STOPPED_CODE": str(code)}
    job = start(repo_root, tmp_path, slurm)
    while not (tmp_path / "launcher").exists():
        assert job.poll() is None
    job.send_signal(signal.SIGTERM)
    assert job.wait(30) == code
    assert (tmp_path / "saved").exists()
    assert (tmp_path / "requeued").exists() == bool(code)
    assert not code or (tmp_path / "requeued").read_text() == "requeue 42\n"
