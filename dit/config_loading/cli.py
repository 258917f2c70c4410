"""The command line of an entry script that takes a configuration.

1. split   flags (`--mock`) from overrides (`a.b=c`, `--a.b c`, `~a.b`)
2. parse   flags with argparse
3. load    recipe, file and overrides; a file of another tool is translated by `dit.foreign`
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import NoReturn

from dit.command_line import OptionParser, python
from dit.config import Problems, RunConfig
from dit.config_loading.load import NO_GUESS, Adapt, ConfigError, load_config
from dit.config_loading.schema import Schema, schema_of
from dit.config_loading.settings import COMMAND_LINE, legible, read_file, read_tokens
from dit.local_path import data_place

logger = logging.getLogger(__name__)

_OVERRIDES = """\
overrides; they replace values of the file, which replace those of the recipe:
  KEY=VALUE  +KEY=VALUE  --KEY VALUE  --KEY=VALUE    set a key; values are YAML
  ~KEY                                               back to the recipe's value
  model.num_layers=12   optimizer.lr=1e-4   'model.rope_scale=[2,1,1]'   checkpoint.load=null

In a file, ${other.key} and ${oc.env:VARIABLE,default} refer to other values.
To write ${ or a lone ??? as text, put a backslash before it. In paths, ~/ and ~user/ are expanded.

"""
_EVERY = """\
keys, with the default of the recipe and the possible values (of model those of the DiT;
docs/configuration.md has those of all families):

"""
_SOME = """\
keys that people set first, with the default of the recipe and the possible values; --help=all and
docs/configuration.md have every key:

"""
_FIRST = (
    *("model.name", "dataset.path", "dataset.task_encoder_seq_length", "checkpoint.load_hf"),
    *("checkpoint.save", "train.train_iters", "train.global_batch_size", "optimizer.lr"),
    *("lora.rank", "validation.prompts_file"),
)
_HELP = ("--help", "-h", "--help=all")


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """Flags and configuration from the command line."""

    config: RunConfig
    dry_run: bool  # check, print what would run, stop
    print_config: bool  # print the resolved configuration, stop


class _Parser(OptionParser):
    """Argument parser that reports errors in the form of other configuration problems."""

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
    """Parses a command line `argv`: its flags, and one checked configuration.

    `recipes` names the functions that `--recipe` chooses from; without that flag the choice is
    `default`. `adapt` adjusts the chosen recipe to the weights from which the run starts (see
    `load_config`). `program` is the command in the help. `--help` prints the keys that people set
    first, `--help=all` every key; both exit.

    Raises:
        ConfigError: lists every problem of flags, file and overrides.
    """
    flags, overrides = _split(argv)
    parser = _parser(recipes, default, program)
    if {*_HELP} & {*flags}:  # each start would pay for it
        start, every = recipes[default](), "--help=all" in flags
        keys = schema_of(start).reference(start, None if every else _FIRST)
        parser.epilog = _OVERRIDES + (_EVERY if every else _SOME) + keys
    known, problems = _parse_flags(parser, flags, schema_of(recipes[default]()))
    shortcuts = ["dataset.mock=true"] if known.mock else []
    if known.dataset_path is not None:
        # In JSON quotes, so that a folder called 2024 stays text.
        shortcuts.append(f"dataset.path={json.dumps(known.dataset_path)}")
    try:
        config = _load(recipes[known.recipe](), known.config_file, [*shortcuts, *overrides], adapt)
    except Problems as error:
        raise ConfigError(problems + error.problems) from None
    if problems:
        raise ConfigError(problems)
    return Arguments(config=config, dry_run=known.dry_run, print_config=known.print_config)


def _load(
    recipe: RunConfig, path: Path | None, overrides: list[str], adapt: Adapt | None
) -> RunConfig:
    """The configuration in the file `path`, this project's or another tool's, with `overrides`.

    Keys of another tool are translated; the log has the notes of the translation.

    Raises:
        Problems: all problems of file and overrides.
    """
    load = partial(load_config, recipe, overrides=overrides, adapt=adapt)
    try:
        settings = [] if path is None else read_file(path).settings()
    except Problems:
        return load(config_file=path)  # with all other problems
    keys, schema = {one.key for one in settings}, schema_of(recipe)
    # A file in our keys needs no table of other tools.
    if {"model.family", "model.name"} & keys or all(schema.is_known(key) for key in keys):
        return load(settings=settings)
    from dit.foreign.translate import fitted, is_theirs, translate

    if not is_theirs(settings):
        return load(settings=settings)
    config, translation = fitted(translate(settings), lambda ours: load(settings=ours))
    command = shlex.join([python(), "-m", "dit.foreign", str(path), *overrides])
    for note in translation.notes:
        logger.warning(legible(note))
    logger.warning(
        legible(f"{path} has keys of another tool; to translate the file: {command} > ours.yaml")
    )
    return config


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
    """Splits `argv` into (flags, overrides); a flag and its value become one token."""
    flags: list[str] = []
    overrides: list[str] = []
    waiting = list(argv)
    while waiting:
        token = _spelled(waiting.pop(0))
        name, equals, _ = token.partition("=")
        has_value = bool(waiting) and not equals and not waiting[0].startswith("--")
        if name.startswith("--") and "." in name:
            overrides += [token, waiting.pop(0)] if has_value else [token]
        elif not token.startswith("-"):
            overrides.append(token)
        elif has_value and (name in _WITH_VALUE or _belongs_to_unknown(name, waiting[0])):
            flags.append(f"{token}={waiting.pop(0)}")
        else:
            flags.append(token)
    return flags, overrides


def _spelled(token: str) -> str:
    """`token` with dashes for the underscores of its flag, if this makes it a known flag."""
    name, equals, value = token.partition("=")
    ours = f"--{name[2:].replace('_', '-')}"
    return ours + equals + value if ours in (*_WITH_VALUE, *_SWITCHES) else token


def _belongs_to_unknown(flag: str, token: str) -> bool:
    return (
        flag not in (*_SWITCHES, *_HELP)
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
    """(parsed flags, problems); flags that cannot be parsed have their defaults."""
    names = (*_WITH_VALUE, *_SWITCHES, "--help", "-h")
    known = [flag for flag in flags if flag.partition("=")[0] in names]
    problems = [_unknown_flag(flag, names, schema) for flag in flags if flag not in known]
    try:
        return parser.parse_args(known), problems
    except ConfigError as error:
        return parser.parse_args([]), problems + error.problems


def _unknown_flag(token: str, names: Sequence[str], schema: Schema) -> str:
    name, equals, value = token.lstrip("-").partition("=")
    name = name.replace("_", "-")
    if name.startswith(_OF_LAUNCHER):
        return (
            f"{token} ({COMMAND_LINE}): is an option of torch.distributed.run; write it before the"
            " script"
        )
    if token.startswith("--") and (told := _of_another_tool(name, value if equals else "true")):
        return f"{token} ({COMMAND_LINE}): is an option of other tools; {told}"
    # Without dashes, which make short names alike.
    close = get_close_matches(name, [one.lstrip("-") for one in names], n=1)
    guess = close[0] if close else schema.nearest(name.replace("-", "_"))
    advice = f"did you mean --{guess}?" if guess else NO_GUESS
    return f"{token} ({COMMAND_LINE}): unknown flag; {advice}"


def _of_another_tool(name: str, value: str) -> str:
    """Advice on what to write instead of another tool's argument `name`; or empty."""
    from dit.foreign.translate import advice

    (setting,) = read_tokens([f"{name}={value}"])[0] or [None]
    return "" if setting is None else advice(setting)
