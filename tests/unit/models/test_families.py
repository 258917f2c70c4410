"""The seam for model families: keys, sizes and errors of one that tests register."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dit.config import Problems
from dit.config_loading import ConfigError, changes, load_config, read_config, save_config, to_yaml
from dit.config_loading.cli import parse_arguments
from dit.models.dit.family import DitConfig
from dit.models.registry import (
    VARIABLE,
    diffusers_classes,
    families,
    family_named,
    family_of,
    named_model,
)
from dit.train.checkpoint.without_tensors import _different, _of_weights
from dit.train.model_and_optimizer import initialise_weights
from recipes.runs import RECIPES, dit_debug, dit_s, dit_xl
from tests.odd_family import PLACE, OddConfig
from tests.packs import run_config, tiny_model


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, PLACE)


def refused(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(dit_xl(), overrides=overrides)
    return caught.value.problems


def test_each_class_of_diffusers_is_of_the_family_that_has_it(odd: None) -> None:
    forms = {one.name: one.diffusers() for one in families() if one.diffusers is not None}
    assert diffusers_classes() == {form.class_name: name for name, form in forms.items()}
    assert "odd" in forms


@pytest.mark.parametrize(
    ("size", "codec"),
    [
        ("dit_xl", "cosmos"),
        ("cosmos_7b", "cosmos"),
        ("cosmos_predict2_2b", "cosmos_predict2"),
        ("cosmos_predict2_14b_video2world", "cosmos_predict2"),
        ("cosmos_predict2.5_2b", "cosmos_predict25"),
        ("anima", "anima"),
        ("wan2.2_ti2v_5b", "wan"),
    ],
)
def test_the_vae_is_that_of_the_size(size: str, codec: str) -> None:
    model = named_model(size)
    assert family_of(model).vae(model) == codec


def test_weights_that_start_at_zero_are_those_of_the_family(groups) -> None:
    model = tiny_model(crossattn_proj_size=24)
    network = family_of(model).network()(model, groups)
    initialise_weights(network, run_config(model=model))
    for name, weight in network.named_parameters():
        zero = name.endswith("proj_out.weight") or ("modulate" in name and "linear_2" in name)
        assert zero or name.endswith(".bias") or "pos_emb" in name or weight.any(), name
        assert not (zero and weight.any()), name


def test_a_family_chooses_the_keys_of_the_model(odd: None) -> None:
    config = load_config(dit_xl(), overrides=["model.family=odd", "model.pooled_size=4"])
    assert config.model == OddConfig(pooled_size=4)
    # What the family sets for the objective lies below explicit keys.
    assert (config.objective.name, config.model.num_single_layers) == ("flow", 2)
    explicit = load_config(dit_xl(), overrides=["model.family=odd", "objective.name=edm"])
    assert explicit.objective.name == "edm"
    # The model of a recipe gives way whole, and the rest of the recipe stays.
    assert load_config(dit_debug(), overrides=["model.family=odd"]).model == OddConfig()
    assert load_config(dit_debug(), overrides=["model.family=odd"]).dataset == dit_debug().dataset


def test_a_named_size_implies_its_family(odd: None) -> None:
    model = load_config(dit_s(), overrides=["model.name=odd_s", "model.num_layers=5"]).model
    assert model == OddConfig(name="odd_s", num_single_layers=3, num_layers=5)
    same = load_config(dit_s(), overrides=["model.family=odd", "model.name=odd_s"]).model
    assert same == replace(model, num_layers=2)
    assert load_config(run_config(model=model), overrides=["model.name=dit_b"]).model == (
        named_model("dit_b")
    )


def test_a_named_size_sets_keys_of_the_objective_below_explicit_ones(
    odd: None, tmp_path: Path
) -> None:
    expert = load_config(dit_s(), overrides=["model.name=odd_expert"])
    flow = expert.objective
    assert (flow.level_range, flow.flow_shift) == ((0.875, 1.0), 5.0)
    low = ["objective.level_range=[0, 0.875]", "model.name=odd_expert"]
    other = load_config(dit_s(), overrides=low).objective
    assert (other.level_range, other.flow_shift) == ((0.0, 0.875), 5.0)
    plain = load_config(dit_s(), overrides=["model.name=odd_s"]).objective
    assert (plain.level_range, plain.flow_shift) == (None, 3.0)
    everything = load_config(
        dit_s(), overrides=["model.name=odd_expert", "objective.level_range=null"]
    )
    save_config(everything, tmp_path / "config.yaml")
    assert read_config(tmp_path / "config.yaml") == everything


def test_a_size_and_a_family_that_disagree_are_an_error(odd: None) -> None:
    (problem,) = refused("model.family=dit", "model.name=odd_s")
    assert "model.name=odd_s (command line) is a size of family odd" in problem
    assert "model.family=dit (command line)" in problem


def test_keys_of_another_family_name_both(odd: None) -> None:
    (problem,) = refused("model.num_single_layers=3")
    assert problem.startswith("model.num_single_layers=3 (command line): is a key of family flux")
    assert "model.family=dit has adaln_lora_dim" in problem
    problems = refused("model.family=odd", "model.adaln_lora_dim=8", "model.pooled_siz=2")
    assert "is a key of family dit; model.family=odd has num_single_layers" in problems[0]
    assert "did you mean model.pooled_size?" in problems[1]


def test_an_unknown_family_is_named_with_those_there_are() -> None:
    (problem,) = refused("model.family=wan_9")
    assert "model.family=wan_9 is not a known family; use dit" in problem
    assert "(command line)" in problem
    (problem,) = refused("model.family=null")
    assert "not a known family" in problem


def test_no_configuration_names_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not a known family" in refused("model.family=tests.odd_family:FAMILY")[0]
    monkeypatch.setenv(VARIABLE, "tests.odd_family")
    with pytest.raises(Problems, match="does not have the form name=module:attribute"):
        family_named("dit")


def test_a_class_describes_one_family() -> None:
    with pytest.raises(Problems, match="family=odd does not fit DitConfig"):
        DitConfig(family="odd")


def test_a_saved_configuration_of_any_family_is_read_back(odd: None, tmp_path: Path) -> None:
    config = load_config(dit_xl(), overrides=["model.name=odd_s"])
    save_config(config, tmp_path / "config.yaml")
    assert read_config(tmp_path / "config.yaml") == config
    order = [line.split(":")[0].strip() for line in to_yaml(config).splitlines()[1:8]]
    assert order[:5] == ["name", "family", "num_layers", "num_single_layers", "hidden_size"]


def test_an_older_configuration_names_no_family(tmp_path: Path) -> None:
    save_config(dit_s(), tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(text.replace("  family: dit\n", ""))
    assert read_config(tmp_path / "config.yaml") == dit_s()


def test_configurations_of_two_families_can_be_compared(odd: None) -> None:
    other = load_config(dit_s(), overrides=["model.name=odd_s"])
    found = changes(dit_s(), other).values()
    assert 'model.family "dit" -> "odd"' in found
    assert "model.adaln_lora_dim 256 -> null" in found
    text = _different(_of_weights(dit_s().model), _of_weights(other.model))
    assert "model.family: dit in the checkpoint, odd here" in text


def test_help_shows_the_keys_of_a_recipes_family(odd: None, capsys) -> None:
    recipe = load_config(dit_s(), overrides=["model.name=odd_s"])
    with pytest.raises(SystemExit):
        parse_arguments(["--help=all"], recipes={**RECIPES, "odd": lambda: recipe}, default="odd")
    shown = capsys.readouterr().out
    assert "model.pooled_size = 8    [an integer]" in shown and "model.adaln" not in shown
    assert "Width of the pooled text." in shown and "Transformer layers." in shown


def test_a_process_of_its_own_knows_a_registered_family(tmp_path: Path) -> None:
    code = (
        "import sys; from dit.config_loading import load_config; from recipes.runs import dit_s;"
        "print(type(load_config(dit_s(), overrides=['model.name=odd_s']).model).__name__);"
        "sys.exit('torch' in sys.modules or 'megatron' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, VARIABLE: PLACE},
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.returncode) == ("OddConfig\n", 0), done.stderr


def test_a_configuration_in_our_own_keys_reads_no_table_of_other_tools(tmp_path: Path) -> None:
    save_config(dit_s(), tmp_path / "run.yaml")
    code = (
        "import sys; from recipes.runs import RECIPES;"
        "from dit.config_loading.cli import parse_arguments;"
        f"parse_arguments(['--mock', '--config-file', {str(tmp_path / 'run.yaml')!r},"
        " '--recipe', 'dit_s', 'train.train_iters=5', '--rng.seed', '3', '~rng.seed'],"
        " recipes=RECIPES);"
        "sys.exit('; '.join(n for n in sys.modules if n.startswith('dit.foreign')) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
