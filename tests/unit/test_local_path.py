"""Paths on command lines: every option that names one, of every command, and what is refused."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dit.local_path import PathError, checkpoint_place, data_place, local_path, local_text

ADDRESSES = ("s3://bucket/run", "msc://profile/run", "MSC://p/x", "hf://datasets/a", "file:///x")
ADDRESSES += ("C://runs", "simplecache::s3://bucket/x", "msc:/profile/run", "s3:/bucket", "gs:/b/x")
LOCAL = ("C:/runs", "wan:lora/run1", "data:ok:1", "./s3:/bucket", "a/b://c", "12:30", "x:y:0.8")
TEXTS = {
    *("prompt", "negative_prompt", "host", "keys", "parts", "python_version", "base_model"),
    *("split", "license", "processor", "text_encoder", "dataset_split", "caption_field"),
    *("image_column", "video_column", "caption_column", "objective", "layouts", "family"),
    *("mixtures", "model", "models", "also", "beside", "variant", "judge", "overrides"),
}
"""Options of which a text is no path. A new option is a path, or belongs here."""
READ = {
    "whole",
    "at_least_one",
    "size_in_bytes",
    "_bytes",
    "_tokens",
    "integers",
    "_positive",
    "opaque",
    "minutes",
}
"""Functions that read an option which is no path: numbers and colours."""
ADDRESSED = {data_place, checkpoint_place}
"""Functions that accept some addresses, of what is read alone."""


class Captured(Exception):  # noqa: N818 - it is no error
    """The parser of a command, in the moment in which it would read its arguments."""

    def __init__(self, parser: argparse.ArgumentParser):
        self.parser = parser


def commands(root: Path) -> list[str]:
    """The modules that are run as programs."""
    found = []
    for folder in ("data_prep", "dit", "recipes", "benchmarks", "tools/gpu"):
        for file in sorted((root / folder).rglob("*.py")):
            text = file.read_text()
            if 'if __name__ == "__main__"' in text or file.name == "__main__.py":
                name = ".".join(file.relative_to(root).with_suffix("").parts)
                found.append(name.removeprefix("benchmarks."))
    found.remove("tools.gpu.worker")  # reads its work from its standard input
    return found


def parser_of(module: str, monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    ordinary = argparse.ArgumentParser.parse_known_args

    def capture(self: argparse.ArgumentParser, *arguments: Any, **options: Any) -> Any:
        if self.add_help:
            raise Captured(self)
        return ordinary(self, *arguments, **options)  # looks for --config, before the others

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


def paths(parser: argparse.ArgumentParser) -> Iterator[tuple[str, Callable[[str], Any]]]:
    """The options of a command and its subcommands that name a path, and what reads each."""
    for one in with_subcommands(parser):
        for action in one._actions:
            read = one._registry_get("type", action.type, action.type)
            taken = action.nargs != 0 and action.choices is None and read not in (int, float)
            name = getattr(getattr(read, "func", read), "__name__", "")  # of a partial, too
            if taken and name not in READ and action.dest not in TEXTS:
                yield f"{one.prog} {'/'.join(action.option_strings) or action.dest}", read


def test_every_path_of_every_command_is_read_by_one_function(
    repo_root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    seen = 0
    for module in commands(repo_root):
        for name, read in paths(parser_of(module, monkeypatch)):
            assert read in (local_path, local_text, *ADDRESSED), (
                f"{name}: is it a path, or in TEXTS?"
            )
            assert str(read("~/a:b")) == str(tmp_path / "a:b"), name
            for text in ("s3://bucket/x", "s3:/bucket/x", "$NOWHERE/x", "~nobody here/x", "None"):
                with pytest.raises(PathError):
                    read(text)
            seen += 1
    assert seen > 90


@pytest.mark.parametrize("text", ADDRESSES)
def test_an_address_is_refused_with_the_remedy(text: str) -> None:
    with pytest.raises(PathError, match="is an address, and this is a path of this machine"):
        local_path(text)
    assert local_path(f"./{text}") == Path(f"./{text}")


@pytest.mark.parametrize("text", LOCAL)
def test_a_colon_alone_makes_no_address(text: str) -> None:
    assert local_text(text) == data_place(text) == text
    assert local_path(text) == Path(text)


def test_datasets_are_read_at_addresses_of_energon() -> None:
    for text in ("msc://profile/data", "file:///data", "dss://name@v1"):
        assert data_place(text) == text
    for text in ("s3://bucket/data", "msc:/profile/data"):
        with pytest.raises(PathError, match="write msc://PROFILE/PATH"):
            data_place(text)
        with pytest.raises(PathError, match="write msc://PROFILE/PATH"):
            checkpoint_place(text)
    assert checkpoint_place("msc://profile/run/checkpoints/LATEST").startswith("msc://profile/run")


def test_a_home_folder_is_that_of_a_shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert local_path("~") == tmp_path
    assert local_path("~/runs") == tmp_path / "runs"
    assert local_text("~root/x") == os.path.expanduser("~root/x") != "~root/x"
    for text in ("./~/runs", "a/~/b", "a~"):
        assert local_text(text) == text
    with pytest.raises(PathError, match="knows no user nobody-here, whose home ~nobody-here"):
        local_path("~nobody-here/x")
    (tmp_path / "~nobody-here").touch()
    assert local_text("~nobody-here") == "~nobody-here"


def test_a_variable_that_no_shell_has_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DATA", "/big/data")
    monkeypatch.delenv("NOWHERE", raising=False)
    monkeypatch.chdir(tmp_path)
    for text in ("$DATA/x", "${DATA}/x"):
        with pytest.raises(PathError, match="write /big/data/x, or make the folder"):
            local_path(text)
    with pytest.raises(PathError, match=r"no variable \$NOWHERE is set"):
        local_path("runs/$NOWHERE")
    (tmp_path / "in/$DATA").mkdir(parents=True)
    assert local_text("in/$DATA/new") == "in/$DATA/new"  # there is a folder of this name
    assert local_path("$DATA/new", base=tmp_path / "in") == tmp_path / "in/$DATA/new"
    assert local_text("costs 5$/x") == "costs 5$/x"


def test_pythons_none_is_no_name() -> None:
    for text in ("None", "none"):
        with pytest.raises(PathError, match=f"write null for no value, or leave it out .*./{text}"):
            local_path(text)
    assert local_path("./None") == Path("None")
