"""Programs whose reader ends, or whose log is full, do all of their work and end as usual."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launching import ROOT, SMALL, command, environment, metrics, run_cold
from tests.warm_python import warm_python

pytestmark = pytest.mark.slow
ONCE = "Its lines follow here, and the program goes on"


def _shell(words: list[str], streams: str, folder: Path) -> str:
    """What a command says on standard error where a shell connects its streams; it ends with 0."""
    if words[0] == sys.executable:
        words = [warm_python(), *words[1:]]
    line = f"{shlex.join(words)} {streams}; exit ${{PIPESTATUS[0]}}"
    done = run_cold(["bash", "-c", line], cwd=folder, env={"PYTHON_EXEC": warm_python()})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr and "error:" not in done.stderr, done.stderr
    return done.stderr


@pytest.mark.timeout(600)
def test_a_whole_session_of_which_nobody_reads_anything(tmp_path: Path) -> None:
    """Each command, what becomes of its output, and the file that it is to write."""
    small = ("--config-file", str(ROOT / "conf/dit_digits.yaml"), *SMALL, "dataset.path=data")
    steps = ("train.train_iters=4", "train.eval_interval=4", "checkpoint.save=run")
    training = command("pretrain_dit.py", *small, *steps, "train.global_batch_size=2", nproc=2)
    of, python = ("--checkpoint_path", "run"), sys.executable
    packing = [python, "-m", "data_prep", "digits", "--num_samples", "240", "--output_dir", "data"]
    made = ["--output_dir", "made", "--prompt", "a handwritten three", "--num_steps", "1"]
    judging = [
        "--per_prompt",
        "1",
        "--num_steps",
        "1",
        "--min_accuracy",
        "0",
        "--output_dir",
        "judged",
    ]
    export = ["-m", "dit.convert", "export", "--megatron-path", "run", "--hf-path", "hf"]
    judge = str(ROOT / "recipes/evaluate_digits.py")
    for words, streams, file in (
        (packing, ">/dev/full", "data/.nv-meta/.info.json"),
        (training, "| head -3", "run/checkpoints/LATEST"),
        (command("generate_dit.py", *of, *made), "| true", "made/samples.json"),
        ([python, *export], ">/dev/full", "hf/config.json"),
        ([python, judge, *of, *judging], "| true", "judged/evaluation.json"),
        ([python, "-m", "dit.fitting", "data"], ">/dev/full", "data/train.yaml"),
        ([python, "-m", "dit.report", "run"], ">/dev/full 2>&1", "run/report.html"),
    ):
        said = _shell(words, streams, tmp_path)
        assert said.count(ONCE) == ("2>&1" not in streams), said
        assert said.count("lines are missing: ") == ("2>&1" not in streams)
        assert (tmp_path / file).exists(), file
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4]


@pytest.mark.parametrize("streams", ["| head -3", "2>&1 | head -3"])
def test_all_ranks_of_a_launcher_whose_reader_ends_do_their_work(streams, tmp_path):
    words = command("printing_ranks.py", str(tmp_path), nproc=2, folder="tests")
    said = _shell(words, streams, ROOT)
    assert {file.name for file in tmp_path.iterdir()} == {"0", "1"}
    assert said.count(ONCE) == (2 if "2>&1" not in streams else 0)


def test_loss_of_the_terminal_saves_a_checkpoint(tmp_path):
    """SIGHUP comes to the run and to what its output is piped into, which then ends."""
    words = [sys.executable, str(ROOT / "recipes/pretrain_dit.py"), "checkpoint.save=run"]
    words += ["--config-file", str(ROOT / "conf/dit_debug.yaml"), "model.num_layers=1"]
    words += ["logger.log_interval=1", "train.eval_interval=0", "train.train_iters=100000"]
    words += ["checkpoint.save_interval=100000"]
    with (
        subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as reader,
        subprocess.Popen(
            words,
            cwd=tmp_path,
            env=environment(),
            stdout=reader.stdin,
            stderr=subprocess.PIPE,
            # Under nohup, children ignore the signal.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        ) as run,
    ):
        assert reader.stdin is not None
        reader.stdin.close()
        log = tmp_path / "run/metrics.jsonl"
        try:
            while run.poll() is None and not (log.exists() and log.read_bytes().count(b"\n") > 1):
                time.sleep(0.1)
            reader.kill()  # as the signal ends it
            reader.wait()
            run.send_signal(signal.SIGHUP)
            said = run.communicate(timeout=60)[1].decode()
        finally:
            run.kill()
    assert run.returncode == 75, said
    assert said.count(ONCE) == 1 and "the same command continues" in said
    last = metrics(tmp_path / "run")[-1]["step"]
    assert (tmp_path / f"run/checkpoints/step_{last:08d}").is_dir()
