"""How a script ends: exit code, one message for an error, and signals to stop.

After an error a process closes its files and loaders within a time limit, without waiting for other
ranks. NCCL waits for ever for operations with ranks that have left: its kernels, copies after them,
and the destruction of its communicators. So process groups are not destroyed, and no message goes
to another rank.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from dit.command_line import OptionParser, not_an_option
from dit.console import Console, hide_library_warnings
from dit.launched import (
    LaunchError,
    LauncherWatch,
    NoAnswerError,
    check_launch,
    has_started,
    is_launched,
    local_rank,
    world_size,
)
from dit.parsing import cause
from dit.streams import flush, last_words, with_streams
from dit.system_errors import explained, system_number

if TYPE_CHECKING:
    import psutil

# Errors that a user can fix. Any other is a fault of this program, shown with its traceback.
_USER_ERRORS = (ValueError, OSError, FloatingPointError)
_LOST_PEER = (
    "another process of the run died before training began; the launcher's summary names it and its"
    " exit code (-9: killed, mostly because memory ran out); --debug shows what was under way"
)
_ANSWER_S = 10.0
"""Seconds without an answer after which the launcher counts as dead."""
_DESTROY_S = 30.0
"""Most seconds for destroying process groups at the end of a run."""
_CLOSE_S = 30.0
"""Most seconds for closing loggers and loaders; launchers end other processes after about 30 s."""
_ALONE_S = 120.0
"""Most seconds for closing a run of a single process, which also finishes a pending checkpoint."""
_FLUSH_S = 2.0
_at_stake: list[str] = []


class Parser(OptionParser):
    """Argument parser for programs with several processes; `run` shows its errors once.

    argparse would print them in every process.
    """

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; --help=all lists the options")

    def parse_args(  # pyright: ignore[reportIncompatibleMethodOverride] - it is overloaded
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(not_an_option(unknown, self._option_string_actions))
        return found


def run(main: Callable[[], int]) -> int:
    """Calls `main` and returns its exit code; 1 after an error, 130 after an early Ctrl-C.

    The first process that fails shows one message if a user can fix the error, else its traceback.
    The others had the same error or lost a peer, and exit silently. After an error, a process in a
    process group ends inside this function, because it cannot destroy the group alone. Output
    streams that cannot be written do not end the process (`dit.streams`).
    """
    return with_streams(lambda: _run(main))


def _run(main: Callable[[], int]) -> int:
    hide_library_warnings()
    threading.excepthook = _show_crash
    _Said.it, _Said.limit, _Said.below_run = None, None, True
    LauncherWatch(_leave_without_launcher)
    try:
        code = main()
    except SystemExit as end:  # --help
        _stop(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            _print(f"interrupted; the same command starts it again: {started_with()}")
        return _leave(130)
    except Exception as error:  # noqa: BLE001  # shown here, or by another process
        _show(error)
        return _leave(1)
    finally:
        _Said.below_run = False
        if _Said.limit is not None:
            _Said.limit.cancel()
    _stop(code)
    return code


@contextmanager
def shown_at_once() -> Iterator[None]:
    """A context in which an error is shown as soon as it is raised.

    Closing loaders and loggers afterwards may wait for other ranks, so the process ends after a
    time limit. Outside `run`, which ends the process, there is no limit and nothing is shown.
    """
    try:
        yield
    except Exception as error:
        # The watchdog explains the loss of another process before the error reaches `run`.
        if _Said.below_run and not _is_lost_peer(error):
            _show(error)
            _Said.limit = _Said.limit or leave_after(time_to_close(), 1, say=say_below)
        raise


class _Said:
    """Whether the run's error has been shown, and by which process."""

    it: bool | None = None
    """True if this process has shown the error; False if another one has; None: not yet shown."""
    below_run = False
    limit: threading.Timer | None = None
    asks = threading.Lock()


def _may_say() -> bool:
    """Whether this process shows the run's error; returns True at most once."""
    with _Said.asks:  # the watchdog's thread may ask, too
        if _Said.it is not None:
            return False
        _Said.it = _is_first()
        return _Said.it


def _show(error: Exception) -> None:
    if not str(error) and isinstance(error, ConnectionError):
        return  # another process shows why
    # Each process shows these errors itself: there is no store yet to ask whether another has.
    asks_nobody = isinstance(error, LaunchError | NoAnswerError) and not is_launched()
    if asks_nobody and _Said.it is None:
        _Said.it = True
    elif not _may_say():
        if _Said.it and isinstance(error, ConnectionError):
            _debug()  # the watchdog has said what it means
        return
    lost = _is_lost_peer(error)
    if not isinstance(error, _USER_ERRORS) and not lost:
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stderr.flush()
        if system_number(error):
            _print(f"error: {explained(error)}")
        _tell_launcher(f"{type(error).__name__}: {error} (its traceback is above)")
        return
    _debug()
    _say(_LOST_PEER if lost else explained(error))


def _debug() -> None:
    if "--debug" in sys.argv:
        traceback.print_exc()


def _leave_without_launcher(message: str) -> None:
    """Ends this process, from any thread; one process of each machine shows `message`."""
    limit = threading.Timer(_FLUSH_S, os._exit, (1,))  # the main thread may hold an import's lock
    limit.daemon = True
    limit.start()
    try:
        if _Said.it is None and local_rank() == 0:
            _say(message)
    finally:
        leave(1)


def say_below(message: str) -> None:
    """Shows `message` below the run's error, if this process has shown that error."""
    if _Said.it:
        _print(message)


def _leave(code: int) -> int:
    if has_started():
        last_words()
        leave(code)
    return code


def _stop(code: int) -> None:
    """Destroys the process groups; if that takes too long, ends the process with `code`."""
    if not has_started():
        return
    limit = leave_after(_DESTROY_S, code, say=say_notice)
    sys.modules["torch.distributed"].destroy_process_group()
    limit.cancel()


class StopSignals:
    """A context in which signals to stop set `received` instead of ending the process.

    The signals are SIGTERM, SIGINT (Ctrl-C) and SIGHUP (loss of the terminal). SIGHUP is left alone
    if `nohup` ignores it, except under a launcher.
    """

    def __init__(self) -> None:
        self.received = False
        self.former_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        signals = [signal.SIGTERM, signal.SIGINT]
        if is_launched() or signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signals.append(signal.SIGHUP)
        self.former_handlers = {s: signal.signal(s, self._receive) for s in signals}
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Restores the former signal handlers, except after an error.

        After an error the launcher stops the other ranks, which still have to say why they end.
        """
        for s, handler in self.former_handlers.items() if kind is None else ():
            signal.signal(s, handler)

    def _receive(self, _number: int, _frame: FrameType | None) -> None:
        if not self.received and os.environ.get("RANK", "0") == "0":
            # Not written to a stream, because this handler may interrupt a write to that stream.
            with suppress(OSError):  # the terminal is gone
                os.write(2, b"\nstopping: a checkpoint is saved after this step\n")
        self.received = True


def started_with() -> str:
    """The shell command that started this run; under a launcher, the launcher's command.

    On several machines it is the command on this machine.
    """
    words = list(sys.orig_argv)
    if is_launched():
        with suppress(OSError):  # there is no /proc
            typed = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode(errors="replace")
            words = typed.removesuffix("\0").split("\0")
    return shlex.join(words)


def say_once(message: str) -> None:
    """Shows `message` as an error, unless a process of the run has shown one before."""
    if _may_say():
        _say(message)


def say_notice(message: str) -> None:
    """Shows `message`, which is no error, in the first process only."""
    if os.environ.get("RANK", "0") == "0":
        _print(message)


def _is_lost_peer(error: Exception) -> bool:
    if not isinstance(error, RuntimeError):
        return False
    from dit.distributed.watchdog import is_lost_peer

    return is_lost_peer(error)


def _print(line: str) -> None:
    Console(stderr=True).print(line)


def _say(message: str) -> None:
    _print(f"error: {message}")
    _tell_launcher(message)


def _tell_launcher(message: str) -> None:
    """Writes `message` to the file from which torch.distributed.run reads why a run has failed.

    The file has the form of torch's `record`, without a traceback, which the launcher's summary
    would prefer. Its time is a second early: the earliest error counts as the cause, and other
    ranks may fail at the same time.
    """
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        earlier = str(int(time.time()) - 1)
        note = {"message": f"error: {message}", "extraInfo": {"timestamp": earlier}}
        with suppress(OSError):  # the message itself has been shown
            Path(file).write_text(json.dumps({"message": note}))


def _show_crash(crash: threading.ExceptHookArgs) -> None:
    """Shows the crash of a thread, but not of TensorBoard's, which repeat a known error."""
    if not type(crash.thread).__module__.startswith("tensorboard."):
        threading.__excepthook__(crash)


def _is_first() -> bool:
    """Whether this is the first process of the run that fails."""
    environment, launched = os.environ, is_launched()
    try:
        check_launch()
    except LaunchError:
        return True  # no other process can be asked
    if world_size() == 1:
        return True
    if not launched and not has_started():
        return environment.get("RANK", "0") == "0"  # all have the same error; there is no store yet
    # Without an answer, the launcher is gone, or rank 0, which keeps the store without a launcher.
    alone = environment["LOCAL_RANK"] == "0" if launched else environment["RANK"] == "1"
    answers: SimpleQueue[bool] = SimpleQueue()
    # In a thread, because a launcher that is stopped never answers.
    threading.Thread(target=lambda: answers.put(_ask_store(otherwise=alone)), daemon=True).start()
    try:
        return answers.get(timeout=_ANSWER_S)
    except Empty:
        return alone


def _ask_store(*, otherwise: bool) -> bool:
    from torch.distributed.rendezvous import rendezvous

    # The launcher keeps its store through a restart.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=_ANSWER_S))))
        return store.add(f"failed/{attempt}", 1) == 1
    except RuntimeError:
        return otherwise


@contextmanager
def at_stake(what: str, *, say: Callable[[str], None]) -> Iterator[None]:
    """A context for `what`, work that must still finish after an error of the run.

    An error inside is not raised: `say` reports that `what` is lost. `leave_after` reports the same
    if the process ends before the context does.
    """
    _at_stake.append(what)
    try:
        yield
    except Exception as error:  # noqa: BLE001  # the run's error, which is the cause, goes first
        say(f"{what} is lost: {cause(error)}")
    finally:
        _at_stake.remove(what)


def time_to_close() -> float:
    """Most seconds that a process may take to close files and loaders after an error."""
    return _ALONE_S if os.environ.get("WORLD_SIZE", "1") == "1" else _CLOSE_S


def leave_after(seconds: float, code: int, *, say: Callable[[str], None]) -> threading.Timer:
    """A started timer that ends this process with exit `code` after `seconds`, unless cancelled.

    It ends whatever the process waits for. `say` then reports what is lost (`at_stake`), or that
    the process has waited.
    """

    def give_up() -> None:
        for what in _at_stake:
            say(f"{what} is lost: it did not end within {seconds:.0f} s")
        if not _at_stake:
            say(f"this process waited for {seconds:.0f} s for others to end, and has left")
        leave(code)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    return timer


def leave(code: int) -> None:
    """Flushes streams for 2 s at most, kills this process's children, and exits with `code`."""
    import psutil  # late: scripts answer --help without it

    # In a thread, because another thread may hold a stream's lock while it waits for a reader.
    last = threading.Thread(target=flush, daemon=True)
    last.start()
    last.join(_FLUSH_S)
    kill_children(psutil.Process())
    os._exit(code)


def kill_children(process: psutil.Process) -> None:
    """Kills all descendants of `process`."""
    import psutil

    for child in process.children(recursive=True):
        with suppress(psutil.Error):
            child.kill()
