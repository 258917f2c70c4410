"""Padding that attention sees counts as tokens wherever work is counted (HiDream-I1)."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from dit.batch import LatentSample
from dit.config import MockGeometry, RunConfig
from dit.config_loading import load_config
from dit.data.cook import Expected
from dit.data.pack import SampleSize, pack_samples
from dit.models.hidream.family import TINY
from dit.models.patch_layout import PatchLayout
from dit.sizing.activations import geometry_tokens
from dit.sizing.flops import forward_flops, pack_forward_flops
from dit.sizing.passes import Length, _listed_lengths
from dit.train.metrics.step_metrics import taken_tokens
from recipes.runs import dit_debug

SIDES, TOKENS = [(6, 6), (6, 8)], [9, 16]
"""Rows and columns of latents, and what layers see of them: no square has fewer than 4 x 4."""


@pytest.fixture
def config() -> RunConfig:
    words = ["model.family=hidream", "model.name=custom", "dataset.sample_multiple=8"]
    words += [f"model.{k}={json.dumps(value)}" for k, value in TINY["hidream_i1_full"].items()]
    return load_config(dit_debug(), overrides=[*words, "objective.name=flow"])


def samples(model: Any) -> list[LatentSample]:
    def one(key: str, *sides: int) -> LatentSample:
        text = {"text_2": torch.zeros(3, 100), "pooled_text": torch.zeros(10)}
        latent = torch.zeros(model.in_channels, 1, *sides)
        return LatentSample(
            key=key, latent_CFHW=latent, text_LE=torch.zeros(3, 16), fps=float("nan"), others=text
        )

    return [one(str(sides), *sides) for sides in SIDES]


def test_packs_are_balanced_by_what_their_layers_compute(config: RunConfig) -> None:
    layout, made = PatchLayout.of(config), samples(config.model)
    tokens, text = zip(*(SampleSize.of(one, layout).shape for one in made), strict=True)
    assert list(tokens) == TOKENS
    pack = pack_samples(made, layout)
    assert forward_flops(config.model, tokens=tokens, text=text) == pack_forward_flops(
        config.model, pack
    )
    # The rows of three texts of a sample, as its layers see them.
    assert taken_tokens(config.model, pack) == sum(TOKENS) + 2 * 9


def test_plans_and_forecasts_count_it(config: RunConfig) -> None:
    for (height, width), tokens in zip(SIDES, TOKENS, strict=True):
        geometry = MockGeometry(height=height, width=width, text_length=3)
        assert geometry_tokens(config.model, geometry) == tokens
    sizes = [{"num_frames": 1, "height": a, "width": b, "samples": 1} for a, b in SIDES]
    card = {"latent": {"stride": 1, "temporal_stride": 1}, "sizes": sizes}
    lengths = _listed_lengths(card, Expected.of_training(config))
    assert lengths is not None and {*lengths.counts} == {Length(16, 9), Length(16, 16)}
    assert {*lengths.padded_to(4).counts} == {Length(12, 9), Length(16, 16)}
