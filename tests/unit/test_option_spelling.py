"""In every option of every command dashes and underscores are the same."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_prep.cli.parser import build_parser
from dit.command_line import OptionParser
from dit.convert.cli import convert_parser
from dit.layout_check.program import _parser as layout_parser
from dit.playground.__main__ import _parser as playground_parser
from dit.report.__main__ import _parser as report_parser
from dit.sampling.commands.options import parser as generation_parser
from dit.sampling.commands.options_file import with_file
from examples.digits.accuracy import digits_parser
from recipes.plan_run import _parser as plan_parser

ROOT = Path(__file__).resolve().parents[2]


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Each parser of a command, those below others, too."""
    made = {
        "data_prep": build_parser,
        "convert": convert_parser,
        "check_layouts": layout_parser,
        "playground": playground_parser,
        "report": report_parser,
        "evaluate_digits": digits_parser,
        "generate_dit": generation_parser,
        "plan_run": plan_parser,
    }
    for name, make in made.items():
        whole = make()
        yield name, whole
        for action in whole._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield from ((f"{name} {word}", one) for word, one in action.choices.items())


PARSERS = dict(parsers())


@pytest.mark.parametrize("name", PARSERS)
def test_either_spelling_is_the_option(name: str) -> None:
    parser = PARSERS[name]
    assert isinstance(parser, OptionParser)
    for option in parser._option_string_actions:
        for other in (f"--{option[2:].replace(*pair)}" for pair in (("_", "-"), ("-", "_"))):
            if option.startswith("--"):
                assert parser.spelled(other) == option
                assert parser.spelled(f"{other}=a_b-c") == f"{option}=a_b-c"


def test_values_and_shortened_options_keep_their_letters() -> None:
    parser = OptionParser()
    parser.add_argument("--max_size")
    parser.add_argument("--max-sizes-all")
    parser.add_argument("rest", nargs="*")
    for words in (["--max-size", "a-b_c"], ["--max_size=a-b_c"]):
        assert parser.parse_args(words).max_size == "a-b_c"
    assert parser.parse_args(["--max_sizes", "x"]).max_sizes_all == "x"  # the beginning of one
    assert parser.parse_args(["x", "--", "--max-size"]).rest == ["x", "--max-size"]
    with pytest.raises(SystemExit):
        parser.parse_args(["--min-size", "3"])


def test_what_is_typed_is_stronger_than_a_file_in_either_spelling(tmp_path: Path) -> None:
    (tmp_path / "o.yaml").write_text("num_steps: 5\nprompts-file: p.txt\n")
    known = generation_parser()
    words = ["--config", str(tmp_path / "o.yaml"), "--num-steps", "7", "--checkpoint-path", "c"]
    args = known.parse_args(with_file([*words, "--prompt", "a-b"], known))
    assert (args.num_steps, args.prompt, args.prompts_file) == (7, ["a-b"], None)


def test_every_command_has_such_a_parser() -> None:
    plain = set()
    for top in ("dit", "data_prep", "recipes", "benchmarks", "examples"):
        for file in (ROOT / top).rglob("*.py"):
            calls = (node for node in ast.walk(ast.parse(file.read_text())) if _makes_parser(node))
            plain |= {file.relative_to(ROOT).as_posix() for _ in calls}
    assert plain == {"dit/command_line.py"}


def _makes_parser(node: ast.AST) -> bool:
    """A call of ArgumentParser, or a class below it."""
    named = [node.func] if isinstance(node, ast.Call) else getattr(node, "bases", [])
    words = {getattr(one, "attr", None) or getattr(one, "id", None) for one in named}
    return "ArgumentParser" in words
