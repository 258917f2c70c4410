"""The process in which rows run one after the other, with one start of torch and of the device.

A line of JSON on its standard input is a row. Lines on its standard output are what the row has
found so far, and the last one, with a `state`, is the outcome. What the row itself prints goes to
the standard error. A row that ends the process, or leaves the device unusable, costs its own result
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
    "bounds": "tools.gpu.steps:bounds",
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

    def run(self, row: Row, seconds: float) -> Outcome:
        """The outcome of a row; after `seconds` the process is killed."""
        size = self.log.stat().st_size if self.log.exists() else 0
        outcome = self._answer(row, time.monotonic() + seconds, seconds)
        if outcome["state"] != State.DONE:
            outcome["log"] = self.log.read_bytes()[size:].decode(errors="replace")[-_TAIL:]
        return outcome

    def _answer(self, row: Row, ends_at: float, seconds: float) -> Outcome:
        process = self.process = self.process or self._start()
        assert process.stdin is not None and process.stdout is not None
        asked = self.settings | {"row": asdict(row)}
        with suppress(BrokenPipeError):  # its log says more
            process.stdin.write(json.dumps(asked).encode() + b"\n")
        found: Outcome = {}
        while True:
            left = max(0, ends_at - time.monotonic())
            ready, _, _ = select.select([process.stdout], [], [], left)
            line = process.stdout.readline() if ready else b""
            if not line:
                break
            found |= json.loads(line)
            if "state" in found:
                return found
        self.close()
        if not ready:
            return found | {"state": State.ENDED, "why": f"took longer than {seconds:.0f} s"}
        why = f"its process ended with exit code {process.returncode}"
        return found | {"state": State.FAILED, "why": why}

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
            self.process = None


def main() -> int:
    """The process itself: answers until its standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(outcome: Outcome) -> None:
        answers.write(json.dumps(outcome) + "\n")
        answers.flush()

    for line in sys.stdin:
        asked = json.loads(line)
        row = Row(**asked.pop("row"))
        sys.stderr.write(f"--- {row.name}\n")
        say(_outcome(row, lambda found: say({"found": found}), asked))
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
