"""Each key whose change a resume refuses is named by its error; nothing is trained."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from enum import Enum
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest

from dit.checkpoint_paths import CheckpointError
from dit.config import Balance, RunConfig
from dit.config.resume import Resume
from dit.config_loading import ConfigError, load_config
from dit.config_loading.load import default_config
from dit.config_loading.schema import as_typed, schema_of
from dit.data import DataError
from dit.data.loader_state import check_identity, loader_identity, places_of
from dit.models.registry import families
from dit.train.checkpoint import without_tensors
from tests.unit.data.conftest import Shards

OTHER = {
    "model.family": "wan",
    "model.num_kv_heads": "3",
    "objective.name": "flow",
    "objective.level_range": "[0.5, 1.0]",
    "objective.second_level_rate": "0.5",
    "distill.levels": "[0.1, 0.9]",
    "lora.targets": "[attention]",
    "optimizer.groups": "[{pattern: '*', lr: 1.0}]",
}
"""Values of keys for which `_tokens` has none."""
WITH = {
    "objective.huber_c": ("objective.loss=huber",),
    "objective.level_range": ("objective.name=flow",),
    "objective.prediction": ("objective.name=flow",),
    "objective.cfg_target_schedule": ("objective.name=flow", "objective.cfg_target=3"),
    "objective.drift_weight": ("lora.rank=4",),
    "objective.preference": ("lora.rank=4",),
    "objective.dpo_beta": ("lora.rank=4", "objective.preference=dpo"),
    "objective.guidance": ("model.family=flux", "objective.guidance=1"),
    "lora.plus_ratio": ("lora.rank=4",),
    "lora.streams": ("model.family=sound_dit", "lora.rank=4"),
    "distill.method": ("lora.rank=4", "objective.name=flow"),
    "model.clean_references": ("model.reference_latents=1",),
    "model.dual_attention_layers": ("model.qk_norm=true",),
    "model.image_embed_positions": (
        "model.image_condition=first_frame",
        "model.image_embed_size=1280",
    ),
    "model.text_projections": ("model.crossattn_emb_size=4096", "model.sound_text_size=2048"),
    "dataset.balance_packs": (f"dataset.balance={Balance.FLOPS}",),
    **{
        f"objective.{key}": ("model.family=sound_dit",)
        for key in ("sound_levels", "sound_weight", "sound_given", "sound_prefix", "video_given")
    },
    "objective.given_text_dropout": ("model.family=sound_dit",),
}
"""What a key needs to have a meaning, before and after."""
BESIDE = ((), ("objective.guidance=null",), ("objective.guidance=1",))
"""What the other value may need."""
ONE_VALUE = ("train.micro_batch_size",)
"""Keys of which no configuration has another value."""
SHARDS = Shards()
FAMILIES = [one.name for one in families()]


def _refused(config: RunConfig, *kinds: Resume) -> list[str]:
    schema = schema_of(config)
    return [key for key in schema.all_keys() if schema.resume_class(key) in kinds]


def _tokens(kind: Any, now: Any) -> Iterator[str]:
    """Values that a key of a type may have instead, as they are typed."""
    kinds = [kind, *get_args(kind)]
    if isinstance(now, bool):
        yield as_typed(not now)
    elif isinstance(now, int | float):
        made = (now * 2, now / 2, now + 1, now - 1, now * 4)
        yield from (f"{value:.15g}" for value in made if value != now)
    elif isinstance(now, tuple):
        ends = ((now[-2], now[-1] * 2), (now[-2] + 4, now[-1] - 4), (now[-1] * 2,) * 2)
        yield from (as_typed((*now[:-2], *end)) for end in ends)
    for one in kinds:
        if isinstance(one, type) and issubclass(one, Enum):
            yield from (str(member.value) for member in one if member is not now)
    if now is None:
        yield from ("4", "0.5", "a")


def _another(config: RunConfig, key: str) -> RunConfig:
    """The configuration with another value of a key that is valid."""
    group, _, name = key.partition(".")
    now = getattr(getattr(config, group), name)
    kind = schema_of(config).type_of(key)
    tokens = [OTHER[key]] if key in OTHER else _tokens(kind, now)
    for token, more in product(tokens, BESIDE):
        with suppress(ConfigError):
            return load_config(config, overrides=[f"{key}={token}", *more])
    raise AssertionError(f"no other value of {key} is found: write one into OTHER")


@pytest.mark.parametrize("family", FAMILIES)
def test_what_stored_weights_and_moments_depend_on_is_refused_by_name(
    monkeypatch, tmp_path, family
):
    """The keys of all groups, and then those of each family that others lack."""
    base = load_config(default_config(), overrides=[f"model.family={family}"])
    known = [] if family == FAMILIES[0] else _refused(default_config(), Resume.REFUSED)
    for key in _refused(base, Resume.REFUSED, Resume.OF_INPUTS):
        if key in known or key in ONE_VALUE:
            continue
        saved = load_config(base, overrides=WITH.get(key, ()))
        monkeypatch.setattr(without_tensors, "saved_config", lambda path, saved=saved: saved)
        without_tensors.check_same_model(tmp_path, saved)
        here = _another(saved, key)
        difference = rf"\n  {key}: .* in the checkpoint, .* here"
        with pytest.raises(CheckpointError, match=difference):
            without_tensors.check_same_model(tmp_path, here)
        # A new run on these weights keeps what decides their shape and meaning, and nothing else.
        of_weights = key.startswith("model.") and key not in _refused(base, Resume.OF_INPUTS)
        with pytest.raises(CheckpointError, match=difference) if of_weights else nullcontext():
            without_tensors.check_same_weights(tmp_path, here.model)


def test_keys_of_one_value_have_no_other():
    for key in ONE_VALUE:
        with pytest.raises(ConfigError, match=f"{key.partition('.')[2]}=2 must be 1"):
            load_config(default_config(), overrides=[f"{key}=2"])


@pytest.fixture(scope="module")
def datasets(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("datasets")
    for name, count in (("a", 12), ("b", 13)):
        SHARDS.good_set(root / name, count)
    shutil.copytree(root / "a", root / "copy")
    return root


def _check(saved: RunConfig, here: RunConfig) -> None:
    places = (places_of(saved.dataset), places_of(here.dataset))
    check_identity(loader_identity(saved), loader_identity(here), places=places)


def test_what_the_position_in_the_data_depends_on_is_refused_by_name(datasets):
    """Of mock data, of a dataset, and of a blend of two."""
    mock = SHARDS.config(mock=True)
    one = SHARDS.config(datasets / "a")
    both = f"[{{path: {datasets}/a}}, {{path: {datasets}/b, weight: 2}}]"
    blend = load_config(one, overrides=["dataset.path=null", f"dataset.blend={both}"])
    geometry = "dataset.mock_samples=[{frames: 3, height: 8, width: 8, text_length: 2}]"
    others = {
        "dataset.path": (one, f"dataset.path={datasets}/b"),
        "dataset.blend": (blend, f"dataset.blend={both.replace('weight: 2', 'weight: 3')}"),
        "dataset.mock": (one, "dataset.mock=true"),
        "dataset.mock_samples": (mock, geometry),
        "dataset.task_encoder_seq_length": (one, "dataset.task_encoder_seq_length=128"),
        "dataset.sample_multiple": (one, "dataset.sample_multiple=8"),
    }
    keys = _refused(one, Resume.OF_DATA)
    assert others.keys() < set(keys)
    for key in keys:
        saved, token = others.get(key, (one, ""))
        saved = load_config(saved, overrides=WITH.get(key, ()))
        here = load_config(saved, overrides=[token]) if token else _another(saved, key)
        _check(saved, saved)
        with pytest.raises(DataError) as error:
            _check(saved, here)
        name = key.removeprefix("dataset.")
        assert f"{key}:" in str(error.value) or re.search(
            rf"\n  (weights of dataset\.{name}|dataset\.path, blend, mock):", str(error.value)
        ), key
        assert "checkpoint.load_data_position=false" in str(error.value)


def test_a_copy_elsewhere_is_no_other_dataset(datasets):
    _check(SHARDS.config(datasets / "a"), SHARDS.config(datasets / "copy"))
