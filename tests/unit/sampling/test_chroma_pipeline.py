"""Schedulers of Chroma's pipeline whose levels are spaced otherwise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from diffusers import FlowMatchEulerDiscreteScheduler

from dit.config import LevelSpacing, RunConfig
from dit.convert.diffusers_config import objective_config
from dit.models.registry import family_of
from tests.families.case import PICTURE, PROMPT, gap
from tests.families.chroma import made_by, pipeline
from tests.families.generation import noise_of, opened, ours, texts_of


def _spaced(config: RunConfig, pipe: Any, spacing: LevelSpacing) -> RunConfig:
    """With another scheduler in the pipeline, such as that of Chroma1-Base with beta sigmas."""
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, **{f"use_{spacing}_sigmas": True})
    content = {"_class_name": type(pipe.scheduler).__name__, **pipe.scheduler.config}
    even = family_of(config.model).objective.settings
    found = objective_config(content, place="here", of_family=even, model=config.model)
    return replace(config, objective=found.objective)


@pytest.mark.slow
def test_levels_of_other_spacings(groups, tmp_path: Path) -> None:
    pipe = pipeline(tmp_path)
    run, start = opened(tmp_path), noise_of(PICTURE)
    texts = texts_of(run, PROMPT, "")
    usual = ours(run, start, guidance=1.0)
    for spacing in LevelSpacing:
        spaced = replace(run, config=_spaced(run.config, pipe, spacing))
        theirs = made_by(pipe, start, texts, guidance_scale=1.0)
        found = ours(spaced, start, guidance=1.0)
        assert gap(found, theirs) <= 1e-4 < gap(found, usual)
