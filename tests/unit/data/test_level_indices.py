"""The fixed noise level that a sample of validation has in its `.json`, up to a pack."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain

import pytest
import torch

from dit.batch import FixedLevels
from dit.config import ObjectiveConfig, RunConfig
from dit.data import DataError, validation_groups
from dit.data.cook import Expected, cook
from dit.data.pack import SampleSize
from dit.data.rejections import Reject, SampleRefused


@pytest.fixture
def expected(shards) -> Expected:
    return Expected.of(shards.config())


def record(shards, **about):
    return shards.ours(torch.ones(2, 1, 4, 4), torch.ones(2, 8), **about)


@pytest.mark.parametrize("index", [7, 0, None])
def test_a_sample_has_the_level_of_its_json(shards, expected, index) -> None:
    sample = cook(record(shards, timestep=index), expected, key="k")
    assert sample.level_index == SampleSize.of(sample, expected.layout).level_index == index


@pytest.mark.parametrize("index", [8, -1, 1.0, True, "3", [1]])
def test_another_number_refuses_its_sample(shards, expected, index) -> None:
    with pytest.raises(SampleRefused) as caught:
        cook(record(shards, timestep=index), expected, key="k")
    assert caught.value.reason is Reject.LEVEL_INDEX
    assert f"timestep={index!r} is not a whole number from 0 to 7" in caught.value.detail


def at_fixed_levels(config: RunConfig) -> RunConfig:
    validation = replace(config.validation, fixed_levels=True)
    return replace(config, objective=ObjectiveConfig(name="flow"), validation=validation)


@pytest.fixture
def planned(shards, tmp_path):
    """Plans and reads the first packs of a set whose samples have these levels, one a pack."""

    def read(levels, packs, **settings):
        samples = [record(shards, timestep=k) for k in levels]
        shards.write(tmp_path, samples, split="val")
        config = shards.config(tmp_path, task_encoder_seq_length=4, **settings)
        groups = validation_groups(at_fixed_levels(config))
        found = groups.read(groups.plan(packs).groups)
        return [*chain(*(pack.method(FixedLevels).indices for pack in found))]

    return read


ONCE = [*range(8)]


@pytest.mark.parametrize(
    ("levels", "packs", "found"),
    [
        (ONCE[::-1] * 2, 16, ONCE[::-1] * 2),
        ([*ONCE, 4], 8, ONCE),  # those that are validated are even
        (ONCE, 16, ONCE),  # each twice
        ([None] * 9, 9, [*ONCE, 0]),  # by their places
    ],
)
def test_even_levels_are_validated(planned, levels, packs, found) -> None:
    assert planned(levels, packs) == found


@pytest.mark.parametrize(
    ("levels", "packs", "said"),
    [
        ([*ONCE, 5], 9, "1 of 4/8, 2 of 5/8, 1 of 6/8"),
        (ONCE, 7, "1 of 6/8, 0 of 7/8"),
        (ONCE, 9, "2 of 0/8, 1 of 1/8"),  # the list starts over
        ([*ONCE, None], 9, "1 of 7/8, 1 without one"),
    ],
)
def test_a_run_with_uneven_levels_does_not_start(planned, levels, packs, said) -> None:
    with pytest.raises(DataError, match=rf"validation.fixed_levels=true: .*{said}.*eval_iters"):
        planned(levels, packs)


def test_a_refused_sample_makes_levels_uneven(shards, tmp_path) -> None:
    """NaN is seen when the sample is read, after its level has been counted."""
    text = torch.ones(1200, 8).bfloat16()  # large: only its head is read before its pack is
    latents = [torch.full((2, 1, 4, 4), math.nan if k == 3 else 0.0) for k in range(8)]
    samples = [shards.ours(one, text, timestep=k) for k, one in enumerate(latents)]
    shards.write(tmp_path, samples, split="val")
    config = shards.config(tmp_path, max_bad_fraction=1.0)
    groups = validation_groups(at_fixed_levels(config))
    plan = groups.plan(1)
    packs = list(groups.read(plan.groups))
    with pytest.raises(
        DataError, match=r"key 000003: latent has NaN .*fixed_levels=true are uneven"
    ):
        plan.packs(packs, late=groups.late)
    # Levels by place do without it.
    packs = replace(plan, needs_all=False).packs(packs, late=groups.late)
    assert packs.packs[0].num_samples == 7
