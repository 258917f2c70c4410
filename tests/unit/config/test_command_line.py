"""Flags beside overrides, and a --help=all that leaves nothing out."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from dit.config.checks import Problems
from dit.config_loading import ConfigError
from dit.config_loading.cli import Arguments, parse_arguments
from dit.config_loading.schema import Schema, is_group, record_type, sentences
from dit.models.dit.family import DitConfig
from recipes.runs import RECIPES, dit_s, dit_xl
from tests.tables import table

SCHEMA = Schema(DitConfig)


def parse(*argv: str) -> Arguments:
    return parse_arguments(argv, recipes=RECIPES)


def problems_of(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(*argv)
    return caught.value.problems


def test_no_arguments_are_the_default_recipe() -> None:
    assert parse() == Arguments(config=dit_xl(), dry_run=False, print_config=False)


def test_flags_and_overrides_in_any_order(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("rng: {seed: 1}\ntrain: {train_iters: 4}")
    for argv in (
        ["--config-file", str(file), "--mock", "rng.seed=2", "--dry-run"],
        ["rng.seed=2", "--mock", "--dry-run", f"--config-file={file}"],
        ["--rng.seed", "2", "--dry-run", "--config-file", str(file), "--mock"],
    ):
        arguments = parse(*argv)
        assert arguments.dry_run
        assert not arguments.print_config
        config = arguments.config
        assert (config.rng.seed, config.train.train_iters, config.dataset.mock) == (2, 4, True)


def test_recipe_and_dataset_path() -> None:
    arguments = parse("--recipe", "dit_s", "--dataset-path", "2024", "--print-config", "--debug")
    assert arguments.config.model == dit_s().model
    assert arguments.config.dataset.path == "2024"
    assert arguments.print_config


def test_an_explicit_key_beats_a_short_flag() -> None:
    config = parse("dataset.path=a", "--dataset-path", "b", "dataset.mock=false", "--mock").config
    assert (config.dataset.path, config.dataset.mock) == ("a", False)


def test_dashes_and_underscores_are_the_same(tmp_path, monkeypatch) -> None:
    (tmp_path / "a.yaml").write_text("train: {train_iters: 7}")
    monkeypatch.chdir(tmp_path)
    for words in (
        [
            "--config-file",
            "a.yaml",
            "--dataset-path",
            "d",
            "--dry-run",
            "--optimizer.weight-decay=2",
        ],
        ["--config_file=a.yaml", "--dataset_path", "d", "--dry_run", "optimizer.weight_decay=2"],
        [
            "--config_file",
            "a.yaml",
            "--dataset_path=d",
            "--dry_run",
            "--optimizer.weight-decay",
            "2",
        ],
    ):
        found = parse(*words)
        config = found.config
        assert found.dry_run and not found.print_config
        assert (config.train.train_iters, config.dataset.path) == (7, "d")
        assert config.optimizer.weight_decay == 2


def test_a_file_of_the_installed_package_is_found_from_anywhere(tmp_path, monkeypatch) -> None:
    """What lies here comes first."""
    monkeypatch.chdir(tmp_path)
    name = "conf/dit_digits.yaml"
    config = parse("--config-file", name).config
    assert config.checkpoint.save == "runs/digits/edm"
    (problem,) = problems_of("--config-file", name, "model.num_layers=x")
    assert "model.num_layers" in problem
    (problem,) = problems_of("--config-file", "conf/dit_digit.yaml")
    assert problem.startswith("conf/dit_digit.yaml: cannot be read (No such file")
    (tmp_path / "conf").mkdir()
    (tmp_path / name).write_text("checkpoint: {save: mine}")
    assert parse("--config-file", name).config.checkpoint.save == "mine"


@pytest.mark.parametrize(("argv", "expected"), table(__file__, "unknown_flags"))
def test_unknown_flags_name_the_nearest(argv: list[str], expected: str) -> None:
    (problem,) = problems_of(*argv)
    assert problem.startswith(expected)


def test_bytes_that_are_no_text_are_named_with_the_locale() -> None:
    (problem,) = problems_of("checkpoint.save=/runs/\udcc3\udca9")
    assert "has bytes that are not UTF-8" in problem and "LC_ALL=C.UTF-8" in problem


def test_problems_of_flags_and_keys_come_together() -> None:
    found = problems_of("--mok", "--recipe", "x", "rng.sed=3", "rng.seed=-1", "--nope")
    starts = [problem.split()[0] for problem in found]
    assert starts == ["--mok", "--nope", "argument", "rng.sed=3", "rng:"]


def test_help_lists_every_key_with_its_sentence(capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        parse("--help=all")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    flat = " ".join(text.split()).replace("- ", "-")  # lines are broken behind hyphens
    for key in SCHEMA.all_keys():
        group, _, name = key.partition(".")
        sentence = sentences(SCHEMA.groups[group])[name]
        assert f" {key} " in flat
        assert sentence.replace("- ", "-") in flat
    for flag in ("--config-file", "--mock", "--dry-run", "--print-config", "--dataset-path"):
        assert flag in text
    assert max(len(line) for line in text.splitlines()) <= 120


def test_help_shows_the_keys_that_people_set_first(capsys) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    text = capsys.readouterr().out
    shown = [key for key in SCHEMA.all_keys() if f"  {key} = " in text]
    assert len(shown) == 10 and {"checkpoint.load_hf", "dataset.path", "lora.rank"} < {*shown}
    assert sentences(SCHEMA.groups["optimizer"])["lr"] in " ".join(text.split())
    assert "--config-file" in text and "--help=all" in text and "rng:" not in text


def test_every_field_has_a_sentence() -> None:
    groups = [kind for kind in SCHEMA.groups.values() if is_group(kind)]
    records = [record_type(SCHEMA.type_of(key)) for key in SCHEMA.all_keys()]
    for group in [*groups, *(record for record in records if record)]:
        named = sentences(group)
        assert [f.name for f in fields(group) if not named.get(f.name)] == []


def test_a_dry_run_refuses_a_network_that_only_generates() -> None:
    from recipes import pretrain_dit

    words = ["--dry-run", "--mock", "model.name=hunyuanvideo_15", "model.use_meanflow=true"]
    with pytest.raises(Problems, match=r"model\.use_meanflow=true: .* distilled"):
        pretrain_dit.main(words)
