"""Runs the command `inspect`: reads a dataset back, and prints what is wrong with it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from data_prep.cli.terminal import show_inspection, show_words
from data_prep.inspect.dataset_page import duplicates_in, write_inspection
from data_prep.inspect.duplicates import ComparedBy
from data_prep.inspect.read_shards import (
    check_encoders,
    exact_codec,
    inspect_shard,
    shard_counts,
    words_of,
)
from data_prep.planning.statistics import crop_line_of
from data_prep.refusals import PrepError
from dit.console import Console
from dit.progress import progress_on
from dit.streams import result
from dit.system_errors import reason


def run_inspect(args: argparse.Namespace) -> int:
    if args.html is not None:  # before all bytes are read, which may take hours
        _check_page(args.html)
    with result():
        return inspect_folder(args.folder, args.html)


def _check_page(page: Path) -> None:
    """Creates the folder in which the HTML file `page` will be written.

    Raises:
        PrepError: `page` cannot be written.
    """
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        why = "it is a folder" if page.is_dir() else ""
        why = why or ("" if os.access(page.parent, os.W_OK) else f"{page.parent} is read-only")
    except OSError as error:
        why = reason(error)
    if why:
        raise PrepError(f"--html {page} cannot be written ({why}); give another FILE.html")


def inspect_folder(folder: Path, page: Path | None = None) -> int:
    counts = shard_counts(folder)
    exact = exact_codec(folder)
    reports = [inspect_shard(folder, name, expected=n, exact=exact) for name, n in counts.items()]
    duplicates = duplicates_in(reports, ComparedBy.PIXELS if exact else ComparedBy.LATENTS)
    show_inspection(Console(), folder, reports)
    show_words(Console(), words_of(folder))
    for line in filter(None, (*duplicates.lines, crop_line_of(folder))):
        Console().print(line)
    damage = [problem for report in reports for problem in report.problems]
    problems = [*check_encoders(folder), *damage]
    for problem in problems:
        Console(stderr=True).print(f"error: {problem}")
    if damage:
        remedy = "pack or convert the data again with --overwrite"
        Console(stderr=True).print(f"error: shards of {folder} are damaged; {remedy}")
    if page is not None:
        track = progress_on(Console(stderr=True))
        write_inspection(folder, page, reports, duplicates, track=track)
        Console().print(f"decoded pictures: {page}")
    return 1 if problems else 0
