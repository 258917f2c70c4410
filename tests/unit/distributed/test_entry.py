"""How a command ends: its exit code, and what it says."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from dit.distributed import entry
from dit.distributed.entry import StopSignals, run
from recipes import generate_dit


@pytest.fixture(autouse=True)
def _group_of_other_tests(monkeypatch):
    """`run` ends the process group of its process, which here belongs to other tests."""
    monkeypatch.setattr(entry, "_stop", lambda: None)


def _raises(error: BaseException):
    def main() -> int:
        raise error

    return main


@pytest.mark.parametrize("error", [ValueError("[b] is no size"), OSError("[b] is no size")])
def test_what_a_user_can_mend_is_one_message(capfd, error):
    assert run(_raises(error)) == 1
    assert capfd.readouterr() == ("", "error: [b] is no size\n")  # as it is, markup or not


def test_a_fault_of_ours_keeps_its_traceback():
    with pytest.raises(TypeError, match="ours"):
        run(_raises(TypeError("ours")))


def test_the_death_of_another_process_is_said_in_words(capfd):
    gloo = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error")
    assert run(_raises(gloo)) == 1
    said = capfd.readouterr().err
    assert said.startswith("error: another process of the run died before training began")
    assert "exit code (-9: killed, mostly because memory ran out)" in said


def test_an_early_interrupt_is_no_error_and_names_the_command(capfd, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "draw.py", "--prompt", "a fox"])
    for rank, said in (
        ("0", "interrupted; the same command starts it again: python draw.py --prompt 'a fox'\n"),
        ("1", ""),
    ):
        monkeypatch.setenv("RANK", rank)
        assert run(_raises(KeyboardInterrupt())) == 130
        assert capfd.readouterr() == ("", said)


@pytest.mark.parametrize(
    ("before", "launched", "stops"),
    [(signal.SIG_DFL, "", True), (signal.SIG_IGN, "", False), (signal.SIG_IGN, "True", True)],
)
def test_a_lost_terminal_stops_a_run_unless_nohup_protects_it(
    monkeypatch, capfd, before, launched, stops
):
    """Behind the launcher nohup protects nothing: it would kill the process 30 seconds later."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", launched)
    former = signal.signal(signal.SIGHUP, before)
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.received == stops
        assert signal.getsignal(signal.SIGHUP) == before
    finally:
        signal.signal(signal.SIGHUP, former)
    said = "\nstopping: a checkpoint is saved after this step\n"
    assert capfd.readouterr().err == (said if stops else "")  # once


def test_a_conversion_that_is_interrupted_at_its_start_says_so(monkeypatch, capfd):
    """The start takes seconds, in which torch is imported."""
    monkeypatch.setattr("dit.convert.cli._start", _raises(KeyboardInterrupt()))
    words = ["convert", "verify", "--hf-path", "a", "--megatron-path", "b"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as left:
        runpy.run_module("dit.convert", run_name="__main__")
    assert left.value.code == 130
    assert capfd.readouterr().err.startswith("interrupted; the same command starts it again: ")


def _page_of_the_launcher(file: Path) -> str:
    """What torch.distributed.run ends with where a process has left `file`."""
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(file))
    return ChildFailedError("pretrain_dit.py", {0: failure}).format_msg()


def test_the_launcher_repeats_the_message(monkeypatch, tmp_path, capfd):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    assert run(_raises(ValueError("optimizer.lr=$x: wrong\nand more"))) == 1
    assert "traceback : error: optimizer.lr=$x: wrong\n  and more" in _page_of_the_launcher(file)
    with pytest.raises(TypeError):
        run(_raises(TypeError("ours")))
    assert "error: TypeError: ours (its traceback is above)" in _page_of_the_launcher(file)


def test_a_layout_is_tried_without_a_launcher(monkeypatch, capfd):
    """WORLD_SIZE alone says for how many processes."""
    monkeypatch.setattr(entry, "_has_started", lambda: False)  # the group of other tests
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.delenv("RANK", raising=False)
    assert run(_raises(ValueError("wrong"))) == 1
    assert capfd.readouterr().err == "error: wrong\n"


def test_exit_codes_pass_through():
    assert run(lambda: 75) == 75


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (("--sampler", "ddpm"), "argument --sampler: invalid choice: 'ddpm'"),
        (("--num_stepz", "4"), "--num_stepz is no option, --num_steps is;"),
        (("--seeds=4",), "--seeds is no option, --seed is;"),
        (("and", "more"), "'and' belongs to no option; put quotes around names with spaces;"),
    ],
)
def test_a_wrong_option_is_said_as_any_other_error(capfd, typed: tuple[str, ...], said: str):
    asked = ["--checkpoint_path", "x", "--prompt", "y", *typed]
    assert run(lambda: generate_dit.main(asked)) == 1
    message = capfd.readouterr().err
    assert message.startswith(f"error: {said}")
    assert message.endswith("--help lists the options\n")
