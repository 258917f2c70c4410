"""One command on the first GPU: installs wheels, tests, measures, writes a page and a JSON file.

1. install   wheels of a wheelhouse, without the network; torch stays the machine's
2. imports   everything that the parts need, and what this machine is
3. parts     measurements in the order of their worth, each with its limit
4. results   after each part: OUTPUT/<device>.json and the page OUTPUT/<device>.md

    make gpu WHEELHOUSE=runs/wheelhouse LIMIT=540

A part that fails is recorded with its error, and the others go on; one that does not fit into the
time is not begun, and is named with the command that goes on. This program itself imports nothing
but the standard library.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from gpu_run.gpu_tests import run_tests
from gpu_run.install import (
    ROOT,
    environment,
    install,
    machine_torch,
)
from gpu_run.page import page
from gpu_run.parts import IMPORTS, SIZES, Part, chosen, known_names
from gpu_run.schedule import Outcome, Results, State, run_parts
from gpu_run.worker import Worker

sys.path.append(str(ROOT))  # of this checkout; the module imports the standard library alone
from dit.command_line import OptionParser


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    ends_at = time.monotonic() + options.limit
    try:
        chosen(options.parts, done=())  # a wrong name is said before anything is installed
        started = _start(options)
    except (ValueError, OSError) as error:
        _say(f"error: {error}")
        return 1
    try:
        return _measure(options, started, ends_at)
    finally:
        started.worker.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """What all parts share."""

    environment: dict[str, str]
    log: Path
    worker: Worker


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        description=(__doc__ or "").splitlines()[0],
        epilog=f"parts: {' '.join(known_names())}",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--wheelhouse", type=Path, help="folder of wheels; without it, what is installed is used")
    add("--site", type=Path, default=Path("runs/gpu/site"), help="they go here (%(default)s)")
    add("--limit", type=float, default=float("inf"), help="seconds for all of it (none)")
    add("--parts", default="", help="names, or `missing` for those that are not done (all)")
    add("--size", choices=SIZES, default=SIZES[0], help="tiny is a trial (%(default)s)")
    add("--keys", default="", help="KEY=VALUE ... for all configurations")
    add("--output", type=Path, default=Path("docs/benchmarks"), help="folder (%(default)s)")
    return parser


def _start(options: argparse.Namespace) -> Started:
    torch_file, torch_version = machine_torch()
    _say(f"torch {torch_version} of {torch_file}")
    if options.wheelhouse:
        began = time.monotonic()
        count = install(options.wheelhouse, options.site)
        _say(f"{count} wheels in {options.site} ({time.monotonic() - began:.0f} s)")
    options.output.mkdir(parents=True, exist_ok=True)
    site = options.site.resolve() if options.wheelhouse else None
    log = (options.output / "first_gpu.log").resolve()
    log.unlink(missing_ok=True)
    settings = {"size": options.size, "keys": options.keys.split(), "torch_file": torch_file}
    variables = environment(site)
    worker = Worker(environment=variables, log=log, settings=settings)
    return Started(environment=variables, log=log, worker=worker)


def _measure(options: argparse.Namespace, started: Started, ends_at: float) -> int:
    began = time.monotonic()
    limit_s = min(IMPORTS.limit_s, ends_at - began)
    imports = started.worker.run(IMPORTS, limit_s)
    imports["took_s"] = round(time.monotonic() - began, 1)
    _show(IMPORTS, imports)
    if not imports.get("about"):
        return 1  # torch itself cannot be imported, or is another one
    about = imports.pop("about") | _about(options)
    results = Results(options.output / f"{_file_name(about['device'])}.json", about=about)

    def keep(part: Part, outcome: Outcome) -> None:
        results.put(part.name, outcome)
        results.file.with_suffix(".md").write_text(page(results.content()))
        _show(part, outcome)

    def run(part: Part, seconds: float) -> Outcome:
        if part.kind == "tests":
            return run_tests(seconds, environment=started.environment, log=started.log)
        return started.worker.run(part, seconds)

    parts = chosen(options.parts, done=results.done())
    results.put(IMPORTS.name, imports)
    left_out = run_parts(parts, run=run, keep=keep, ends_at=ends_at)
    _say(f"written: {results.file} and {results.file.with_suffix('.md').name}; log: {started.log}")
    if left_out:
        _say(f'not begun; go on with: make gpu ... PARTS="{" ".join(left_out)}"')
    bad = [one for one in results.parts.values() if one["state"] in (State.FAILED, State.ENDED)]
    return 1 if bad else 0


def _about(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "date": date.today().isoformat(),
        "commit": _commit(),
        "size": options.size,
        "keys": options.keys.split(),
    }


def _commit() -> str | None:
    """None where there is no git, or no repository."""
    try:
        asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        done = subprocess.run(asked, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def _file_name(device: str) -> str:
    """NVIDIA H200 -> nvidia_h200."""
    return re.sub(r"\W+", "_", device).strip("_").lower()


def _show(part: Part, outcome: Outcome) -> None:
    """One line for a part; with an error the end of what it printed."""
    took = f"{outcome.get('took_s', 0):7.1f} s"
    found = outcome.get("found", {})
    notes = [str(outcome.get("why", ""))]
    if part.kind == "steps" and found:
        mfu = ", ".join(f"{value:.1%} ({kind})" for kind, value in found["mfu"].items())
        notes = [f"step {found['step_time_s']['median']:.4g} s, MFU {mfu}"]
    _say(f"{took}  {part.name:24} {outcome['state']:10} {notes[0]}".rstrip())
    if outcome["state"] in (State.FAILED, State.ENDED) and outcome.get("log"):
        _say("\n".join(f"    | {line}" for line in outcome["log"].splitlines()[-25:]))


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
