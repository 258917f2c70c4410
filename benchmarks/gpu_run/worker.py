"""The process in which parts run one after the other, with one start of torch and of the device.

A line of JSON on its standard input is a part; a line on its standard output is the outcome. What
the part itself prints goes to the standard error. A part that ends the process, or leaves the
device unusable, costs its own result alone: the next one gets a new process.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from dit.streams import with_streams
from gpu_run.parts import Part
from gpu_run.schedule import Outcome, State

_FUNCTIONS = {
    "imports": "gpu_run.checks:check_imports",
    "tests": "gpu_run.checks:run_tests",
    "bounds": "gpu_run.bounds:bounds",
    "steps": "gpu_run.steps:steps",
    "profile": "gpu_run.steps:profile",
    "padded": "gpu_run.steps:padded_loop",
}
"""Of the kinds of parts; a module that cannot be imported is an error of its part."""
_TAIL = 3000
"""Characters of the log that are kept with an error."""


class Worker:
    """The process that asks; `log` gets all that parts print."""

    def __init__(self, *, environment: dict[str, str], log: Path, settings: dict[str, Any]):
        self.environment, self.log, self.settings = environment, log, settings
        self.process: subprocess.Popen[str] | None = None

    def run(self, part: Part, seconds: float) -> Outcome:
        """The outcome of a part; after `seconds` the process is killed."""
        size = self.log.stat().st_size if self.log.exists() else 0
        outcome = self._answer(part, seconds)
        if outcome["state"] != State.DONE:
            outcome["log"] = self.log.read_bytes()[size:].decode(errors="replace")[-_TAIL:]
        return outcome

    def _answer(self, part: Part, seconds: float) -> Outcome:
        alone = part.kind == "tests"  # which neither see nor leave what parts do to a process
        if alone:
            self.close()
        process = self.process = self.process or self._start()
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):  # its log says more
            process.stdin.write(json.dumps(self.settings | {"part": asdict(part)}) + "\n")
            process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], seconds)
        line = process.stdout.readline() if ready else ""
        if alone or not line:
            self.close()
        if line:
            return json.loads(line)
        if not ready:
            return {"state": State.ENDED, "why": f"took longer than {seconds:.0f} s"}
        why = f"its process ended with exit code {process.returncode}"
        return {"state": State.FAILED, "why": why}

    def _start(self) -> subprocess.Popen[str]:
        with self.log.open("a") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "gpu_run.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self.environment,
                text=True,
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
    for line in sys.stdin:
        asked = json.loads(line)
        part = Part(**asked.pop("part"))
        sys.stderr.write(f"--- {part.name}\n")
        answers.write(json.dumps(_outcome(part, asked)) + "\n")
        answers.flush()
        if not _frees_device():
            return 1
    return 0


def _outcome(part: Part, settings: dict[str, Any]) -> Outcome:
    try:
        return {"state": State.DONE} | resolve_name(_FUNCTIONS[part.kind])(part, **settings)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # any error is the part's result
        traceback.print_exc()
        return {"state": State.FAILED, "why": f"{type(error).__name__}: {error}"}


def _frees_device() -> bool:
    """Frees what the part has left; False after an error that the device does not forget."""
    gc.collect()
    try:
        import torch

        if torch.distributed.is_initialized():  # each part makes communicators of its own
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
