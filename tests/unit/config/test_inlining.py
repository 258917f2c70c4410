"""Groups whose keys stand in the outer group: two forms of the same values."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest
from pydantic import TypeAdapter

from dit.config import EdmConfig, FlowConfig, ObjectiveConfig, RunConfig
from dit.config.inlining import INLINED, flattened, key_path, key_types, nested, value_of
from dit.config_loading import load_config, to_yaml
from dit.config_loading.validate import plain
from tests.packs import run_config

Options = TypeVar("Options")


@dataclass(frozen=True, kw_only=True)
class Deep:
    depth: int = 1


@dataclass(frozen=True, kw_only=True)
class Wide:
    width: int = 2
    deep: Deep = field(default_factory=Deep, metadata=INLINED)


@dataclass(frozen=True, kw_only=True)
class Twice:
    depth: int = 0
    deep: Deep = field(default_factory=Deep, metadata=INLINED)


@dataclass(frozen=True, kw_only=True)
class Chosen(Generic[Options]):
    """A group whose inlined part is chosen by an argument of its type."""

    name: str = "a"
    options: Options = field(metadata=INLINED)
    last: int = 0


@dataclass(frozen=True, kw_only=True)
class Tree(Generic[Options]):
    chosen: Chosen[Options]


def test_keys_stand_where_the_field_is() -> None:
    names = list(key_types(ObjectiveConfig))
    assert names[:3] == ["name", "loss", "huber_c"]
    assert names[7:10] == ["given_frames", "guidance", "sigma_data"]
    assert names[15] == "density" and names[-1] == "level_range"
    assert not {"edm", "flow"} & set(names)
    assert list(key_types(Chosen[Wide])) == ["name", "width", "depth", "last"]
    assert key_types(Chosen[Wide])["depth"] is int


def test_two_forms_of_the_same_values() -> None:
    flat = {"chosen": {"name": "b", "width": 3, "depth": 4, "last": 5, "unknown": 6}}
    deep = nested(Tree[Wide], flat)
    assert deep == {
        "chosen": {
            "name": "b",
            "options": {"width": 3, "deep": {"depth": 4}},
            "last": 5,
            "unknown": 6,
        }
    }
    assert flattened(Tree[Wide], deep) == flat
    del flat["chosen"]["unknown"]
    made = TypeAdapter(Tree[Wide]).validate_python(nested(Tree[Wide], flat))
    assert made == Tree(chosen=Chosen(name="b", options=Wide(width=3, deep=Deep(depth=4)), last=5))
    assert value_of(made.chosen, "depth") == 4 and value_of(made.chosen, "name") == "b"
    assert key_path(Tree[Wide], ("chosen", "options", "deep", "depth")) == ("chosen", "depth")
    assert key_path(Tree[Wide], ("chosen", "last")) == ("chosen", "last")


def test_a_key_of_two_groups_is_refused() -> None:
    with pytest.raises(TypeError, match="has the keys depth twice"):
        key_types(Twice)


def test_a_configuration_survives_yaml(tmp_path: Path) -> None:
    options = ObjectiveConfig(edm=EdmConfig(rho=3.0), flow=FlowConfig(flow_shift=2.0))
    config = run_config(objective=options)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_config(run_config(), config_file=tmp_path / "config.yaml") == config


def test_plain_values_and_asdict_have_the_same_keys() -> None:
    values: dict[str, Any] = flattened(RunConfig, asdict(run_config()))
    assert {group: set(keys) for group, keys in values.items()} == {
        group: set(keys) for group, keys in plain(run_config()).items()
    }


def test_every_problem_of_a_group_and_its_inlined_groups_is_told_at_once() -> None:
    wrong = ["objective.sigma_min=90", "objective.rho=-1", "objective.text_dropout=2"]
    wrong += ["objective.p_std=x", "objective.flow_shift=0", "objective.density=uniforn"]
    with pytest.raises(ValueError) as found:
        load_config(run_config(), overrides=wrong)
    said = str(found.value)
    for key in ("sigma_min=90.0", "rho=-1.0", "text_dropout=2.0", "flow_shift=0.0"):
        assert f"objective: {key} must" in said, key
    assert 'objective.p_std="x" (command line): expected a number' in said
    assert "did you mean uniform?" in said and "6 problems" in said
