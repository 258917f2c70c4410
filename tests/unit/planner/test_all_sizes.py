"""Every named size of every family is counted and described, one of each family is planned."""

from __future__ import annotations

import math

import pytest

from dit.config import RunConfig
from dit.config_loading import load_config
from dit.device_specs import DEVICES
from dit.models.registry import FAMILIES, family_named, family_of, pairs
from dit.planner.efficiency import FUSED
from dit.planner.layouts import plans
from dit.planner.times import expected_load
from dit.sizing.describe import describe
from dit.sizing.memory import parameter_count
from recipes.runs import dit_xl

SIZES = [size for name in FAMILIES for size in family_named(name).sizes]
PLANNED = [next(iter(family_named(name).sizes)) for name in FAMILIES]


def _run(size: str) -> RunConfig:
    words = [f"model.name={size}", "dataset.mock=true", "train.global_batch_size=8"]
    return load_config(dit_xl(), overrides=words)


@pytest.mark.parametrize("size", SIZES)
def test_a_size_is_counted_and_described(size: str) -> None:
    config = _run(size)
    count, fixed = parameter_count(config.model), family_of(config.model).weights.fixed
    if family_of(config.model).diffusers is not None:
        trained = (pair.shape for pair in pairs(config.model) if pair.ours not in fixed)
        assert sum(map(math.prod, trained)) == count
    assert f"{count:,} trainable ({size})" in describe(config, world_size=8)


@pytest.mark.parametrize("size", PLANNED)
def test_a_size_of_each_family_is_planned(size: str) -> None:
    config = _run(size)
    good, bad = plans(
        config, expected_load(config), world_size=8, device=DEVICES["h200"], efficiency=FUSED
    )
    assert good and bad and all(plan.times.step > 0 for plan in good)
