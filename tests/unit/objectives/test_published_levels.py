"""Levels that published networks are sampled at are those of their pipelines, by name alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.ideogram4 import pipeline_ideogram4 as ideogram4
from diffusers.pipelines.longcat_image.pipeline_longcat_image import calculate_shift
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)
from torch import Tensor

from dit.config_loading import load_config
from dit.objectives.registry import sampling_path
from recipes.runs import dit_debug
from tests.families import hidream


def _even(num_steps: int, *, mu: float | None = None, **options: Any) -> Tensor:
    scheduler = FlowMatchEulerDiscreteScheduler(**options)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / num_steps, num_steps), mu=mu)
    return scheduler.sigmas


def _of_hidream(name: str, num_steps: int) -> Tensor:
    scheduler = hidream.scheduler(name)
    scheduler.set_timesteps(num_steps)
    return scheduler.sigmas


def _of_omnigen2(num_steps: int, tokens: int) -> Tensor:
    """Its times run from noise, 0, to data; the shift goes by cells, four of which are a token."""
    even_S, shift = torch.linspace(0, 1, num_steps + 1).double(), (4 * tokens) ** 0.5 / 40
    return 1 - even_S / (shift - shift * even_S + even_S)


def _of_ideogram4(num_steps: int, tokens: int) -> Tensor:
    """The mean goes by pixels, 16 x 16 of which are a token."""
    mu = ideogram4._resolution_aware_mu(16, 16 * tokens, 0.0)
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(sigmas=ideogram4._logit_normal_sigmas(num_steps, mu, 1.5).tolist())
    return scheduler.sigmas


PUBLISHED = {
    "anima": lambda steps, _: _even(steps, shift=3.0),
    "lumina2": lambda steps, _: _even(steps, shift=6.0),
    "zimage": lambda steps, _: _even(steps, shift=6.0),
    "zimage_turbo": lambda steps, _: _even(steps, shift=3.0),
    "longcat_image": lambda steps, tokens: _even(
        steps, use_dynamic_shifting=True, mu=calculate_shift(tokens)
    ),
    "hidream_i1_full": lambda steps, _: _of_hidream("full", steps),
    "hidream_i1_dev": lambda steps, _: _of_hidream("dev", steps),
    "omnigen2": _of_omnigen2,
    "krea2_raw": lambda steps, tokens: _even(
        steps, use_dynamic_shifting=True, mu=calculate_shift(tokens, max_seq_len=6400)
    ),
    "krea2_turbo": lambda steps, _: _even(steps, use_dynamic_shifting=True, mu=1.15),
    **dict.fromkeys(("ernie_image", "ernie_image_turbo"), lambda steps, _: _even(steps, shift=4.0)),
    "ideogram4": _of_ideogram4,
    "qwen_image21": lambda steps, tokens: _even(
        steps, use_dynamic_shifting=True, mu=calculate_shift(tokens)
    ),
    "flux3_klein_base": lambda steps, _: _even(steps, shift=6.93),
    "flux3_klein": lambda steps, _: _even(steps, shift=6.93),
}
"""`model.name` -> levels of (number of steps, tokens of a picture)."""
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
