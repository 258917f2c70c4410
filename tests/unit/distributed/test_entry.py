"""How a command ends: its exit code, and what it says."""

from __future__ import annotations

import errno
import os
import runpy
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from dit.distributed import entry
from dit.distributed.entry import StopSignals, at_stake, run, say_below, say_notice, shown_at_once
from recipes import generate_dit

HAS_STARTED = entry.has_started


@pytest.fixture(autouse=True)
def _group_of_other_tests(monkeypatch):
    """`run` ends the process group of its process, or leaves; here other tests need both."""
    monkeypatch.setattr(entry, "has_started", lambda: False)


def _raises(error: BaseException):
    def main() -> int:
        raise error

    return main


@pytest.mark.parametrize("error", [ValueError("[b] is no size"), OSError("[b] is no size")])
def test_what_a_user_can_mend_is_one_message(capfd, error):
    assert run(_raises(error)) == 1
    assert capfd.readouterr() == ("", "error: [b] is no size\n")  # as it is, markup or not


def test_an_error_of_the_system_is_shown_with_what_to_do(capfd):
    assert run(_raises(OSError(errno.EMFILE, "Too many open files", "a.tar"))) == 1
    said = capfd.readouterr().err
    assert said.startswith("error: a.tar: Too many open files; ") and "`ulimit -n`" in said


def test_a_fault_of_ours_keeps_its_traceback(capfd):
    assert run(_raises(TypeError("ours"))) == 1
    said = capfd.readouterr().err.replace("[rank0]: ", "").splitlines()  # torch's, in a group
    assert said[0] == "Traceback (most recent call last):" and said[-1] == "TypeError: ours"


def _fails_while_it_closes() -> int:
    """As a logger that an error has closed too early; the error is shown before that."""
    with ExitStack() as ends:
        ends.callback(_raises(ValueError("an error of closing")))
        ends.callback(lambda: sys.stderr.write("closes\n"))
        with shown_at_once():
            raise ValueError("the cause")


def test_an_error_is_shown_before_anything_is_closed_and_what_follows_from_it_is_not(capfd):
    assert run(_fails_while_it_closes) == 1
    assert capfd.readouterr().err == "error: the cause\ncloses\n"


def test_without_run_nothing_is_shown_and_the_process_stays(capfd):
    with pytest.raises(ValueError, match="an error of closing"):
        _fails_while_it_closes()
    assert capfd.readouterr().err == "closes\n"


def test_what_an_error_leaves_unfinished_is_named_and_ends_with_the_process(capfd, monkeypatch):
    """Whatever the main thread waits for."""
    left = Event()
    monkeypatch.setattr(entry, "leave", lambda code: (codes.append(code), left.set()))
    monkeypatch.setattr(entry, "_ALONE_S", 0.1)
    codes: list[int] = []

    def main() -> int:
        with ExitStack() as ends:
            ends.callback(finish)
            with shown_at_once():
                raise ValueError("the cause")

    def finish() -> None:
        with at_stake("step_00000002", say=say_below):
            assert left.wait(60)

    assert run(main) == 1 and codes == [1]
    said = "error: the cause\nstep_00000002 is lost: it did not end within 0 s\n"
    assert capfd.readouterr().err == said


def test_process_groups_that_do_not_end_do_not_keep_a_run_that_is_done(monkeypatch, capfd):
    left = Event()
    monkeypatch.setattr(entry, "leave", lambda code: (codes.append(code), left.set()))
    monkeypatch.setattr(entry, "_DESTROY_S", 0.1)
    monkeypatch.setattr(entry, "has_started", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: left.wait(60))
    codes: list[int] = []
    assert run(lambda: 75) == 75 and codes == [75]
    assert "waited for 0 s for others to end, and has left" in capfd.readouterr().err


def test_a_notice_does_not_take_the_turn_of_an_error(monkeypatch, capfd):
    """Else the error of another process would be silent."""
    monkeypatch.setattr(entry, "_is_first", lambda: pytest.fail("asked"))
    for rank, said in (("0", "a notice\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        say_notice("a notice")
        assert capfd.readouterr().err == said


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


def test_a_process_that_leaves_with_an_error_is_not_stopped_on_its_way():
    """The launcher stops all others as soon as one has died, and they may have more to say."""
    stop = StopSignals()
    try:
        with pytest.raises(RuntimeError), stop:
            raise RuntimeError
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received
    finally:
        for number, handler in stop.former_handlers.items():
            signal.signal(number, handler)


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
    assert run(_raises(TypeError("ours"))) == 1
    assert "error: TypeError: ours (its traceback is above)" in _page_of_the_launcher(file)


@pytest.mark.parametrize("started", [True, False, None])
def test_torch_is_asked_for_a_group_and_not_imported(monkeypatch, started: bool | None):
    monkeypatch.delitem(sys.modules, "torch.distributed")
    if started is not None:
        known = SimpleNamespace(is_initialized=lambda: started)
        monkeypatch.setitem(sys.modules, "torch.distributed", known)
    assert HAS_STARTED() is bool(started)
    assert ("torch.distributed" in sys.modules) is (started is not None)


def test_a_layout_is_tried_without_a_launcher(monkeypatch, capfd):
    """WORLD_SIZE alone says for how many processes."""
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
        (("--num_stepz", "4"), "--num_stepz is not an option, --num_steps is;"),
        (("--seeds=4",), "--seeds is not an option, --seed is;"),
        (("and", "more"), "'and' belongs to no option; put quotes around names with spaces;"),
    ],
)
def test_a_wrong_option_is_said_as_any_other_error(capfd, typed: tuple[str, ...], said: str):
    asked = ["--checkpoint_path", "x", "--prompt", "y", *typed]
    assert run(lambda: generate_dit.main(asked)) == 1
    message = capfd.readouterr().err
    assert message.startswith(f"error: {said}")
    assert message.endswith("--help=all lists the options\n")
