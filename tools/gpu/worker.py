"""Runs rows one after the other in one process, so that torch and the device start once.

A line on the standard input of the process is the name of a row. Lines of JSON on its standard
output are the results of the row as it finds them; the last line says how the row ended (`state`),
and whether the process can be used for another row (`again`). What the row prints goes to the
standard error. A row that ends the process, or leaves the device unusable, loses only its own later
results: the next row gets a new process. So does the row after tests, because their modules and
settings would stay.
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
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from dit.streams import with_streams
from tools.gpu.plan import IMPORTS, PLAN, ROOT, SMOKE, Outcome, Row, State

_HEADING = "--- {}\n"
"""The line of the log that precedes what a row prints."""


def environment(site: Path | None) -> dict[str, str]:
    """Environment variables for a row: PYTHONPATH has the checkout first, then the wheels `site`.

    They also set the allocator, because CUDA reads that once, at the start of a process.
    """
    places = [ROOT, ROOT / "benchmarks", site, os.environ.get("PYTHONPATH")]
    path = os.pathsep.join(str(place) for place in places if place)
    set_here = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    set_here["PYTHONWARNINGS"] = "ignore"  # the log is for errors
    if not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & {*os.environ}:
        set_here["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return os.environ | set_here


class Worker:
    """Starts and controls a process that runs rows with `settings`; `log` gets its output."""

    def __init__(self, *, environment: dict[str, str], log: Path, settings: Sequence[str]):
        self.environment, self.log, self.settings = environment, log, settings
        self.process: subprocess.Popen[bytes] | None = None
        self.begun: Row | None = None
        log.unlink(missing_ok=True)

    def begin(self, row: Row) -> None:
        """Starts a row, and the process if there is none; `outcome` waits for the result."""
        if self.process is None:
            with self.log.open("a") as log:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "tools.gpu.worker", *self.settings],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=self.environment,
                    bufsize=0,  # a line that waits in a buffer would not be ready
                    start_new_session=True,  # with its loaders and compilers it is one group
                )
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # its log says more
            self.process.stdin.write(f"{row.name}\n".encode())
        self.begun = row

    def outcome(self, row: Row, seconds: float) -> Outcome:
        """Waits for the end of `row` and returns its results; starts it first if it was not begun.

        The process is killed after `seconds` seconds.
        """
        if self.begun != row:
            self.begin(row)
        assert self.process is not None and self.process.stdout is not None
        self.begun = None
        out, ends_at = self.process.stdout, time.monotonic() + seconds
        found, said = dict[str, Any](), dict[str, Any]()
        while "state" not in said:
            found |= said
            if not select.select([out], [], [], max(0, ends_at - time.monotonic()))[0]:
                said = {"state": State.ENDED, "why": f"took longer than {seconds:.0f} s"}
                self.close()
            elif line := out.readline():
                said = json.loads(line)
            else:
                why = f"its process ended with exit code {self.close()}"
                said = {"state": State.FAILED, "why": why}
        if not said.pop("again", True):
            self.close()
        if said["state"] != State.DONE:
            printed = self.log.read_bytes().decode(errors="replace")
            said["log"] = printed.rpartition(_HEADING.format(row.name))[2][-3000:]
        return said | {"found": found}

    def close(self) -> int | None:
        """Kills the process and its children; returns its exit code, or None if there is none."""
        if (process := self.process) is None:
            return None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        self.process = None
        return process.wait()


def main() -> int:
    """Runs the rows that the standard input names in this process; returns 0 at its end."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    _, size, *keys = sys.argv
    rows = {row.name: row for row in (IMPORTS, *PLAN)}

    def say(found: Any) -> None:
        answers.write(json.dumps(found) + "\n")

    for line in sys.stdin:
        row = rows[line.strip()]
        sys.stderr.write(_HEADING.format(row.name))
        said = _end(row, report=say, size=size, keys=keys)
        say(said | {"again": row.kind != SMOKE.kind and _frees_device()})
    return 0


def _end(row: Row, **settings: Any) -> Outcome:
    """Runs a row, and returns its outcome without results, which the row reports itself."""
    try:
        why = resolve_name(f"tools.gpu.{row.kind}")(row, **settings)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # any error is the row's result
        traceback.print_exc()
        why = f"{type(error).__name__}: {error}"
    return {"state": State.FAILED, "why": why} if why else {"state": State.DONE}


def _frees_device() -> bool:
    """Frees the device memory of a row; returns whether the process can still use the device."""
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
