"""The process in which rows run one after the other, with one start of torch and of the device.

A line of JSON on its standard input is a row. Lines on its standard output are what the row has
found, bit by bit; the last one, with a `state`, is the outcome. What the row prints goes to the
standard error. A row that ends the process, or leaves the device unusable, costs its own result
alone, from what it had found on: the next one gets a new process.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from dit.streams import with_streams
from tools.gpu.plan import Row
from tools.gpu.results import Outcome, State

_FUNCTIONS = {
    "imports": "tools.gpu.checks:check_imports",
    "tests": "tools.gpu.checks:run_tests",
    "bounds": "tools.gpu.steps:table",
    "steps": "tools.gpu.steps:steps",
    "profile": "tools.gpu.steps:profile",
    "padded": "tools.gpu.steps:padded_loop",
}
"""Of the kinds of rows; a module that cannot be imported is an error of its row."""
_TAIL = 3000
"""Characters of the log that are kept with an error."""


class Worker:
    """The process that asks; `log` gets all that rows print."""

    def __init__(self, *, environment: dict[str, str], log: Path, settings: dict[str, Any]):
        self.environment, self.log, self.settings = environment, log, settings
        self.process: subprocess.Popen[bytes] | None = None
        self.begun: tuple[str, int] | None = None  # a row, and the size of the log before it

    def begin(self, row: Row) -> None:
        """Lets the process begin with a row, whose outcome `run` takes later."""
        self.begun = (row.name, self.log.stat().st_size if self.log.exists() else 0)
        process = self.process = self.process or self._start()
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # its log says more
            process.stdin.write(json.dumps(self.settings | {"row": asdict(row)}).encode() + b"\n")

    def run(self, row: Row, seconds: float) -> Outcome:
        """The outcome of a row; after `seconds` the process is killed."""
        if self.begun is None or self.begun[0] != row.name:
            self.begin(row)
        assert self.begun is not None
        (_, size), self.begun = self.begun, None
        outcome = self._answer(seconds)
        if outcome["state"] != State.DONE:
            outcome["log"] = self.log.read_bytes()[size:].decode(errors="replace")[-_TAIL:]
        return outcome

    def _answer(self, seconds: float) -> Outcome:
        assert self.process is not None and self.process.stdout is not None
        (out, process), ends_at = (self.process.stdout, self.process), time.monotonic() + seconds
        found: dict[str, Any] = {}
        while ready := select.select([out], [], [], max(0, ends_at - time.monotonic()))[0]:
            if not (line := out.readline()):
                break
            if "state" in (said := json.loads(line)):
                return said
            found |= said
        self.close()
        partly = {"found": found} if found else {}
        if not ready:
            return partly | {"state": State.ENDED, "why": f"took longer than {seconds:.0f} s"}
        why = f"its process ended with exit code {process.returncode}"
        return partly | {"state": State.FAILED, "why": why}

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log.open("a") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tools.gpu.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self.environment,
                bufsize=0,  # a line that waits in a buffer would not be ready
                start_new_session=True,  # with its loader and compiler processes it is one group
            )

    def close(self) -> None:
        """Ends the process and all that it has started."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = self.begun = None


def main() -> int:
    """The process itself: answers until its standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(found: Any) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    for line in sys.stdin:
        asked = json.loads(line)
        row = Row(**asked.pop("row"))
        sys.stderr.write(f"--- {row.name}\n")
        say(_outcome(row, say, asked))
        if not _frees_device():
            return 1
    return 0


def _outcome(row: Row, report: Callable[[Any], None], settings: dict[str, Any]) -> Outcome:
    try:
        found = resolve_name(_FUNCTIONS[row.kind])(row, report=report, **settings)
        return {"state": State.DONE} | found
    except (Exception, SystemExit) as error:  # noqa: BLE001  # any error is the row's result
        traceback.print_exc()
        return {"state": State.FAILED, "why": f"{type(error).__name__}: {error}"}


def _frees_device() -> bool:
    """Frees what the row has left; False after an error that the device does not forget."""
    gc.collect()
    try:
        import torch

        if torch.distributed.is_initialized():  # each row makes communicators of its own
            torch.distributed.destroy_process_group()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    except (ImportError, RuntimeError):
        traceback.print_exc()
        return False
    return True


if __name__ == "__main__":
    sys.exit(with_streams(main))
