"""One command on a GPU: installs wheels, tests, measures, writes a page and a JSON file.

1. install   wheels of a wheelhouse, without the network; torch stays the machine's
2. imports   everything that the rows need, and what this machine is; beside it the smoke test
3. rows      of the plan in the order of their worth, each with its limit
4. results   after each row: OUTPUT/<device>.json and the page OUTPUT/<device>.md

A row that fails is recorded with its error, and the others go on; one that does not fit into the
time is not begun, and is named with the command that goes on. This program itself imports nothing
but the standard library.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from dit.command_line import OptionParser
from dit.streams import with_streams
from tools.gpu.install import environment, install
from tools.gpu.page import page
from tools.gpu.plan import IMPORTS, NAMES, SMOKE, Row, chosen
from tools.gpu.results import Outcome, Results, State, run_rows
from tools.gpu.worker import Worker


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
    """The process that measures, and the one of tests, which neither see nor leave what it has."""
    if find_spec("torch") is None:
        raise ValueError(
            f"{sys.executable} has no torch; name the Python that has: make gpu PYTHON="
        )
    if options.wheelhouse:
        began = time.monotonic()
        count = install(options.wheelhouse, options.site)
        _say(f"{count} wheels in {options.site} ({time.monotonic() - began:.0f} s)")
    options.output.mkdir(parents=True, exist_ok=True)
    place = environment(options.site.resolve() if options.wheelhouse else None)
    settings = {"size": options.size, "keys": options.keys.split()}
    logs = [(options.output / f"{name}.log").resolve() for name in ("measuring", "tests")]
    for log in logs:
        log.unlink(missing_ok=True)
    return [Worker(environment=place, log=log, settings=settings) for log in logs]


def _measure(options: argparse.Namespace, workers: list[Worker], ends_at: float) -> int:
    (worker, tests), began = workers, time.monotonic()
    if SMOKE in chosen(options.parts, done=()):
        tests.begin(SMOKE)
    imports = worker.run(IMPORTS, min(IMPORTS.limit_s, ends_at - began))
    imports["took_s"] = round(time.monotonic() - began, 1)
    _show(IMPORTS, imports)
    if not imports.get("about"):
        return 1  # torch itself cannot be imported
    about = imports.pop("about")
    name = re.sub(r"\W+", "_", about["device"]).lower()  # NVIDIA H200 -> nvidia_h200
    results = Results(options.output / f"{name}.json", about=about)

    def run(row: Row, seconds: float) -> Outcome:
        if row.kind != "tests":
            return worker.run(row, seconds)
        outcome = tests.run(row, seconds)
        tests.close()
        return outcome

    def keep(row: Row, outcome: Outcome) -> None:
        results.put(row.name, outcome)
        results.file.with_suffix(".md").write_text(page(results.content))
        _show(row, outcome)

    rows = chosen(options.parts, done=results.names(State.DONE))
    results.put(IMPORTS.name, imports)
    left_out = run_rows(rows, run=run, keep=keep, ends_at=ends_at)
    _say(f"written: {results.file} and {results.file.with_suffix('.md').name}; log: {worker.log}")
    if left_out:
        _say(f'not begun; go on with: make gpu ... PARTS="{" ".join(left_out)}"')
    return 1 if results.names(State.FAILED, State.ENDED) else 0


def _show(row: Row, outcome: Outcome) -> None:
    """One line for a row; with an error the end of what it printed."""
    took, note = f"{outcome.get('took_s', 0):7.1f} s", outcome.get("why", "")
    if row.kind == "steps" and (found := outcome.get("found")):
        mfu = ", ".join(f"{value:.1%} ({kind})" for kind, value in found["mfu"].items())
        step = f"step {found['step_time_s']['median']:.4g} s"
        note = f"{step}, attention by {found['attention_backend']}, MFU {mfu}"
    _say(f"{took}  {row.name:24} {outcome['state']:10} {note}".rstrip())
    for line in outcome.get("log", "").splitlines()[-25:]:
        _say(f"    | {line}")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(with_streams(main))
