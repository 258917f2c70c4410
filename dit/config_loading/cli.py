"""The command line of an entry script that takes a configuration.

1. split   flags (`--mock`) from overrides (`a.b=c`, `--a.b c`, `~a.b`)
2. parse   flags with argparse
3. load    recipe, file and overrides
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from dit.command_line import OptionParser
from dit.config import RunConfig
from dit.config_loading.load import NO_GUESS, Adapt, ConfigError, load_config
from dit.config_loading.schema import Schema, schema_of
from dit.config_loading.settings import COMMAND_LINE
from dit.local_path import data_place

_OVERRIDES = """\
overrides; they replace values of the file, which replace those of the recipe:
  KEY=VALUE  +KEY=VALUE  --KEY VALUE  --KEY=VALUE    set a key; values are YAML
  ~KEY                                               back to the recipe's value
  model.num_layers=12   optimizer.lr=1e-4   'model.rope_scale=[2,1,1]'   checkpoint.load=null

In a file, ${other.key} and ${oc.env:VARIABLE,default} refer to other values.
To write ${ or a lone ??? as text, put a backslash before it. In paths, ~/ and ~user/ are expanded.

keys, with the default of the recipe and the possible values (of model those of the DiT;
docs/configuration.md has those of all families):

"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """What a command line asks for."""

    config: RunConfig
    dry_run: bool  # check, print what would run, stop
    print_config: bool  # print the resolved configuration, stop


class _Parser(OptionParser):
    """Says what is wrong as every other problem of a configuration is said."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError([f"{message} ({COMMAND_LINE})"])


def parse_arguments(
    argv: Sequence[str],
    *,
    recipes: Mapping[str, Callable[[], RunConfig]],
    default: str = "dit_xl",
    program: str | None = None,
    adapt: Adapt | None = None,
) -> Arguments:
    """Flags and overrides of a command line, as one checked configuration.

    `recipes` names the functions that `--recipe` chooses from, and `adapt` fits the chosen one
    to weights to start from (`load_config`). `--help` prints and exits.

    Raises:
        ConfigError: with every problem of flags, file and overrides.
    """
    flags, overrides = _split(argv)
    parser = _parser(recipes, default, program)
    known, problems = _parse_flags(parser, flags, schema_of(recipes[default]()))
    shortcuts = ["dataset.mock=true"] if known.mock else []
    if known.dataset_path is not None:
        # In JSON quotes, so that a folder called 2024 stays text.
        shortcuts.append(f"dataset.path={json.dumps(known.dataset_path)}")
    try:
        config = load_config(
            recipes[known.recipe](),
            config_file=known.config_file,
            overrides=[*shortcuts, *overrides],
            adapt=adapt,
        )
    except ConfigError as error:
        raise ConfigError(problems + error.problems) from None
    if problems:
        raise ConfigError(problems)
    return Arguments(config=config, dry_run=known.dry_run, print_config=known.print_config)


_NEGATIVE = re.compile(r"-\.?[0-9]")
_OF_LAUNCHER = ("nproc", "nnodes", "node-rank", "master-", "rdzv-", "standalone")
_WITH_VALUE = ("--config-file", "--config", "--recipe", "--dataset-path")
_SWITCHES = {
    "--mock": "synthetic data: short for dataset.mock=true",
    "--dry-run": "check everything, print what would run, stop",
    "--print-config": "print the resolved configuration, stop",
    "--debug": "show where in the code an error was raised",
}


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Flags, each as one token with its value, and the tokens of overrides."""
    flags: list[str] = []
    overrides: list[str] = []
    waiting = list(argv)
    while waiting:
        token = _spelled(waiting.pop(0))
        name, equals, _ = token.partition("=")
        has_value = bool(waiting) and not equals and not waiting[0].startswith("--")
        if name.startswith("--") and "." in name:
            overrides += [token, waiting.pop(0)] if has_value else [token]
        elif _is_foreign_flag(name):
            takes = has_value and _belongs_to_unknown(name, waiting[0])
            value = waiting.pop(0) if takes else "true"
            overrides.append(token[2:] if equals else f"{name[2:]}={value}")
        elif not token.startswith("-"):
            overrides.append(token)
        elif has_value and (name in _WITH_VALUE or _belongs_to_unknown(name, waiting[0])):
            flags.append(f"{token}={waiting.pop(0)}")
        else:
            flags.append(token)
    return flags, overrides


def _spelled(token: str) -> str:
    """A token whose flag is spelled as here or by another tool: dashes are underscores."""
    name, equals, value = token.partition("=")
    if not name.startswith("--") or "." in name:
        return token
    ours, theirs = (f"--{name[2:].replace(*pair)}" for pair in (("_", "-"), ("-", "_")))
    if ours in (*_WITH_VALUE, *_SWITCHES):
        return ours + equals + value
    return theirs + equals + value if _is_foreign_flag(theirs) else token


def _is_foreign_flag(name: str) -> bool:
    """Whether the command line of another tool has it; their tables are read for unknown flags."""
    if not name.startswith("--") or name in (*_WITH_VALUE, *_SWITCHES, "--help"):
        return False
    from dit.config_loading.foreign import FLAGS

    return name[2:] in FLAGS


def _belongs_to_unknown(flag: str, token: str) -> bool:
    """Whether a token looks like the value of a flag that does not exist."""
    return (
        flag not in (*_SWITCHES, "--help", "-h")
        and "=" not in token
        and (not token.startswith(("~", "+", "-")) or bool(_NEGATIVE.match(token)))
    )


def _parser(
    recipes: Mapping[str, Callable[[], RunConfig]], default: str, program: str | None
) -> _Parser:
    parser = _Parser(
        prog=program,
        usage="%(prog)s [flags] [KEY=VALUE ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_OVERRIDES + schema_of(recipes[default]()).reference(recipes[default]()),
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--config-file",
        "--config",
        type=Path,
        metavar="FILE",
        help="YAML file, such as those in conf/",
    )
    add(
        "--recipe", choices=list(recipes), default=default, help=f"to start from; default {default}"
    )
    add("--dataset-path", type=data_place, metavar="DIR", help="short for dataset.path=DIR")
    for name, text in _SWITCHES.items():
        add(name, action="store_true", help=text)
    return parser


def _parse_flags(
    parser: argparse.ArgumentParser, flags: list[str], schema: Schema
) -> tuple[argparse.Namespace, list[str]]:
    """What the flags say, and what is wrong with them."""
    names = (*_WITH_VALUE, *_SWITCHES, "--help", "-h")
    known = [flag for flag in flags if flag.partition("=")[0] in names]
    problems = [_unknown_flag(flag, names, schema) for flag in flags if flag not in known]
    try:
        return parser.parse_args(known), problems
    except ConfigError as error:
        return parser.parse_args([]), problems + error.problems


def _unknown_flag(token: str, names: Sequence[str], schema: Schema) -> str:
    name = token.partition("=")[0].lstrip("-").replace("_", "-")
    if name.startswith(_OF_LAUNCHER):
        return f"{token} ({COMMAND_LINE}): belongs to torch.distributed.run, before the script"
    # Without dashes, which make short names alike.
    close = get_close_matches(name, [one.lstrip("-") for one in names], n=1)
    guess = close[0] if close else schema.nearest(name.replace("-", "_"))
    advice = f"did you mean --{guess}?" if guess else NO_GUESS
    return f"{token} ({COMMAND_LINE}): unknown flag; {advice}"
