"""Levels that published networks are sampled at are those of their pipelines, by name alone."""

from __future__ import annotations

import pytest
import torch

from dit.config_loading import load_config
from dit.objectives.registry import sampling_path
from recipes.runs import dit_debug
from tests.families.table import CASES

PUBLISHED = {
    name: levels for case in CASES.values() for name, levels in case.published_levels.items()
}
SAMPLERS = {"hidream_i1_full": "unipc", "hidream_i1_dev": "lcm"}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("num_steps", [1, 4, 28])
def test_levels_are_those_of_the_pipeline(name: str, num_steps: int) -> None:
    words = [f"model.name={name}", "dataset.task_encoder_seq_length=32768"]
    if name in SAMPLERS:
        words.append(f"objective.sampling_levels={SAMPLERS[name]}")
    path = sampling_path(load_config(dit_debug(), overrides=words).objective)
    for tokens in (400, 1024, 3952, 4096, 7000, 16384):
        found_S = path.schedule([tokens], num_steps=num_steps)[:, 0].float()
        wanted_S = PUBLISHED[name](num_steps, tokens).float()
        torch.testing.assert_close(found_S, wanted_S, rtol=1e-6, atol=2e-7)
