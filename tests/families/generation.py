"""Pipelines of Diffusers beside our generation, from the same noise."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from dit.batch import Grid
from dit.config import RunConfig
from dit.convert.import_ import import_weights
from dit.data.pack import pack_samples
from dit.models.patch_layout import PatchLayout
from dit.sampling import generate
from dit.sampling.commands.generate_media import generate_opened
from dit.sampling.commands.load_options import LoadOptions
from dit.sampling.commands.options import GenerationOptions
from dit.sampling.generate import Request
from dit.sampling.open_checkpoint import OpenCheckpoint, open_checkpoint
from dit.sampling.prompts import Prompt
from tests.families.case import NEGATIVE, PROMPT, STEPS, Texts


def noise_of(size: Grid, channels: int = 4) -> Tensor:
    return torch.randn(channels, *size, generator=torch.Generator().manual_seed(5))


def opened(folder: Path, *told: str, away: str | None = None) -> OpenCheckpoint:
    """The network of `folder`/pipeline, imported, with its text encoders and VAE.

    `told` are keys of the objective, such as objective.flow_shift=3; `away` is the folder there of
    the network that guidance leads away from.
    """
    source = folder / "pipeline"
    done = import_weights(source, folder / "ours", objective=told)
    other = None if away is None else import_weights(source / away, folder / away).path
    options = LoadOptions(t5_cache_dir=str(source), checkpoint_path_away=other and str(other))
    return open_checkpoint(done.path, weights="model", options=options)


def texts_of(run: OpenCheckpoint, prompt: str = PROMPT, negative: str = NEGATIVE) -> Texts:
    found = run.encoder.encode_negative(negative)
    return {"prompt": run.encoder.encode_all(prompt), "negative_prompt": found}


def ours(run: OpenCheckpoint, start: Tensor, *prompts: Prompt | str, **options: Any) -> Tensor:
    """Our latent [C, F, H, W] of the first of some prompts in one pack, from the same noise."""
    return all_of_ours(run, start, *prompts, **options)[0]


def all_of_ours(
    run: OpenCheckpoint, start: Tensor, *prompts: Prompt | str, **options: Any
) -> list[Tensor]:
    """The same of each prompt."""
    frames, height, width = run.latent_stride.pixels(tuple(start.shape[1:]))  # type: ignore[arg-type]
    usual = {"num_steps": STEPS, "sampler": "euler", "negative_prompt": NEGATIVE}
    size = {"height": height, "width": width, "num_video_frames": frames}
    asked = GenerationOptions(**{**usual, **size, **options})
    words = [Prompt(text=one) if isinstance(one, str) else one for one in prompts or (PROMPT,)]
    with from_noise(run.config, start):
        made = generate_opened(run, words, seed=0, options=asked, latents=True)
    return [one.latent_CFHW for one in made if one.latent_CFHW is not None]


def from_noise(config: RunConfig, noise_CFHW: Tensor) -> AbstractContextManager[object]:
    """In the place of `initial_noise`: `noise_CFHW` of each sample, nothing for references."""
    size = tuple(noise_CFHW.shape[1:])

    def drawn(batch, seeds):
        del seeds  # all samples begin alike, whatever their order in the pack
        blank = Request(inputs={}, negative={}, latent_FHW=size, fps=float("nan"), seed=0)
        sample = replace(generate._blank(0, blank, config.model, {}), latent_CFHW=noise_CFHW)
        own_TC = pack_samples([sample], PatchLayout.of(config)).latent_TC
        found_TC = torch.zeros_like(batch.latent_TC)
        tokens = size[0] // config.model.patch_temporal
        tokens *= size[1] * size[2] // config.model.patch_spatial**2
        for start in batch.starts[:-1]:
            found_TC[start : start + tokens] = own_TC[:tokens]
        return found_TC

    return patch.object(generate, "initial_noise", drawn)
