"""Measures on a GPU by one command: installs wheels, tests, measures, writes a page.

1. install   wheels of a wheelhouse, without the network; torch stays the machine's
2. imports   the modules that the rows need, and a description of the machine; also the smoke test
3. rows      of the plan; after each of them OUTPUT/<device>.json and the page OUTPUT/<device>.md

This program itself imports nothing but the standard library.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dit.command_line import OptionParser
from dit.safe_writing import write_atomically
from dit.streams import with_streams
from tools.gpu.page import page
from tools.gpu.plan import IMPORTS, NAMES, SMOKE, Outcome, Row, State, chosen
from tools.gpu.wheelhouse import install
from tools.gpu.worker import Worker, environment


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    ends_at = time.monotonic() + options.limit
    try:
        chosen(options.parts, done=())  # a wrong name is said before anything is installed
        workers = _start(options)
    except (ValueError, OSError) as error:
        _say(f"error: {error}")
        return 1
    try:
        return _measure(options, workers, ends_at)
    finally:
        for worker in workers:
            worker.close()


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="python -m tools.gpu",
        description=(__doc__ or "").splitlines()[0],
        epilog=f"parts: {' '.join(NAMES)}",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--wheelhouse", type=Path, help="folder of wheels; without it, what is installed is used")
    add("--site", type=Path, default=Path("runs/gpu/site"), help="they go here (%(default)s)")
    add("--limit", type=float, default=float("inf"), help="seconds for all of it (none)")
    add("--parts", default="", help="names of rows, or `missing` for those not done (all)")
    add("--size", choices=("full", "tiny"), default="full", help="tiny is a trial (%(default)s)")
    add("--keys", default="", help="KEY=VALUE ... for all configurations")
    add("--output", type=Path, default=Path("docs/benchmarks"), help="folder (%(default)s)")
    return parser


def _start(options: argparse.Namespace) -> list[Worker]:
    """Installs the wheels, if any, and returns the worker that measures and the one that tests.

    Raises:
        ValueError: this Python has no torch, or the wheels cannot be installed.
    """
    if find_spec("torch") is None:
        raise ValueError(
            f"{sys.executable} has no torch; name a Python that has it: make gpu"
            " PYTHON=/path/to/python"
        )
    if options.wheelhouse:
        began = time.monotonic()
        count = install(options.wheelhouse, options.site)
        _say(f"{count} wheels in {options.site} ({time.monotonic() - began:.0f} s)")
    options.output.mkdir(parents=True, exist_ok=True)
    place = environment(options.site.resolve() if options.wheelhouse else None)
    settings = [options.size, *options.keys.split()]
    logs = [(options.output / f"{name}.log").resolve() for name in ("measuring", "tests")]
    return [Worker(environment=place, log=log, settings=settings) for log in logs]


def _measure(options: argparse.Namespace, workers: list[Worker], ends_at: float) -> int:
    worker, tests = workers
    if SMOKE in chosen(options.parts, done=()):
        tests.begin(SMOKE)
    ((_, imports),) = run_rows([IMPORTS], run=worker.outcome, ends_at=ends_at)
    _show(IMPORTS, imports)
    if not (about := imports.pop("found", None)):
        return 1  # torch itself cannot be imported
    name = re.sub(r"\W+", "_", about["device"]).lower()  # NVIDIA H200 -> nvidia_h200
    results = Results(options.output / f"{name}.json", about=about)
    results.put(IMPORTS.name, imports)
    rows = chosen(options.parts, done=results.names(State.DONE))
    if SMOKE not in rows:
        tests.close()  # done in an earlier run
    of_kind, left_out = {SMOKE.kind: tests}, []
    outcomes = run_rows(
        rows, run=lambda row, s: of_kind.get(row.kind, worker).outcome(row, s), ends_at=ends_at
    )
    for row, outcome in outcomes:
        results.put(row.name, outcome)
        results.file.with_suffix(".md").write_text(page(results.content))
        _show(row, outcome)
        if outcome["state"] == State.NOT_BEGUN:
            left_out.append(row.name)
    _say(f"written: {results.file} and {results.file.with_suffix('.md').name}; log: {worker.log}")
    if left_out:
        _say(f'not begun; go on with: make gpu ... PARTS="{" ".join(left_out)}"')
    return 1 if results.names(State.FAILED, State.ENDED) else 0


class Results:
    """The results of all runs on one machine, in a file that is written after each row."""

    def __init__(self, file: Path, *, about: dict[str, Any]):
        self.file = file
        known = json.loads(file.read_text()) if file.is_file() else {}
        self.rows: dict[str, Outcome] = known.get("rows", {})
        self.content = {"about": known.get("about", {}) | about, "rows": self.rows}

    def put(self, row: str, outcome: Outcome) -> None:
        """Stores the outcome of `row`; one that did not begin replaces no earlier result."""
        if outcome["state"] == State.NOT_BEGUN and row in self.rows:
            return
        self.rows[row] = outcome
        write_atomically(self.file, json.dumps(self.content, indent=1).encode() + b"\n")

    def names(self, *states: State) -> list[str]:
        return [name for name, one in self.rows.items() if one["state"] in states]


def run_rows(
    rows: Iterable[Row],
    *,
    run: Callable[[Row, float], Outcome],
    ends_at: float,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[Row, Outcome]]:
    """Yields each of `rows` with its outcome, and runs those that fit before the time `ends_at`.

    `run` gets a row and the seconds that it may take; an exception that it raises is the row's
    outcome. `clock` returns the present time in seconds. After a smoke test that fails, no row
    begins.
    """
    stop = ""
    for row in rows:
        left = max(ends_at - (began := clock()), 0)
        if stop or left < row.expected_s:
            why = stop or f"{left:.0f} s were left, and it takes about {row.expected_s:.0f}"
            yield row, {"state": State.NOT_BEGUN, "why": why}
            continue
        try:
            outcome = run(row, min(3 * row.expected_s + 60, left))
        except Exception as error:  # noqa: BLE001  # the other rows go on
            outcome = {"state": State.FAILED, "why": f"{type(error).__name__}: {error}"}
        yield row, outcome | {"took_s": round(clock() - began, 1)}
        if row is SMOKE and outcome["state"] == State.FAILED:
            stop = "a kernel gives wrong numbers, or none: read the smoke test first"


def _show(row: Row, outcome: Outcome) -> None:
    """Prints one line about the outcome of a row, and the end of its log if it failed."""
    took, note, found = outcome.get("took_s", 0), outcome.get("why", ""), outcome.get("found", {})
    if "mfu" in found:
        mfu = ", ".join(f"{value:.1%} ({kind})" for kind, value in found["mfu"].items())
        step = f"step {found['step_time_s']['median']:.4g} s"
        note = f"{step}, attention by {found['attention_backend']}, MFU {mfu}"
    _say(f"{took:7.1f} s  {row.name:24} {outcome['state']:10} {note}".rstrip())
    for line in outcome.get("log", "").splitlines()[-25:]:
        _say(f"    | {line}")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(with_streams(main))
