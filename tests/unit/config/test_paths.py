"""Paths in a configuration: which keys are paths, and how each is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dit.config import RunConfig
from dit.config_loading import ConfigError, load_config, read_config, save_config, to_yaml
from dit.config_loading.load import default_config
from dit.config_loading.schema import Schema, hints, path_keys, record_type
from dit.local_path import data_place, local_text, store_address
from dit.models.registry import families

TEXTS = {
    *("model.name", "model.family", "objective.name", "validation.negative_prompt"),
    *("validation.sets.0.name", "optimizer.groups.0.pattern", "logger.wandb_project"),
    *("logger.wandb_exp_name", "logger.wandb_entity", "logger.mlperf_org"),
}
"""Keys with a text that is no path. A new key of type text is a path, or belongs here."""


NEEDED = {
    "validation.feature_extractor": ("validation.num_captions=2",),
    "lora.frozen_adapter": ("lora.rank=2",),
}


def loaded(*overrides: str, file: Path | None = None) -> RunConfig:
    return load_config(default_config(), config_file=file, overrides=overrides)


def problems(*overrides: str, file: Path | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        loaded(*overrides, file=file)
    return caught.value.problems


def keys_of(kind: Any, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    """Dotted key, the function that reads it as a path or None, and the type of each key."""
    for name, item in hints(kind).items():
        key = f"{prefix}.{name}"
        if record := record_type(item):
            yield from keys_of(record, f"{key}.0")
        yield key, path_keys(kind).get(name), item


ALL = {
    key: read
    for family in families()
    for group, kind in Schema(family.config).groups.items()
    for key, read, item in keys_of(kind, group)
    if item in (str, str | None)
}
PATHS = {key: read for key, read in ALL.items() if read is not None}


def test_every_text_is_a_path_or_known_to_be_none() -> None:
    assert {key for key, read in ALL.items() if read is None} == TEXTS


def written(key: str, text: str) -> tuple[str, str]:
    """A key and its value as they stand on a command line; of a list its first entry."""
    name, _, inner = key.partition(".0.")
    entry = {inner: text} | ({"name": "x"} if "sets" in key else {})
    return name, json.dumps([entry] if inner else text)


@pytest.mark.parametrize("key", sorted(PATHS.keys() - {"checkpoint.mirror"}))
def test_every_path_is_read_as_on_a_command_line(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a file and on the command line alike; an error names the key and its place."""
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "run.yaml"
    refused = {local_text: "is an address", data_place: "is an address of an unknown kind"}
    for text, said in (
        ("s3://bucket/x", refused[PATHS[key]]),
        ("msc:/profile/x", refused[PATHS[key]]),
        ("$NOWHERE/x", "nothing replaces $NOWHERE here"),
        ("None", "write null for no value, or leave it out"),
    ):
        name, value = written(key, text)
        group, _, leaf = name.partition(".")
        file.write_text(f"{group}:\n  {leaf}: {value}\n")
        label = key.replace(".0.", "[0].")
        here, *_ = problems(f"{name}={value}")
        assert here.startswith(f"{label} (command line): ") and said in here
        there, *_ = problems(file=file)
        assert there == here.replace("command line", f"{file}:2")
    name, value = written(key, "~/a:b")
    config = loaded(f"{name}={value}", *NEEDED.get(key, ()))
    assert f": {tmp_path}/a:b" in to_yaml(config)


def test_data_are_read_at_addresses_of_energon() -> None:
    found = {key for key, read in PATHS.items() if read is data_place}
    assert found == {"dataset.path", "dataset.blend.0.path", "validation.sets.0.path"}
    assert loaded("dataset.path=msc://profile/data").dataset.path == "msc://profile/data"
    assert PATHS["checkpoint.mirror"] is store_address  # tests/unit/train/test_mirror.py


def test_a_saved_file_is_of_the_machine_that_saved_it(tmp_path: Path) -> None:
    """Paths of another machine, and those that earlier versions took, must not end a resume."""
    config = default_config()
    places = {"save": "~nobody-here/$RUN", "load": "None", "load_hf": None}
    config = replace(config, checkpoint=replace(config.checkpoint, **places))
    config = replace(config, dataset=replace(config.dataset, path="s3://bucket/0_9_"))
    config = replace(config, logger=replace(config.logger, wandb_exp_name="0100"))
    save_config(config, tmp_path / "config.yaml")
    assert read_config(tmp_path / "config.yaml") == config
    assert len(problems(file=tmp_path / "config.yaml")) == 3


def test_pythons_none_is_no_text_and_no_number() -> None:
    (problem,) = problems("logger.wandb_project=None")
    assert "None would be read as the name of a file: write null for no value" in problem
    (problem,) = problems("train.epochs=None")
    assert problem.endswith('epochs="None" (command line): expected a number or null; write null')
    assert loaded("validation.negative_prompt=None").validation.negative_prompt == "None"


def test_numbers_begin_with_no_zero(tmp_path: Path) -> None:
    """YAML 1.1 takes 0100 for 64, YAML 1.2 for 100."""
    (problem,) = problems("checkpoint.save_interval=0100")
    assert "0100 begins with a zero" in problem and "write 100, or quotes around a text" in problem
    (tmp_path / "run.yaml").write_text("rng:\n  seed: 0900\n")
    (problem,) = problems(file=tmp_path / "run.yaml")
    assert problem.startswith(f"{tmp_path}/run.yaml:2: 0900 begins with a zero")
    assert loaded("logger.wandb_exp_name='0100'").logger.wandb_exp_name == "0100"


def test_a_variable_of_the_shell_is_offered(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("RUNS", "/big/runs")
    (tmp_path / "run.yaml").write_text("checkpoint: {save: runs/x}\n")
    (problem,) = problems("checkpoint.save=${RUNS}/x", file=tmp_path / "run.yaml")
    assert problem.startswith('checkpoint.save="${RUNS}/x" (command line): ')
    assert problem.endswith("; ${oc.env:RUNS} is the variable of the shell")
    assert loaded("checkpoint.save=${oc.env:RUNS}/x").checkpoint.save == "/big/runs/x"
