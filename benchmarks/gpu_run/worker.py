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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from gpu_run.parts import Part
from gpu_run.schedule import Outcome, State

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
        process = self.process = self.process or self._start()
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):  # its log says more
            process.stdin.write(json.dumps(self.settings | {"part": asdict(part)}) + "\n")
            process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], seconds)
        line = process.stdout.readline() if ready else ""
        if line:
            return json.loads(line)
        self.close()
        printed = {"log": tail(self.log, after=size)}
        if not ready:
            return {"state": State.ENDED, "why": f"took longer than {seconds:.0f} s"} | printed
        why = f"its process ended with exit code {process.returncode}"
        return {"state": State.FAILED, "why": why} | printed

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
            kill_group(self.process)
            self.process = None


def kill_group(process: subprocess.Popen[str]) -> None:
    """Kills a process that leads a session, with all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def tail(log: Path, *, after: int = 0) -> str:
    """The end of what was written to the log behind byte `after`."""
    return log.read_bytes()[after:].decode(errors="replace")[-_TAIL:]


def main() -> int:
    """The process itself: answers until its standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        part = Part(**asked.pop("part"))
        sys.stderr.write(f"--- {part.name}\n")
        _answer(answers, _outcome(part, asked))
        if not _frees_device():
            return 1
    return 0


def _answer(answers: IO[str], outcome: Outcome) -> None:
    answers.write(json.dumps(outcome) + "\n")
    answers.flush()


def _outcome(part: Part, settings: dict[str, Any]) -> Outcome:
    try:
        return {"state": State.DONE} | _function(part.kind)(part, **settings)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # any error is the part's result
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}"
        return {"state": State.FAILED, "why": text, "log": traceback.format_exc()[-_TAIL:]}


def _function(kind: str) -> Callable[..., Outcome]:
    """Imported late: a module that cannot be imported is an error of its part."""
    if kind == "imports":
        from gpu_run.imports import check_imports

        return check_imports
    if kind == "bounds":
        from gpu_run.bounds import bounds

        return bounds
    from gpu_run import steps

    return {"steps": steps.steps, "profile": steps.profile, "padded": steps.padded_loop}[kind]


def _frees_device() -> bool:
    """Frees what the part has left; False after an error that the device does not forget."""
    torch = sys.modules.get("torch")
    gc.collect()
    if torch is None:
        return True
    try:
        if torch.distributed.is_initialized():  # each part makes communicators of its own
            torch.distributed.destroy_process_group()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    except RuntimeError:
        traceback.print_exc()
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
