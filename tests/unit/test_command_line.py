"""Options from the fields of a dataclass; commands that programs tell to type next."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import pytest

from dit.command_line import OptionParser, add_options, chosen, option, python
from dit.local_path import LocalPath


def test_a_shell_with_another_python_is_told_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of an environment that is not activated: its Python links to that of the shell."""
    mine, other = tmp_path / "mine/python", tmp_path / "other/python"
    for link in (mine, other):
        link.parent.mkdir()
        link.symlink_to(Path(sys.executable).resolve())
    monkeypatch.setattr(sys, "executable", str(mine))
    for path, said in ((mine, "python"), (other, str(mine)), (tmp_path, str(mine))):
        monkeypatch.setenv("PATH", os.fspath(path.parent))
        assert python() == said
    monkeypatch.chdir(tmp_path)
    assert python() == "mine/python"


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True)
class Below:
    count: int
    """How many."""
    places: Sequence[LocalPath] = option((), metavar="FILE")
    """Where."""


@dataclass(frozen=True, kw_only=True)
class Options(Below):
    colour: Colour = Colour.RED
    """Which of them, of two lines in
    the source. (default: %(default)s)"""
    other: Annotated[str, Colour] = "blue"
    kind: Literal["a", "b"] | None = None
    span: tuple[float, float] | None = None
    out: Path | None = option(None, "--folder")
    crop: bool = True
    fast: bool = False
    size: Annotated[tuple[int, ...], lambda text: tuple(map(int, text.split(",")))] = ()

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"--count {self.count} must be at least 1")


@pytest.fixture
def parser() -> OptionParser:
    parser = OptionParser(prog="x")
    add_options(parser, Options)
    return parser


def test_defaults_are_those_of_the_fields(parser: OptionParser) -> None:
    assert chosen(Options, parser.parse_args(["--count", "3"])) == Options(count=3)
    with pytest.raises(SystemExit):
        parser.parse_args([])


def test_values_have_the_types_of_the_fields(parser: OptionParser) -> None:
    words = "--count 2 --places a --places b:1 --colour blue --other red --kind b --span 0 1.5"
    words += " --folder o --no-crop --fast --size 1,2"
    read = chosen(Options, parser.parse_args(words.split()))
    expected = Options(
        count=2,
        places=("a", "b:1"),
        colour=Colour.BLUE,
        other="red",
        kind="b",
        span=(0.0, 1.5),
        out=Path("o"),
        crop=False,
        fast=True,
        size=(1, 2),
    )
    assert read == expected


@pytest.mark.parametrize("wrong", ["--colour green", "--kind c", "--span 1", "--places s3://b/x"])
def test_what_no_field_takes(parser: OptionParser, wrong: str) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args(["--count", "1", *wrong.split()])


def test_checks_are_those_of_the_dataclass(parser: OptionParser) -> None:
    with pytest.raises(ValueError, match="--count 0 must be at least 1"):
        chosen(Options, parser.parse_args(["--count", "0"]))


def test_help_is_the_sentence_below_the_field(parser: OptionParser) -> None:
    text = " ".join(parser.format_help().split())
    for part in ("--count COUNT How many.", "--places FILE Where.", "{red,blue} Which of them, of"):
        assert part in text
    assert "of two lines in the source. (default: red)" in text


def test_help_shows_options_that_are_used_first_and_counts_the_others(capsys) -> None:
    def parser(*first: str) -> OptionParser:
        made = OptionParser()
        made.first = first
        add_options(made.add_argument_group("places", "Where they are."), Below)
        group = made.add_argument_group("looks", "How they look.")
        group.add_argument("--colour")
        return made

    def said(made: OptionParser, word: str) -> str:
        with pytest.raises(SystemExit, match="0"):
            made.parse_args([word])
        return capsys.readouterr().out

    every, some = said(parser(), "--help"), parser("count")
    assert "--colour" in every and "How they look." in every and "--help=all" not in every
    short = said(some, "--help")
    assert "places:" in short and "How many." in short and "show all options: 2 more" in short
    assert not [word for word in ("--places", "--colour", "looks:", "look.") if word in short]
    assert said(some, "--help=all") == said(parser(), "--help=all") == every
    assert some.parse_args(["--count", "3", "--colour", "red"]).colour == "red"
