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
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gpu_run.install import ROOT, environment, install, machine_torch
from gpu_run.page import page
from gpu_run.parts import IMPORTS, NAMES, SIZES, Part, chosen
from gpu_run.schedule import Outcome, Results, State, run_parts
from gpu_run.worker import Worker

sys.path.append(str(ROOT))  # of this checkout; the modules import the standard library alone
from dit.command_line import OptionParser
from dit.streams import with_streams


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    ends_at = time.monotonic() + options.limit
    try:
        chosen(options.parts, done=())  # a wrong name is said before anything is installed
        worker = _start(options)
    except (ValueError, OSError) as error:
        _say(f"error: {error}")
        return 1
    try:
        return _measure(options, worker, ends_at)
    finally:
        worker.close()


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        description=(__doc__ or "").splitlines()[0],
        epilog=f"parts: {' '.join(NAMES)}",
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


def _start(options: argparse.Namespace) -> Worker:
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
    return Worker(environment=environment(site), log=log, settings=settings)


def _measure(options: argparse.Namespace, worker: Worker, ends_at: float) -> int:
    began = time.monotonic()
    imports = worker.run(IMPORTS, min(IMPORTS.limit_s, ends_at - began))
    imports["took_s"] = round(time.monotonic() - began, 1)
    _show(IMPORTS, imports)
    if not imports.get("about"):
        return 1  # torch itself cannot be imported, or is another one
    about = imports.pop("about")
    name = re.sub(r"\W+", "_", about["device"]).lower()  # NVIDIA H200 -> nvidia_h200
    results = Results(options.output / f"{name}.json", about=about)

    def keep(part: Part, outcome: Outcome) -> None:
        results.put(part.name, outcome)
        results.file.with_suffix(".md").write_text(page(results.content))
        _show(part, outcome)

    parts = chosen(options.parts, done=results.done())
    results.put(IMPORTS.name, imports)
    left_out = run_parts(parts, run=worker.run, keep=keep, ends_at=ends_at)
    _say(f"written: {results.file} and {results.file.with_suffix('.md').name}; log: {worker.log}")
    if left_out:
        _say(f'not begun; go on with: make gpu ... PARTS="{" ".join(left_out)}"')
    bad = [one for one in results.parts.values() if one["state"] in (State.FAILED, State.ENDED)]
    return 1 if bad else 0


def _show(part: Part, outcome: Outcome) -> None:
    """One line for a part; with an error the end of what it printed."""
    took, note = f"{outcome.get('took_s', 0):7.1f} s", outcome.get("why", "")
    if part.kind == "steps" and (found := outcome.get("found")):
        mfu = ", ".join(f"{value:.1%} ({kind})" for kind, value in found["mfu"].items())
        note = f"step {found['step_time_s']['median']:.4g} s, MFU {mfu}"
    _say(f"{took}  {part.name:24} {outcome['state']:10} {note}".rstrip())
    for line in outcome.get("log", "").splitlines()[-25:]:
        _say(f"    | {line}")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(with_streams(main))
