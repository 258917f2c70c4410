"""Every file in conf/ and every recipe: known keys, comments, and the resolved run as text.

The resolved conf/dit_debug.yaml lies whole in tests/golden. runs.yaml there has all others by name:
the `*_debug.yaml` of another family as its whole network and the other keys whose values differ,
files and recipes as the keys whose values differ from their family's. A change of a default shows
here as a difference in tests/golden. If it is meant, write both anew:
UPDATE_GOLDEN=1 python -m pytest -n0 tests/unit/config/test_conf_files.py
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from dit.config import RunConfig
from dit.config_loading import load_config, to_yaml
from dit.models.registry import FAMILIES
from recipes.runs import RECIPES, dit_debug, dit_xl

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = ROOT / "tests" / "golden"
FILES = {path.stem: path for path in sorted((ROOT / "conf").glob("*.yaml"))}
OF_DATA = {
    *("dit_digits", "dit_digits_flow", "dit_digits_lora", "flux_digits", "flux_digits_edit"),
    *("mlperf_digits", "mlperf_flux1", "wan_moving_digits", "ltx_digits_edit"),
    *("clips_with_sound", "sounding_digits", "ltx2_sounding_digits"),
}
"""Those whose mock samples are as their own data are, of one size."""
MIXTURES = [name for name in FILES if name not in OF_DATA]


@cache
def resolved(name: str, *overrides: str) -> RunConfig:
    return load_config(dit_xl(), config_file=FILES[name], overrides=list(overrides))


RUNS: dict[str, Callable[[], RunConfig]] = {
    **{f"conf_{name}": lambda name=name: resolved(name) for name in FILES},
    **{f"recipe_{name}": recipe for name, recipe in RECIPES.items()},
}


WHOLE = "conf_dit_debug"
WHOLE_FILE, REST_FILE = GOLDEN / f"{WHOLE}.yaml", GOLDEN / "runs.yaml"


@cache
def debug_runs() -> dict[str, str]:
    """Family -> the name in `RUNS` of its debug run."""
    names = [name for name in RUNS if name.startswith("conf_") and name.endswith("_debug")]
    return {RUNS[name]().model.family: name for name in names}


def test_each_family_has_a_debug_run_and_each_file_a_row_on_the_page() -> None:
    assert debug_runs().keys() == set(FAMILIES)
    page = (ROOT / "docs" / "configuration_files.md").read_text()
    listed = re.findall(r"^\| `conf/([\w.]+)\.yaml` \|", page, re.MULTILINE)
    tiny = {name for name in FILES if name.endswith("_debug")}
    assert sorted(listed) == sorted({"NAME_debug", *FILES} - tiny)


def by_dotted_keys(text: str) -> dict[str, str]:
    """Dotted key -> value as JSON, in which 1 and 1.0 differ. A difference has dotted keys."""

    def leaves(tree: Mapping[str, Any], before: str) -> Iterator[tuple[str, str]]:
        for key, value in tree.items():
            if isinstance(value, dict):
                yield from leaves(value, f"{before}{key}.")
            else:
                yield before + key, json.dumps(value)

    return dict(leaves(yaml.safe_load(text), ""))


def usual(name: str) -> dict[str, str]:
    """What runs.yaml leaves out where a run has the same, by dotted keys."""
    whole, debug = by_dotted_keys(WHOLE_FILE.read_text()), debug_runs()[RUNS[name]().model.family]
    if debug == WHOLE:
        return whole
    if debug != name:
        return usual(debug) | as_json(golden()[debug])
    return {key: value for key, value in whole.items() if not key.startswith("model.")}


def as_json(values: Mapping[str, Any]) -> dict[str, str]:
    return {key: json.dumps(value) for key, value in values.items()}


@cache
def golden() -> dict[str, dict[str, Any]]:
    """Name of a run -> the keys that it does not share with `usual`, with their values."""
    return yaml.load(REST_FILE.read_text(), Loader=yaml.CSafeLoader)


def write_golden() -> None:
    """Writes both files: the whole run, then debug runs, then those that are compared with them."""
    WHOLE_FILE.write_text(to_yaml(RUNS[WHOLE]()))
    others = [name for name in RUNS if name != WHOLE]
    golden.cache_clear()
    REST_FILE.write_text("{}")
    for name in sorted(others, key=lambda name: name not in debug_runs().values()):
        text, same = to_yaml(RUNS[name]()), usual(name)
        own = {k: json.loads(v) for k, v in by_dotted_keys(text).items() if same.get(k) != v}
        golden()[name] = own
    made = dict(sorted(golden().items()))
    REST_FILE.write_text(yaml.safe_dump(made, sort_keys=False, default_flow_style=None, width=100))


@pytest.fixture(scope="module", autouse=True)
def golden_files() -> None:
    if os.environ.get("UPDATE_GOLDEN"):
        write_golden()


@pytest.mark.parametrize("name", RUNS)
def test_resolved_run(name: str) -> None:
    text = to_yaml(RUNS[name]())
    if name == WHOLE:
        assert text == WHOLE_FILE.read_text(), "if it is meant, run again with UPDATE_GOLDEN=1"
    else:
        assert name in golden(), "run again with UPDATE_GOLDEN=1 to write it"
        expected = usual(name) | as_json(golden()[name])
        assert by_dotted_keys(text) == expected, "if it is meant, run again with UPDATE_GOLDEN=1"


def test_no_golden_run_is_left_over() -> None:
    assert {*golden(), WHOLE} == set(RUNS)


@pytest.mark.parametrize("name", FILES)
def test_every_key_has_a_comment(name: str) -> None:
    lines = FILES[name].read_text().splitlines()
    assert lines[0].startswith("# ")
    root = yaml.compose("\n".join(lines), Loader=yaml.SafeLoader)
    for _, group in root.value:
        for key, _ in group.value:
            line = key.start_mark.line
            commented = " # " in lines[line] or lines[line - 1].lstrip().startswith("# ")
            assert commented, f"{name}.yaml:{line + 1} {key.value}"


@pytest.mark.parametrize("name", FILES)
def test_precision_is_explicit(name: str) -> None:
    assert "precision" in yaml.safe_load(FILES[name].read_text())["model"]


@pytest.mark.parametrize("name", FILES)
def test_every_file_runs_on_mock_data(name: str) -> None:
    assert resolved(name, "dataset.mock=true").dataset.mock


def test_the_debug_file_and_recipe_are_the_same_run() -> None:
    assert resolved("dit_debug") == dit_debug()


def test_the_debug_model_divides_by_degrees_of_two_and_four() -> None:
    model = dit_debug().model
    for degree in (2, 4):
        assert model.num_layers % degree == 0
        assert model.num_attention_heads % degree == 0
        assert model.ffn_hidden_size % degree == 0
        assert model.hidden_size % degree == 0
    assert model.num_attention_heads % (2 * 4) == 0  # tensor 2 x context 4 over heads


@pytest.mark.parametrize("name", MIXTURES)
def test_the_mock_mixture_is_nasty(name: str) -> None:
    config = resolved(name, "dataset.mock=true")
    samples = config.dataset.mock_samples
    patch = config.model.patch_spatial**2 * config.model.patch_temporal
    real = [one.frames * one.height * one.width // patch for one in samples]
    padded = [config.mock_tokens(one) for one in samples]
    weights = [one.weight for one in samples]
    assert min(one.text_length for one in samples) == 1
    # With a reference, whose tokens count as well.
    longest = max(real) * (2 if getattr(config.model, "reference_latents", 0) else 1)
    assert 0.5 < longest / config.dataset.task_encoder_seq_length <= 1
    uneven = sum(w for w, a, b in zip(weights, real, padded, strict=True) if a != b)
    assert uneven > 0.5 * sum(weights)


def test_digits_files_differ_in_objective_and_folder_only() -> None:
    edm, flow = resolved("dit_digits"), resolved("dit_digits_flow")
    assert edm.objective.name != flow.objective.name
    assert edm.checkpoint.save != flow.checkpoint.save
    for group in ("model", "dataset", "train", "optimizer", "scheduler", "ema", "ddp", "logger"):
        assert getattr(edm, group) == getattr(flow, group)
