"""Converts a file of another tool to this project's keys: `python -m dit.foreign FILE`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dit.config import RunConfig
from dit.config_loading.load import ConfigError, ForWeights, default_config, load_config
from dit.config_loading.settings import (
    Setting,
    escaped,
    legible,
    read_file,
    read_tokens,
    without_removed,
)
from dit.config_loading.validate import plain
from dit.distributed.entry import Parser, run
from dit.foreign.translate import Translation, fitted, is_theirs, translate
from dit.local_path import local_path
from dit.streams import result


def main(argv: Sequence[str] | None = None) -> int:
    """Prints another tool's file in this project's keys, with a comment for each key of the file.

    Raises:
        Problems: all problems that a run of the file would have.
    """
    arguments = _parser().parse_args(argv)
    path, overrides = arguments.file, arguments.overrides
    settings = read_file(path).settings()
    if not is_theirs(settings):
        raise ConfigError(
            [
                f"{path}: is not a configuration of a supported tool (AutoModel, FastVideo,"
                " diffusion-pipe, DFM), or has keys of this project already: give it to"
                " --config-file as it is"
            ]
        )

    def load(ours: list[Setting]) -> RunConfig:
        return load_config(default_config(), settings=ours, overrides=overrides, adapt=_for_weights)

    config, translation = fitted(translate(settings), load)
    typed, _ = read_tokens(overrides)
    with result():
        sys.stdout.write(_text(path, config, translation, typed))
    return 0


def _text(path: Path, config: RunConfig, translation: Translation, typed: list[Setting]) -> str:
    """Content of the converted file: notes, then keys with the values that the run gets.

    Only keys of the file and those that the user `typed` are written.
    """
    keys = [one.key.split(".") for one in without_removed([*translation.settings, *typed])]
    chosen = {(group, name) for group, name, *_ in keys}
    tree = {
        group: {name: value for name, value in values.items() if (group, name) in chosen}
        for group, values in plain(config).items()
    }
    tree = {group: values for group, values in tree.items() if values}
    head = [f"From {path}, a file of another tool. Its keys, and this project's for each:", ""]
    notes = "".join(f"# {legible(line)}".rstrip() + "\n" for line in [*head, *translation.notes])
    return f"{notes}\n{OmegaConf.to_yaml(OmegaConf.create(escaped(tree)))}"


def _for_weights(recipe: RunConfig, given: Callable[..., Any]) -> ForWeights | None:
    """Network and objective of the folder `checkpoint.load_hf`; None if that key is not set."""
    if given("checkpoint.load_hf") is None:
        return None
    from dit.convert.load_hf.settings import settings_of_folder

    return settings_of_folder(recipe, given)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m dit.foreign",
        description="Prints a configuration file of AutoModel, FastVideo, diffusion-pipe or DFM in"
        " the keys of this program: python -m dit.foreign THEIRS.yaml > ours.yaml",
    )
    parser.add_argument(
        "file", type=local_path, help="their YAML file, or diffusion-pipe's main TOML"
    )
    parser.add_argument(
        "overrides",
        nargs=argparse.REMAINDER,
        metavar="KEY=VALUE",
        help="this program's keys for the run, such as model.name=wan2.1_t2v_1.3b; the output has"
        " them, too",
    )
    return parser


if __name__ == "__main__":
    sys.exit(run(main))
