"""Precedence, every form of override, interpolation, named sizes, and the way back to YAML."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dit.config import (
    BlendEntry,
    CheckpointConfig,
    DatasetConfig,
    LoggerConfig,
    MockGeometry,
    Precision,
    RngConfig,
)
from dit.config_loading import load_config, read_config, save_config, to_yaml
from dit.models.dit.family import MODEL_SIZES, ExtraPosition
from recipes.runs import RECIPES, dit_b, dit_s
from tests.packs import run_config


@pytest.fixture
def yaml_file(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return write


def test_command_line_beats_file_beats_recipe(yaml_file) -> None:
    file = yaml_file("train: {train_iters: 7, eval_iters: 3}")
    config = load_config(run_config(), config_file=file, overrides=["train.train_iters=5"])
    assert (config.train.train_iters, config.train.eval_iters) == (5, 3)
    assert config.train.eval_interval == run_config().train.eval_interval


def test_nothing_to_change_is_the_recipe() -> None:
    assert load_config(dit_s()) == dit_s()


@pytest.mark.parametrize(
    "tokens",
    [
        ["train.train_iters=5"],
        ["+train.train_iters=5"],
        ["++train.train_iters=5"],
        ["--train.train_iters", "5"],
        ["--train.train_iters=5"],
        ["train={train_iters: 5}"],
        ["train.train_iters=9", "train.train_iters=5"],
    ],
)
def test_every_form_of_override_sets_the_key(tokens: list[str]) -> None:
    assert load_config(run_config(), overrides=tokens).train.train_iters == 5


def test_tilde_goes_back_to_the_recipe(yaml_file) -> None:
    file = yaml_file("train: {train_iters: 7, eval_iters: 3}\noptimizer: {lr: 0.5}")
    recipe = replace(run_config(), rng=RngConfig(seed=9))
    config = load_config(
        recipe, config_file=file, overrides=["rng.seed=1", "~rng.seed", "~train.train_iters"]
    )
    assert config.rng.seed == 9
    assert config.train.train_iters == recipe.train.train_iters
    assert config.train.eval_iters == 3
    assert load_config(recipe, config_file=file, overrides=["~train"]).train == recipe.train


def test_a_setting_after_tilde_counts() -> None:
    assert load_config(run_config(), overrides=["~rng.seed", "rng.seed=3"]).rng.seed == 3


@pytest.mark.parametrize(
    ("token", "group", "name", "value"),
    [
        ("optimizer.lr=1e-4", "optimizer", "lr", 1e-4),
        ("optimizer.lr=1", "optimizer", "lr", 1.0),
        ("dataset.mock=true", "dataset", "mock", True),
        ("dataset.mock=False", "dataset", "mock", False),
        ("checkpoint.load=null", "checkpoint", "load", None),
        ("checkpoint.save=a=b", "checkpoint", "save", "a=b"),
        ("checkpoint.save='5'", "checkpoint", "save", "5"),
        ("checkpoint.save=", "checkpoint", "save", None),
        ("model.rope_scale=[2,1,1]", "model", "rope_scale", (2.0, 1.0, 1.0)),
        ("model.rope_scale.0=2", "model", "rope_scale", (2.0, 1.0, 1.0)),
        ("model.rope_scale[0]=2", "model", "rope_scale", (2.0, 1.0, 1.0)),
        ("model.precision=fp32", "model", "precision", Precision.FP32),
        ("dataset.blend=[{path: a}]", "dataset", "blend", (BlendEntry(path="a"),)),
    ],
)
def test_values_are_yaml(token: str, group: str, name: str, value: object) -> None:
    found = getattr(getattr(load_config(run_config(), overrides=[token]), group), name)
    assert found == value
    assert type(found) is type(value)


def test_one_record_of_a_list_can_be_changed() -> None:
    config = load_config(run_config(), overrides=["dataset.mock_samples.0.width=32"])
    assert config.dataset.mock_samples == (MockGeometry(width=32),)


def test_interpolation(yaml_file, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setenv("RUN_NAME", "seven")
    file = yaml_file(
        """
        checkpoint: {save: "${dataset.path}/run", load: "${oc.env:NOT_SET,null}"}
        logger: {wandb_project: p, wandb_exp_name: "${oc.env:RUN_NAME}-${rng.seed}"}
        optimizer: {min_lr: "${optimizer.lr}"}
        """
    )
    config = load_config(
        run_config(), config_file=file, overrides=["dataset.path=/d", "rng.seed=3"]
    )
    assert config.checkpoint.save == "/d/run"
    assert config.checkpoint.load is None
    assert config.logger.wandb_exp_name == "seven-3"
    assert config.optimizer.min_lr == config.optimizer.lr
    said = [record.getMessage() for record in caplog.records]
    assert [line.partition("=")[0] for line in said] == ["checkpoint.load", "logger.wandb_exp_name"]
    assert all(line.endswith(": read from the environment") for line in said)
    assert "seven" not in caplog.text


def test_an_empty_file_or_group_changes_nothing(yaml_file) -> None:
    assert load_config(run_config(), config_file=yaml_file("")) == run_config()
    assert load_config(run_config(), config_file=yaml_file("# all\noptimizer:\n  # lr: 1")) == (
        run_config()
    )


@pytest.mark.parametrize("name", MODEL_SIZES)
def test_named_sizes(name: str) -> None:
    model = load_config(run_config(), overrides=[f"model.name={name}"]).model
    assert {key: getattr(model, key) for key in MODEL_SIZES[name]} == MODEL_SIZES[name]


def test_sizes_of_the_design() -> None:
    sizes = {
        name: (size["num_layers"], size["hidden_size"], size["num_attention_heads"])
        for name, size in MODEL_SIZES.items()
    }
    assert sizes == {
        "dit_s": (12, 384, 6),
        "dit_b": (12, 768, 12),
        "dit_l": (24, 1024, 16),
        "dit_xl": (28, 1152, 16),
        "cosmos_7b": (28, 4096, 32),
        "cosmos_14b": (36, 5120, 40),
        "cosmos_predict2_2b": (28, 2048, 16),
        "cosmos_predict2_14b": (36, 5120, 40),
        "cosmos_predict2_2b_video2world": (28, 2048, 16),
        "cosmos_predict2_14b_video2world": (36, 5120, 40),
        "cosmos_predict2.5_2b": (28, 2048, 16),
        "cosmos_predict2.5_14b": (36, 5120, 40),
        "anima": (28, 2048, 16),
    }
    cosmos = load_config(run_config(), overrides=["model.name=cosmos_7b"]).model
    assert cosmos.extra_pos_embed is ExtraPosition.LEARNABLE
    assert (cosmos.text_pad_to, cosmos.rope_scale) == (512, (2.0, 1.0, 1.0))
    assert cosmos.concat_padding_mask


def test_an_explicit_key_of_the_same_or_a_stronger_level_beats_the_size(yaml_file) -> None:
    file = yaml_file("model: {num_layers: 3, name: dit_s}")
    same = load_config(run_config(), config_file=file).model
    assert (same.num_layers, same.hidden_size) == (3, 384)
    stronger = load_config(run_config(), config_file=file, overrides=["model.num_layers=4"]).model
    assert (stronger.num_layers, stronger.hidden_size) == (4, 384)
    either_order = ["model.num_layers=4", "model.name=dit_l"]
    for tokens in (either_order, either_order[::-1]):
        assert load_config(run_config(), overrides=tokens).model.num_layers == 4


def test_a_stronger_size_beats_a_weaker_key_and_says_so(yaml_file, caplog) -> None:
    file = yaml_file("model:\n  num_layers: 3\n  mlp_ratio: 2.0")
    with caplog.at_level(logging.WARNING):
        model = load_config(run_config(), config_file=file, overrides=["model.name=dit_l"]).model
    assert (model.num_layers, model.hidden_size, model.mlp_ratio) == (24, 1024, 2.0)
    assert "model.num_layers=3" in caplog.text
    assert "gives way" in caplog.text


def test_tilde_leaves_the_size_in_place() -> None:
    tokens = ["model.name=dit_s", "model.num_layers=3", "~model.num_layers"]
    assert load_config(run_config(), overrides=tokens).model.num_layers == 12


def test_a_size_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIZE", "dit_b")
    config = load_config(run_config(), overrides=["model.name=${oc.env:SIZE,dit_s}"])
    assert config.model == dit_b().model
    monkeypatch.delenv("SIZE")
    config = load_config(run_config(), overrides=["model.name=${oc.env:SIZE,dit_s}"])
    assert config.model == dit_s().model


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_survive_the_way_through_a_file(name: str, tmp_path: Path) -> None:
    config = RECIPES[name]()
    save_config(config, tmp_path / "config.yaml")
    assert read_config(tmp_path / "config.yaml") == config


positive = st.floats(1e-3, 1e6)
# Pieces from which OmegaConf's own syntax arises, beside letters of any kind.
pieces = st.sampled_from(
    ["${", "}", "\\", "$", "{", "???", "?", "oc.env:HOME", "'", ":", "rng.seed"]
)
words = st.lists(pieces | st.characters(codec="utf-8", exclude_characters="\0"), max_size=12).map(
    "".join
)
text = st.none() | words


AWKWARD = [
    "???",
    r"\???",
    "${rng.seed}",
    r"\${rng.seed}",
    r"\\${rng.seed}",
    "${oc.env:HOME}",
    "${eval:1}",
    "$${x",
    "${",
    "${a}\\",
]


@pytest.mark.parametrize("text", AWKWARD)
def test_text_that_looks_like_a_reference_stays_text(text: str, tmp_path: Path) -> None:
    config = run_config(
        dataset=DatasetConfig(path=text), checkpoint=CheckpointConfig(save=text, load="x")
    )
    blend = run_config(dataset=DatasetConfig(blend=(BlendEntry(path=text), BlendEntry(path="b"))))
    for run in (config, blend):
        save_config(run, tmp_path / "config.yaml")
        assert read_config(tmp_path / "config.yaml") == run
        assert load_config(run) == run  # a recipe is meant word for word, too
    referring = load_config(config, overrides=["logger.wandb_exp_name=${dataset.path}"])
    assert referring.logger.wandb_exp_name == text


@pytest.mark.parametrize(
    ("written", "meant"),
    [(r"\???", "???"), (r"\${rng.seed}", "${rng.seed}"), (r"\${a} ${rng.seed}", "${a} 1234")],
)
def test_a_backslash_makes_it_text(written: str, meant: str, yaml_file) -> None:
    file = yaml_file(f"logger: {{wandb_project: '{written}'}}")
    assert load_config(run_config(), config_file=file).logger.wandb_project == meant
    words = [f"logger.wandb_project='{written}'"]
    assert load_config(run_config(), overrides=words).logger.wandb_project == meant


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(
    path=text,
    project=text,
    interval=positive,
    fps=st.none() | positive,
    weights=st.lists(positive, min_size=1, max_size=3),
    seed=st.integers(0, 2**63 - 1),
)
def test_any_configuration_survives_the_way_through_yaml(
    tmp_path_factory, path, project, interval, fps, weights, seed
) -> None:
    config = run_config(
        dataset=DatasetConfig(
            path=path,
            checkpoint_every_sec=interval,
            mock_samples=tuple(MockGeometry(weight=weight, fps=fps) for weight in weights),
        ),
        logger=LoggerConfig(wandb_project=project),
        rng=RngConfig(seed=seed),
    )
    file = tmp_path_factory.mktemp("trip") / "config.yaml"
    save_config(config, file)
    assert read_config(file) == config


def test_yaml_holds_enums_as_text() -> None:
    assert "precision: bf16\n" in to_yaml(run_config())
    assert "!" not in to_yaml(run_config())


def test_import_brings_neither_torch_nor_megatron() -> None:
    code = (
        "import json, sys; import dit.config_loading, recipes.runs;"
        "print(json.dumps([n for n in ('torch', 'megatron', 'numpy') if n in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_sizes_of_cosmos_predict2_say_their_objective() -> None:
    for size, frames in (("2_2b", None), ("2_14b_video2world", (0, 1, 1)), ("2.5_2b", (2, 1, 1))):
        words = [f"model.name=cosmos_predict{size}", "objective.timestep_scale=2"]
        objective = load_config(run_config(), overrides=words[:1]).objective
        assert (objective.name, objective.timestep_scale) == ("flow", 1.0)
        assert objective.given_frames == frames
        # An explicit key counts more.
        assert load_config(run_config(), overrides=words).objective.timestep_scale == 2.0
    assert load_config(run_config(), overrides=["model.name=cosmos_7b"]).objective.name == "edm"
