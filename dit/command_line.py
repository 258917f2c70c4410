"""Command lines: spelling and parsing of options, unknown words, commands for users to type.

The options of a command are the fields of dataclasses, each with its help text below it.
`add_options` adds them to a parser, and `chosen` makes an instance from the parsed options.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, field, fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from dit.local_path import local_path
from dit.streams import result

K = TypeVar("K")


class OptionParser(argparse.ArgumentParser):
    """The parser of every command.

    Dashes and underscores are equivalent in names of options; values of type `Path` are read by
    `local_path`. `--help` shows the options whose fields `first` names, or all if it names none;
    `--help=all` shows all.
    """

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.register("type", Path, local_path)
        self.first: tuple[str, ...] = ()
        if self.add_help:
            self.add_argument("--help=all", action=_HelpOfAll, nargs=0, help=argparse.SUPPRESS)

    def format_help(self) -> str:
        """The text of `--help`: the options in `first`, or all."""
        every = self._option_string_actions.get("--help=all")
        named = [action for action in self._actions if action.help != argparse.SUPPRESS]
        rest = [a for a in named if a.option_strings and a.dest not in (*self.first, "help")]
        if every is None or not self.first or not rest:
            return super().format_help()
        shown = {every: f"show all options: {len(rest)} more"}
        groups = {group: group.description for group in self._action_groups}
        texts = {action: action.help for action in (*rest, every)}
        try:
            for action in texts:
                action.help = shown.get(action, argparse.SUPPRESS)
            for group in groups:
                group.description = None
            return super().format_help()
        finally:
            for action, text in texts.items():
                action.help = text
            for group, text in groups.items():
                group.description = text

    def format_all(self) -> str:
        """The text of `--help=all`, with all options."""
        return super().format_help()

    def spelled(self, word: str) -> str:
        """`word` with the name of its option as the parser spells it."""
        name, equals, value = word.partition("=")
        if not name.startswith("--") or name in self._option_string_actions:
            return word
        return next((known + equals + value for known in self._like(name)), word)

    def _like(self, name: str) -> list[str]:
        """Options that begin like `name`, each cut to the length of `name`; the shortest first."""
        alike = [
            option
            for option in sorted(self._option_string_actions, key=len)
            if len(name) > 2 and _in_dashes(option).startswith(_in_dashes(name))
        ]
        return [option[: len(name)] for option in alike]

    def _print_message(self, message: str, file: Any = None) -> None:
        """Prints help or usage; reports if it cannot be written, which argparse would ignore."""
        with result():
            super()._print_message(message, file)

    def _parse_optional(self, arg_string: str) -> Any:
        return super()._parse_optional(self.spelled(arg_string))


class _HelpOfAll(argparse.Action):
    """Prints the help of all options and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        assert isinstance(parser, OptionParser)
        parser._print_message(parser.format_all(), sys.stdout)
        parser.exit()


def option(default: Any = MISSING, /, *also: str, **words: Any) -> Any:
    """A dataclass field for an option, with properties that its type does not express.

    `also` are other spellings, `words` arguments of argparse such as `metavar`. An option without
    default is required.
    """
    return field(default=default, metadata={"also": also, "words": words})


def add_options(parser: argparse._ActionsContainer, *kinds: Any, dashes: bool = False) -> None:
    """Adds an option for each field of the dataclasses `kinds`; the text below a field is its help.

    A bool is a switch, and has a form with `no` if its default is true; a tuple of two takes two
    values; a tuple or sequence of any length may be repeated. With `Annotated[T, read]` the
    function `read` parses the value, and with `Annotated[T, AnEnum]` the members of the enum are
    the choices. With `dashes` the help shows dashes instead of underscores.
    """
    for kind in kinds:
        types, texts = get_type_hints(kind, include_extras=True), sentences(kind)
        for one in fields(kind):
            words = {"help": texts.get(one.name)} | _of_type(types[one.name])
            words |= _of_default(one.default, words) | one.metadata.get("words", {})
            name = _in_dashes(one.name) if dashes else one.name
            parser.add_argument(f"--{name}", *one.metadata.get("also", ()), **words)


def _of_default(default: Any, words: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of argparse for the `default` of an option; `words` are those for its type."""
    if default is MISSING:
        return {"required": True}
    if default is True:
        return {"default": True, "action": argparse.BooleanOptionalAction}
    if isinstance(default, Enum):
        return {"default": str(default)}
    repeated = words.get("action") == "append"
    return {"default": list(default) if repeated and default is not None else default}


def _of_type(kind: Any) -> dict[str, Any]:
    """Arguments of argparse for values of the type `kind`."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        (known,) = [part for part in parts if part is not NoneType]
        return _of_type(known)
    if origin is Annotated:
        mark = kind.__metadata__[0]
        return _of_type(mark) if isinstance(mark, type) else {"type": mark}
    if origin is Literal:
        return {"choices": parts}
    if origin is tuple and Ellipsis not in parts:
        return _of_type(parts[0]) | {"nargs": len(parts)}
    if origin in (tuple, Sequence):
        return _of_type(parts[0]) | {"action": "append"}
    if issubclass(kind, Enum):
        return {"choices": [str(one) for one in kind]}
    if kind is bool:
        return {"action": "store_true"}
    return {} if kind is str else {"type": kind}


def whole(text: str) -> int:
    """Parses `text` as a whole number of at most 31 bits, for argparse."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number; give one such as 4"
        ) from None
    if abs(number) >= 2**31:
        raise argparse.ArgumentTypeError(
            f"{text} is out of range; give a whole number below {2**31}"
        )
    return number


def size_in_bytes(text: str, *, example: str, least: int = 0) -> int:
    """Parses a size such as 500MB or 1GiB as a number of bytes, for argparse.

    The size must be at least `least` bytes; an error message shows `example`.
    """
    match = re.fullmatch(r"(\d{1,15}(?:\.\d+)?)\s*([kMGT]?)(i?)B?", text, re.IGNORECASE)
    thousand = 1024 if match and match[3] else 1000
    power = " KMGT".index(match[2].upper() or " ") if match else 0
    size = int(float(match[1]) * thousand**power) if match else -1
    if size < least:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size of at least {least} bytes; write one such as {example}"
        )
    return size


Whole = Annotated[int, whole]
"""Type of a field that is a whole number of at most 31 bits."""


def option_names(*kinds: Any) -> tuple[str, ...]:
    """The names of the fields of the dataclasses `kinds`."""
    return tuple(one.name for kind in kinds for one in fields(kind))


def chosen(kind: type[K], arguments: argparse.Namespace, **others: Any) -> K:
    """An instance of the dataclass `kind` from the parsed `arguments`; `others` take precedence.

    The dataclass checks the values.
    """
    read, names = vars(arguments), option_names(kind)
    values = {name: read[name] for name in names if name in read}
    read = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return kind(**(read | others))


@cache
def sentences(kind: Any) -> dict[str, str]:
    """Maps each field of the dataclass `kind`, inherited fields included, to the text below it."""
    found: dict[str, str] = {}
    bases: list[Any] = [one for one in kind.__mro__ if is_dataclass(one)]
    for base in reversed(bases):
        (cls,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(cls, ast.ClassDef)
        found |= _documented(cls.body)
    return found


def _documented(body: list[ast.stmt]) -> list[tuple[str, str]]:
    """(field, string literal that follows it) for each such pair in the `body` of a class."""
    pairs = []
    for statement, after in pairwise(body):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            text = " ".join(str(after.value.value).split())
            pairs.append((statement.target.id, text))
    return pairs


def _in_dashes(name: str) -> str:
    return name.replace("_", "-")


def not_an_option(words: Sequence[str], options: Iterable[str]) -> str:
    """Error message about the first of `words`, with the most similar of `options`."""
    if not words[0].startswith("-"):
        return f"{words[0]!r} belongs to no option; put quotes around names with spaces"
    name = words[0].partition("=")[0]
    near = get_close_matches(name, list(options), n=1, cutoff=0.7)
    return f"{name} is not an option" + "".join(f", {option} is" for option in near)


def python() -> str:
    """The command that starts this Python in a shell: `python`, or the interpreter's path."""
    found, mine = shutil.which("python"), Path(os.path.normpath(sys.executable))
    # The Pythons of all environments are links to one file, so their folders tell them apart.
    if found and Path(found).parent == mine.parent and Path(found).samefile(mine):
        return "python"
    here = Path.cwd()
    return str(mine.relative_to(here) if mine.is_relative_to(here) else mine)


def recipe_command(name: str, *words: str) -> str:
    """The command line, for users to type, of the script `name` in `recipes/` with `words`."""
    in_checkout = Path(f"recipes/{name}.py").is_file() or find_spec("recipes") is None
    script = [f"recipes/{name}.py"] if in_checkout else ["-m", f"recipes.{name}"]
    return shlex.join([python(), *script, *words])
