"""Keys of `objective`, and keys of all groups that have an effect beside other settings alone."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from dit.config import ObjectiveConfig
from dit.config_loading import load_config, to_yaml
from dit.config_loading.dependencies import NEEDS
from dit.config_loading.schema import Schema, hints
from dit.config_loading.validate import plain
from dit.models.registry import families
from tests.packs import run_config


def test_keys_of_all_objectives_come_first() -> None:
    names = list(hints(ObjectiveConfig))
    assert names[:3] == ["name", "loss", "huber_c"]
    assert names[7:9] == ["given_frames", "sound_levels"]
    assert names[13:16] == ["given_text_dropout", "second_level_rate", "guidance"]
    assert names[18:21] == ["drift_weight", "preference", "dpo_beta"]
    assert names[27] == "prediction" and names[-1] == "level_range"


def test_a_configuration_survives_yaml(tmp_path: Path) -> None:
    config = run_config(objective=ObjectiveConfig(rho=3.0, flow_shift=2.0))
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_config(run_config(), config_file=tmp_path / "config.yaml") == config


def test_plain_values_and_asdict_have_the_same_keys() -> None:
    values = asdict(run_config())
    assert {group: set(keys) for group, keys in values.items()} == {
        group: set(keys) for group, keys in plain(run_config()).items()
    }


def test_every_problem_of_a_group_is_told_at_once() -> None:
    wrong = ["objective.sigma_min=90", "objective.rho=-1", "objective.text_dropout=2"]
    wrong += ["objective.p_std=x", "objective.flow_shift=0", "objective.density=uniforn"]
    with pytest.raises(ValueError) as found:
        load_config(run_config(), overrides=wrong)
    said = str(found.value)
    for key in ("sigma_min=90.0", "rho=-1.0", "text_dropout=2.0", "flow_shift=0.0"):
        assert f"objective: {key} must" in said, key
    assert 'objective.p_std="x" (command line): expected a number' in said
    assert "did you mean uniform?" in said and "6 problems" in said


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (["ema.decay=0.99"], "ema.decay (command line): not used without ema.kind=constant"),
        (["ema.decay=0.99", "ema.kind=constant"], None),
        (
            ["lora.alpha=4", "lora.targets=[mlp]"],
            "lora.alpha (command line), lora.targets (command line): not used without lora.rank",
        ),
        (["lora.alpha=4", "lora.rank=4"], None),
        (["lora.alpha=4", "lora.init_from=file"], None),
        (["lora.targets=[mlp]", "lora.init_from=file"], "not used without lora.init_from=null"),
        (
            ["objective.name=flow", "objective.rho=5"],
            "without objective.sampling_levels=karras",
        ),
        (["objective.name=flow", "objective.rho=5", "objective.sampling_levels=karras"], None),
        (["optimizer.muon_steps=9"], "not used without optimizer.kind=muon"),
        (
            ["optimizer.groups=[{pattern: '*', kind: adamw}]", "optimizer.muon_steps=9"],
            "optimizer.muon_steps (command line), optimizer.groups[0].kind (command line): not used"
            " without optimizer.kind=muon",
        ),
        (["optimizer.groups=[{pattern: '*', kind: adamw}]", "optimizer.kind=muon"], None),
        (["model.cp_comm_type=all_gather"], "not used without model.context_parallel_size=2"),
        (["model.cp_comm_type=all_gather", "model.context_parallel_size=4"], None),
        (["model.route_rate=0.25"], "not used without model.route_from"),
        (["objective.p_mean=1"], None),
        (["objective.name=flow", "objective.p_mean=1"], "not used without objective.name=edm"),
        (
            ["objective.max_shift=2"],
            "without objective.name=flow and objective.time_shift_type=exponential",
        ),
        (["model.name=flux1_dev", "objective.name=edm"], None),  # what a size implies is no wish
        (["optimizer.min_lr=0", "scheduler.lr_decay_style=constant"], None),  # changes nothing
    ],
)
def test_keys_without_the_setting_that_they_need_are_named(
    caplog: pytest.LogCaptureFixture, tokens: list[str], said: str | None
) -> None:
    load_config(run_config(), overrides=tokens)
    (found,) = caplog.messages or [""]
    assert said in found if said else not found


def test_every_dependency_is_of_keys_that_there_are() -> None:
    known = {key for one in families() for key in Schema(one.config).all_keys()}
    needs = {key for wanted in NEEDS.values() for key in wanted}
    assert NEEDS.keys() | needs <= known
