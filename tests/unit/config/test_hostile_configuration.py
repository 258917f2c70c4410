"""Whatever a file or a command line holds, the answer is a configuration or named problems."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dit.config_loading import ConfigError, load_config, to_yaml
from dit.config_loading.cli import parse_arguments
from dit.config_loading.schema import Schema
from dit.models.dit.family import DitConfig
from recipes.runs import RECIPES
from tests.hostile import damaged, mistaken, odd_text, odd_values
from tests.packs import run_config

ROOT = Path(__file__).resolve().parents[3]
FILES = [(ROOT / "conf" / f"{name}.yaml").read_bytes() for name in ("dit_digits", "dit_debug")]
DOCUMENTS = [yaml.safe_load(file) for file in FILES]
OTHERS = b"""
seed: 42
optim: {learning_rate: 5e-6, optimizer: {betas: [0.9, 0.999]}}
fsdp: {dp_size: none, tp_size: 1, activation_checkpointing: true}
flow_matching: {timestep_sampling: uniform, flow_shift: 3.0}
step_scheduler: {global_batch_size: 8, max_steps: 10}
training: {optimizer: {learning_rate: 1e-5}, validation: {sampling_steps: [50]}}
"""

yaml_pieces = st.sampled_from(
    [
        *("&a ", "*a", "!!int ", "!!python/name:os.system ", "!!binary ", "!!set ", "!x ", "<<: "),
        *("{", "}", "[", "]", ": ", ", ", "- ", "? ", "\n", "  ", "|\n", "'", '"', "#", "\t"),
        *(
            "${",
            "}",
            "${oc.env:HOME}",
            "${dataset.path}",
            "${eval:1}",
            "???",
            "model",
            "rng",
            "x-a",
        ),
        *("2024-01-01", "1:30", ".inf", "9" * 5000, "1e400", "~", "null"),
    ]
)
yaml_text = st.lists(yaml_pieces | st.text(max_size=4), max_size=24).map("".join)


def answers(place: Path | None, tokens: list[str]) -> None:
    """Either a configuration that survives its own file, or problems of one line each."""
    try:
        config = load_config(run_config(), config_file=place, overrides=tokens)
    except ConfigError as error:
        assert error.problems
        for problem in error.problems:
            assert problem.isprintable(), repr(problem)
            problem.encode()
    else:
        to_yaml(config).encode()


def dumped(value: object) -> bytes:
    return yaml.safe_dump(value, allow_unicode=True).encode("utf-8", "surrogatepass")


@pytest.mark.slow
@given(
    content=st.sampled_from([*FILES, OTHERS]).flatmap(damaged)
    | st.sampled_from([*DOCUMENTS, yaml.safe_load(OTHERS)]).flatmap(mistaken).map(dumped)
    | yaml_text.map(lambda text: text.encode("utf-8", "surrogatepass"))
    | st.binary(max_size=64)
)
def test_hostile_run_file(tmp_path_factory, content: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "hostile.yaml"
    file.write_bytes(content)
    answers(file, [])


SCHEMA = Schema(DitConfig)
known = st.sampled_from(
    [*SCHEMA.all_keys(), "model", "dataset.mock_samples.0.width", "dataset.blend.0.path"]
)
names = known | st.sampled_from(["~", "+", "--", "tokenizer", "seed", "optim.lr"]) | odd_text


@pytest.mark.slow
@given(
    tokens=st.lists(
        st.tuples(names, st.sampled_from(["=", "", "==", "[0]=", ".0="]), yaml_text | odd_text).map(
            "".join
        )
        | odd_text
        | st.tuples(known, odd_values).map(lambda pair: f"{pair[0]}={pair[1]!r}"),
        max_size=3,
    )
)
def test_hostile_command_line(tokens: list[str]) -> None:
    answers(None, tokens)
    try:
        parse_arguments([*tokens, "--dry-run"], recipes=RECIPES)
    except ConfigError as error:
        assert all(problem.isprintable() for problem in error.problems)
    except SystemExit as stop:
        assert stop.code == 0 and {"-h", "--help", "--help=all"} & set(tokens)


def problems_of(tmp_path: Path, text: str, *tokens: str) -> list[str]:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    started = time.process_time()
    with pytest.raises(ConfigError) as caught:
        load_config(run_config(), config_file=file, overrides=tokens)
    assert time.process_time() - started < 5
    return caught.value.problems


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &a {b: *a}\n", "an alias stands inside its own anchor"),
        ("[" * 50_000, "is nested too deeply"),
        ("#" * 300_000, "is longer than 262,144 bytes"),
        ("rng: {seed: !!timestamp x}", ":1: the tag !!timestamp is not supported"),
        ("rng: {seed: !!int x}", "a value does not fit the tag before it"),
        ("rng: {seed: " + "9" * 5_000 + "}", "a value does not fit the tag before it"),
        ("rng: {seed: 1, seed: 2}", ":1: found duplicate key seed"),
        ("rng:\n  ? [a]\n  : 1", ":2: a key is a list or a mapping"),
        ("rng: {seed: 2024-01-01}", 'rng.seed="2024-01-01"'),
        ("rng: {seed: 1:30}", 'rng.seed="1:30"'),
        ("model: {mlp_ratio: '4'}", 'model.mlp_ratio="4"'),
    ],
)
def test_a_file_that_would_hang_or_trip_a_parser(tmp_path: Path, text: str, said: str) -> None:
    (problem,) = problems_of(tmp_path, text)
    assert said in problem
    assert str(tmp_path / "run.yaml") in problem


def test_references_that_multiply_are_refused_before_they_are_followed(tmp_path: Path) -> None:
    chain = ["dataset.path", "checkpoint.save", "checkpoint.load", "logger.wandb_exp_name"]
    chain += ["logger.wandb_entity", "logger.wandb_project", "logger.tensorboard_dir"]
    tokens = [
        f"{key}='{'${' + before + '}'}{('${' + before + '}') * 9}'"
        for before, key in pairwise(chain)
    ]
    (problem,) = problems_of(tmp_path, "dataset: {path: aaaaaaaaaa}", *tokens)
    assert "60 references" in problem


def test_a_key_that_would_write_to_the_terminal_is_shown_escaped(tmp_path: Path) -> None:
    (problem,) = problems_of(tmp_path, '"a\\e[2J\\nb": 1')
    assert problem.startswith("a\\x1b[2J\\nb=1 (")


def test_blocks_for_anchors_are_no_settings(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "x-sizes: &sizes {height: 32, width: 32}\nx-note: any\n"
        "dataset:\n  mock_samples:\n  - {<<: *sizes, frames: 1}\n  - {<<: *sizes, frames: 5}\n"
    )
    config = load_config(run_config(), config_file=file)
    assert [(one.frames, one.height) for one in config.dataset.mock_samples] == [(1, 32), (5, 32)]
    with pytest.raises(ConfigError, match="unknown key"):
        load_config(run_config(), overrides=["x-note=1"])
