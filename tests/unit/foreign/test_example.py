"""The example of docs/coming_from.md: diffusion-pipe's file, the command, and the file of ours."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dit.config_loading.cli import parse_arguments
from dit.foreign.__main__ import main
from recipes.runs import RECIPES
from tests.doc_commands import blocks, commands, script_call

PAGE = "coming_from.md"


def _words(root: Path, program: str) -> list[str]:
    """What the page gives a program of the example."""
    (call,) = (
        script_call(one.words)
        for one in commands(root)
        if one.page == PAGE and program in one.words and "ours.yaml" in one.words
    )
    assert call is not None
    return call[1]


def test_the_example_becomes_the_file_below_it(
    repo_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Every key of theirs is read, or named with the reason; the page trains the file of ours."""
    page = repo_root / "docs" / PAGE
    (theirs,), (ours,) = (blocks(page, language).items() for language in ("toml", "yaml"))
    monkeypatch.chdir(tmp_path)
    Path(theirs[0]).write_text(theirs[1])
    main(_words(repo_root, "dit.foreign"))
    written = capsys.readouterr().out
    assert yaml.safe_load(written) == yaml.safe_load(ours[1])
    keys = [line.split(" = ")[0] for line in theirs[1].splitlines() if " = " in line]
    # Of the optimizer, the names of two keys are the same here.
    assert sum(
        ": read as " in line or ": read, not used" in line for line in written.splitlines()
    ) == (len(keys) - 2)
    Path(ours[0]).write_text(written)
    config = parse_arguments(_words(repo_root, "recipes/pretrain_dit.py"), recipes=RECIPES).config
    assert config.lora.rank == 32 and config.dataset.path == "data/flux"
