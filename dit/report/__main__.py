"""Runs the command line of the report: `python -m dit.report`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dit.command_line import OptionParser
from dit.console import Console, hide_library_warnings
from dit.report.page import write_page
from dit.report.reading import ReportError, read_runs
from dit.streams import with_streams


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the page that the command line `argv` asks for, or serves it with --watch.

    Returns exit code 0, or 1 after an error, which the last line explains. Ctrl-C while a page is
    written returns 130; with --watch it ends the server, and 0 is returned.
    """
    args = _parser().parse_args(argv)
    hide_library_warnings()
    output: Path = args.output or args.run_dir[0] / "report.html"
    if args.watch:
        return _watch(args)
    try:
        write_page(read_runs(args.run_dir), output=output, samples=args.samples_dir)
    except ReportError as error:
        _say(f"error: {error}", failed=True)
        return 1
    except KeyboardInterrupt:
        _say("interrupted: no page was written", failed=True)
        return 130
    _say(f"report  {output.resolve()}")
    return 0


def _watch(args: argparse.Namespace) -> int:
    """Serves the page until Ctrl-C; returns exit code 0, or 1 if the address cannot be served."""
    from dit.report.server import ReportServer

    try:
        server = ReportServer(args.host, args.port, args.run_dir, args.samples_dir)
    except ValueError as error:
        _say(f"error: {error}", failed=True)
        return 1
    server.serve("report", risk="everybody who reaches this machine can read the report")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = OptionParser(
        prog="python -m dit.report",
        description="Writes one HTML page about one training run, or several side by side.",
    )
    parser.add_argument(
        "run_dir", type=Path, nargs="+", help="folder of a run (checkpoint.save): metrics.jsonl"
    )
    parser.add_argument(
        "--output", type=Path, help="the page, FILE.html (default: report.html in the first run)"
    )
    parser.add_argument(
        "--samples_dir",
        type=Path,
        action="append",
        default=[],
        help="folder of generate_dit (samples.json), to show on the page; repeatable",
    )
    parser.add_argument(
        "--watch", action="store_true", help="serve the page, and update it while runs train"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address of --watch; by default only this machine reaches it (%(default)s)",
    )
    parser.add_argument(
        "--port", type=int, default=8471, help="port of --watch; 0 takes any free one (%(default)s)"
    )
    return parser


def _say(line: str, *, failed: bool = False) -> None:
    Console(stderr=failed).print(line)


if __name__ == "__main__":
    sys.exit(with_streams(main))
