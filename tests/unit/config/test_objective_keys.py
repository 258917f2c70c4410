"""Keys of `objective`: those of EDM and of flow matching stand beside the common ones."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from dit.config import ObjectiveConfig
from dit.config_loading import load_config, to_yaml
from dit.config_loading.schema import hints
from dit.config_loading.validate import plain
from tests.packs import run_config


def test_keys_of_all_objectives_come_first() -> None:
    names = list(hints(ObjectiveConfig))
    assert names[:3] == ["name", "loss", "huber_c"]
    assert names[7:10] == ["given_frames", "second_level_rate", "guidance"]
    assert names[12:15] == ["drift_weight", "preference", "dpo_beta"]
    assert names[21] == "prediction" and names[-1] == "level_range"


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
