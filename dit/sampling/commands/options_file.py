"""Reads the YAML file of options of `generate_dit.py` as arguments of its command line.

The command line takes precedence over the file. Generation files of AutoModel are read as well, if
we have an option for each of their keys; these keys are also accepted on the command line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dit.command_line import OptionParser
from dit.distributed.entry import Parser
from dit.local_path import checkpoint_place, local_text
from dit.parsing import MOST_BYTES, YamlError, parse_yaml
from dit.system_errors import reason

# Key of AutoModel -> option here.
_AUTOMODEL = {
    "model.checkpoint": "checkpoint_path",
    "inference.num_inference_steps": "num_steps",
    "inference.guidance_scale": "guidance",
    "inference.height": "height",
    "inference.width": "width",
    "inference.prompts": "prompt",
    "inference.pipeline_kwargs.num_frames": "num_video_frames",
    "inference.pipeline_kwargs.negative_prompt": "negative_prompt",
    "output.output_dir": "output_dir",
    "output.fps": "fps",
}
# Prefix of options in Lightricks' own pipeline -> their feature, which Diffusers does not have.
_LIGHTRICKS = {
    "stg_mode": "a choice of spatio-temporal guidance (STG)",
    "skip_block_list": "spatio-temporal guidance (STG)",
    "cfg_star_": "cfg*",
}
_GROUPS = ("model", "inference", "inference.pipeline_kwargs", "output", "vae", "distributed")
# Type of an option -> YAML types that it accepts, in words as well.
_KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    int: ((int,), "an integer"),
    float: ((int, float), "a number"),
    None: ((str,), "text, in quotes if it looks like something else"),
    Path: ((str,), "text"),
    local_text: ((str,), "text, in quotes if it looks like something else"),
    checkpoint_place: ((str,), "text, in quotes if it looks like something else"),
}


def with_file(argv: Sequence[str], parser: OptionParser) -> list[str]:
    """Arguments for `parser`: those of the file given by `--config`, if any, then those in `argv`.

    Options in the file that `argv` also sets are left out. AutoModel's names are replaced by ours;
    keys that belong to other programs are named on stderr.

    Raises:
        ValueError: a key or value of the file is not allowed, or the file cannot be read.
    """
    for token in argv:
        _refuse_lightricks(token.partition("=")[0], token)
    first = Parser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path)
    known, rest = first.parse_known_args([parser.spelled(_in_our_words(one)) for one in argv])
    if known.config is None:
        return rest
    typed = {token.partition("=")[0] for token in rest}
    options = {o: action for action in parser._actions for o in action.option_strings}
    given, settings = list[str](), [*_settings(known.config)]
    for key, value, place in settings:
        for word in (key, *(value if isinstance(value, dict) else ())):
            _refuse_lightricks(f"--{word}", f"{word} ({place})")
    for key, value, place in settings:
        name = _AUTOMODEL.get(key, key.replace("-", "_"))
        action = options.get(f"--{name}")
        if action is None and key.partition(".")[0] in _GROUPS:
            sys.stderr.write(f"{key} ({place}) is not used: it is a key of another program\n")
        elif action is None or name in ("config", "help"):
            known_keys = [o[2:] for o in options if o not in ("--config", "--help")]
            near = get_close_matches(name, known_keys, n=1, cutoff=0.7)
            guess = f"did you mean {near[0]}?" if near else "--help=all lists the options"
            raise ValueError(f"{key}={_shown(value)} ({place}): unknown key; {guess}")
        elif not typed & _instead_of(action) and value is not None:
            given += _tokens(action, name, value, f"{key}={_shown(value)} ({place})")
    return [*given, *rest]


def _refuse_lightricks(option: str, shown: str) -> None:
    """Refuses an option that only Lightricks' own pipeline of LTX-Video has.

    Raises:
        ValueError: `option` is such an option; the message calls it `shown`.
    """
    name = option.replace("-", "_")
    for start, what in _LIGHTRICKS.items():
        if name.startswith(f"__{start}"):
            raise ValueError(
                f"{shown}: {what} exists only in Lightricks' own pipeline; leave it out, and use"
                " --guidance and --guidance_rescale"
            )


def _in_our_words(token: str) -> str:
    name, equals, value = token.partition("=")
    ours = _AUTOMODEL.get(name.removeprefix("--")) if name.startswith("--") else None
    return token if ours is None else f"--{ours}{equals}{value}"


def _instead_of(action: argparse.Action) -> set[str]:
    if {"--prompt", "--prompts_file"} & set(action.option_strings):
        return {"--prompt", "--prompts_file"}
    return set(action.option_strings)


def _shown(value: Any) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)[:80]


def _settings(path: Path) -> Iterator[tuple[str, Any, str]]:
    """Yields (key, value, "file:line") of every setting; keys of AutoModel's groups have dots.

    Raises:
        ValueError: the file cannot be read, or is not a mapping.
    """
    try:
        with path.open("rb") as file:
            document = parse_yaml(file.read(MOST_BYTES + 1))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({reason(error)}); check --config") from error
    except YamlError as error:
        place = path if error.line is None else f"{path}:{error.line}"
        raise ValueError(f"{place}: {error.problem}; correct the file") from error
    if not isinstance(document.values, dict):
        raise ValueError(
            f"{path} must be a mapping such as `guidance: 3`, not a"
            f" {type(document.values).__name__}"
        )
    waiting = [(str(key), value) for key, value in document.values.items()]
    while waiting:
        key, value = waiting.pop(0)
        if key in _GROUPS and isinstance(value, dict):
            waiting = [*((f"{key}.{name}", item) for name, item in value.items()), *waiting]
        elif not key.startswith("x-"):
            yield key, value, f"{path}:{document.lines.get(key, 1)}"


def _tokens(action: argparse.Action, name: str, value: Any, named: str) -> list[str]:
    """Command-line arguments that give the option `name` the `value` that a file states.

    `action` is the parser's action for the option. Messages call the setting by the text `named`,
    such as `steps=3 (f.yaml:2)`.

    Raises:
        ValueError: the option takes another type or number of values.
    """
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ValueError(f"{named} must be true or false")
        return [f"--{name}"] if value else []
    several = isinstance(value, list)
    repeatable = isinstance(action, argparse._AppendAction)
    if several != isinstance(action.nargs, int) and not (several and repeatable):
        raise ValueError(f"{named} must be " + ("one value" if several else "a list of two values"))
    if isinstance(action.nargs, int) and len(value) != action.nargs:
        raise ValueError(f"{named} must be a list of {action.nargs} values")
    parts = value if several else [value]
    kinds, words = _KINDS[action.type]
    if any(not isinstance(part, kinds) or isinstance(part, bool) for part in parts):
        raise ValueError(f"{named} must be {words}")
    if isinstance(action.nargs, int):
        return [f"--{name}", *map(str, parts)]
    return [f"--{name}={part}" for part in parts]
