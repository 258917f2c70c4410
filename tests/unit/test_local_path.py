"""Paths on command lines: every option that names one, of every command, and what is refused."""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dit.local_path import PathError, data_place, local_path, local_text

ADDRESSES = ("s3://bucket/run", "msc://profile/run", "MSC://p/x", "hf://datasets/a", "file:///x")
ADDRESSES += ("C://runs", "simplecache::s3://bucket/x", "msc:/profile/run", "s3:/bucket", "gs:/b/x")
LOCAL = ("C:/runs", "wan:lora/run1", "data:ok:1", "./s3:/bucket", "a/b://c", "12:30", "x:y:0.8")
TEXTS = {
    # Options with a text that is no path, by the name of their value.
    *("prompt", "negative_prompt", "lr", "host", "keys", "parts", "pip_flags", "python_version"),
    *("split", "license", "processor", "text_encoder", "dataset_split", "caption_field"),
    *("image_column", "video_column", "caption_column", "base_model", "objective", "layouts"),
    *("family", "sizes", "lengths", "mixture", "config"),
}


class Captured(Exception):
    """The parser of a command, in the moment in which it would read its arguments."""

    def __init__(self, parser: argparse.ArgumentParser):
        self.parser = parser


def commands(root: Path) -> list[str]:
    """The modules that are run as programs."""
    found = []
    for folder in ("data_prep", "dit", "recipes", "benchmarks"):
        for file in sorted((root / folder).rglob("*.py")):
            text = file.read_text()
            if 'if __name__ == "__main__"' in text or file.name == "__main__.py":
                name = ".".join(file.relative_to(root).with_suffix("").parts)
                found.append(name.removeprefix("benchmarks."))
    found.remove("gpu_run.worker")  # reads its work from its standard input
    return found


def parser_of(module: str, monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    def capture(self: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        raise Captured(self)

    with monkeypatch.context() as patched:
        patched.setattr(sys, "argv", [module])
        patched.setattr(argparse.ArgumentParser, "parse_known_args", capture)
        with pytest.raises(Captured) as captured:
            importlib.import_module(module).main()
    return captured.value.parser


def with_subcommands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield from with_subcommands(one)


def options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    """The options of a command and its subcommands that take some text, with their names."""
    for one in with_subcommands(parser):
        for action in one._actions:
            takes_text = action.type in (None, str) or action.type not in (int, float)
            if action.nargs != 0 and action.choices is None and takes_text:
                yield f"{one.prog} {'/'.join(action.option_strings) or action.dest}", action
