"""Command lines: how options are spelled and read, words that no option takes, commands to type."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dit.local_path import local_path


class OptionParser(argparse.ArgumentParser):
    """The parser of every command.

    Dashes and underscores are the same in the names of its options; those of type `Path` are read
    by `local_path`.
    """

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.register("type", Path, local_path)

    def spelled(self, word: str) -> str:
        """A word of a command line, whose option is spelled as the parser has it."""
        name, equals, value = word.partition("=")
        if not name.startswith("--") or name in self._option_string_actions:
            return word
        return next((known + equals + value for known in self._like(name)), word)

    def _like(self, name: str) -> list[str]:
        """As many letters of each option that begins alike; the shortest one first."""
        alike = [
            option
            for option in sorted(self._option_string_actions, key=len)
            if len(name) > 2 and _in_dashes(option).startswith(_in_dashes(name))
        ]
        return [option[: len(name)] for option in alike]

    def _parse_optional(self, arg_string: str) -> Any:
        return super()._parse_optional(self.spelled(arg_string))


def _in_dashes(name: str) -> str:
    return name.replace("_", "-")


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


def recipe_command(name: str, *words: str) -> str:
    """What to type here to start a script of `recipes/`: of a checkout, else the installed one."""
    in_checkout = Path(f"recipes/{name}.py").is_file() or find_spec("recipes") is None
    script = [f"recipes/{name}.py"] if in_checkout else ["-m", f"recipes.{name}"]
    return shlex.join([python(), *script, *words])
