"""A YAML file of `generate_dit.py`: options by name, which the command line is stronger than.

AutoModel's files for generation are read as well, as far as their keys have a meaning here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dit.distributed.entry import Parser
from dit.yaml_text import MOST_BYTES, YamlError, parse_yaml

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
_GROUPS = ("model", "inference", "inference.pipeline_kwargs", "output", "vae", "distributed")
_KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    int: ((int,), "an integer"),
    float: ((int, float), "a number"),
    None: ((str,), "text, in quotes if it looks like something else"),
    Path: ((str,), "text"),
}


def with_file(argv: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """The arguments of the file that `--config` names, then those of the command line.

    Raises:
        ValueError: names the file, the key and what it takes.
    """
    first = Parser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path)
    known, rest = first.parse_known_args(argv)
    if known.config is None:
        return rest
    typed = {token.partition("=")[0] for token in rest}
    options = {o: action for action in parser._actions for o in action.option_strings}
    given: list[str] = []
    for key, value, place in _settings(known.config):
        name = _AUTOMODEL.get(key, key.replace("-", "_"))
        action = options.get(f"--{name}")
        if action is None and key.partition(".")[0] in _GROUPS:
            sys.stderr.write(f"{key} ({place}): read, not used: it belongs to another program\n")
        elif action is None or name in ("config", "help"):
            near = get_close_matches(name, [o[2:] for o in options], n=1, cutoff=0.7)
            guess = f"did you mean {near[0]}?" if near else "--help lists the options"
            raise ValueError(f"{key}={_shown(value)} ({place}): unknown key; {guess}")
        elif not typed & _instead_of(action) and value is not None:
            given += _tokens(action, name, value, f"{key}={_shown(value)} ({place})")
    return [*given, *rest]


def _instead_of(action: argparse.Action) -> set[str]:
    """What the command line says where it overrides this option; prompts come from one place."""
    if {"--prompt", "--prompts_file"} & set(action.option_strings):
        return {"--prompt", "--prompts_file"}
    return set(action.option_strings)


def _shown(value: Any) -> str:
    return json.dumps(value, default=str, ensure_ascii=False)[:80]


def _settings(path: Path) -> Iterator[tuple[str, Any, str]]:
    """Key, value and place of everything in the file; the groups of AutoModel's with dots."""
    try:
        with path.open("rb") as file:
            document = parse_yaml(file.read(MOST_BYTES + 1))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); check --config") from error
    except YamlError as error:
        place = path if error.line is None else f"{path}:{error.line}"
        raise ValueError(f"{place}: {error.problem}") from error
    if not isinstance(document.values, dict):
        raise ValueError(f"{path}: must be a mapping such as `guidance: 3`")
    waiting = [(str(key), value) for key, value in document.values.items()]
    while waiting:
        key, value = waiting.pop(0)
        if key in _GROUPS and isinstance(value, dict):
            waiting = [*((f"{key}.{name}", item) for name, item in value.items()), *waiting]
        elif not key.startswith("x-"):
            yield key, value, f"{path}:{document.lines.get(key, 1)}"


def _tokens(action: argparse.Action, name: str, value: Any, named: str) -> list[str]:
    """The arguments that say this.

    Raises:
        ValueError: the option takes something else.
    """
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ValueError(f"{named}: expected true or false")
        return [f"--{name}"] if value else []
    several = isinstance(value, list)
    repeatable = isinstance(action, argparse._AppendAction)
    if several != isinstance(action.nargs, int) and not (several and repeatable):
        raise ValueError(f"{named}: expected " + ("one value" if several else "a list of two"))
    if isinstance(action.nargs, int) and len(value) != action.nargs:
        raise ValueError(f"{named}: expected a list of {action.nargs}")
    parts = value if several else [value]
    kinds, words = _KINDS[action.type]
    if any(not isinstance(part, kinds) or isinstance(part, bool) for part in parts):
        raise ValueError(f"{named}: expected {words}")
    if isinstance(action.nargs, int):
        return [f"--{name}", *map(str, parts)]
    return [f"--{name}={part}" for part in parts]
