"""We generate what Wan's pipelines of Diffusers do, from their folders and the same noise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dit.convert.import_ import import_weights
from dit.data.pack import PatchLayout, pack_samples
from dit.sampling import generate
from dit.sampling.commands.generate_media import generate_opened
from dit.sampling.commands.options import GenerationOptions
from dit.sampling.open_checkpoint import LoadOptions, OpenCheckpoint, open_checkpoint
from dit.sampling.prompts import Prompt
from tests.cosmos_predict import gap
from tests.wan_pipelines import made_by, pipeline

PROMPT, NEGATIVE = "a  red fox &amp; a hen", "blurry"
FRAMES, ROWS, COLUMNS = 3, 4, 6  # of a latent


def noise(channels: int = 16) -> Tensor:
    rng = torch.Generator().manual_seed(5)
    return torch.randn(channels, FRAMES, ROWS, COLUMNS, generator=rng)


def opened(folder: Path) -> OpenCheckpoint:
    """The pipeline's network, imported, with its text encoder and VAE."""
    done = import_weights(folder / "pipeline", folder / "ours")
    options = LoadOptions(t5_cache_dir=str(folder / "pipeline"))
    return open_checkpoint(done.path, weights="model", options=options)


def ours(run: OpenCheckpoint, noise_CFHW: Tensor, prompt: Prompt, **options) -> Tensor:
    """Our latents from the same noise."""
    _, height, width = run.latent_stride.pixels((FRAMES, ROWS, COLUMNS))
    size = {"height": height, "width": width, "num_video_frames": 4 * FRAMES - 3}
    asked = GenerationOptions(num_steps=4, negative_prompt=NEGATIVE, **size, **options)

    def drawn(batch, seeds):
        del seeds
        blank = generate.Request(
            inputs={}, negative={}, latent_FHW=(FRAMES, ROWS, COLUMNS), fps=16.0, seed=0
        )
        sample = replace(generate._blank(0, blank, run.config, {}), latent_CFHW=noise_CFHW)
        packed = pack_samples([sample], PatchLayout.of(run.config))
        assert packed.grids == batch.grids
        return packed.latent_TC

    with patch.object(generate, "initial_noise", drawn):
        (picture,) = generate_opened(run, [prompt], seed=0, options=asked, latents=True)
    assert picture.latent_CFHW is not None
    return picture.latent_CFHW


@pytest.mark.parametrize("scheduler", ["unipc", "euler"])
def test_text_to_video(groups, tmp_path: Path, scheduler: str) -> None:
    pipe = pipeline(tmp_path, "t2v", scheduler=scheduler)
    run = opened(tmp_path)
    objective = run.config.objective
    assert (objective.name, objective.flow.flow_shift) == ("flow", 3.0)
    made = {}
    for guidance in (1.0, 3.5):
        theirs = made_by(
            pipe, noise(), prompt=PROMPT, negative_prompt=NEGATIVE, guidance_scale=guidance
        )
        made[guidance] = ours(
            run, noise(), Prompt(text=PROMPT), guidance=guidance, sampler=scheduler
        )
        assert gap(made[guidance], theirs) <= 1e-4
    assert gap(made[1.0], made[3.5]) > 1e-2
