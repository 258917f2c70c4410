"""Command lines: options that are paths, words that no option takes, and commands to type next."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dit.local_path import local_path


class PathParser(argparse.ArgumentParser):
    """The parser of every command: its options of type `Path` are read by `local_path`."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.register("type", Path, local_path)


def not_an_option(words: Sequence[str], options: Iterable[str]) -> str:
    """About the first of `words`, which argparse has left over; names the option most like it."""
    if not words[0].startswith("-"):
        return f"{words[0]!r} belongs to no option; put quotes around names with spaces"
    name = words[0].partition("=")[0]
    near = get_close_matches(name, list(options), n=1, cutoff=0.7)
    return f"{name} is no option" + "".join(f", {option} is" for option in near)


def python() -> str:
    """What to type here for this Python: its path where `python` is another one, or none."""
    found, mine = shutil.which("python"), Path(os.path.normpath(sys.executable))
    # The Pythons of all environments are links to one file, so their folders tell them apart.
    if found and Path(found).parent == mine.parent and Path(found).samefile(mine):
        return "python"
    here = Path.cwd()
    return str(mine.relative_to(here) if mine.is_relative_to(here) else mine)
