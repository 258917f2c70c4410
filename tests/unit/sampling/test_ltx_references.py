"""Reference videos (IC-LoRA), beside a plain Euler loop over Diffusers' network.

No pipeline of Diffusers takes them: its tokens stand in front of the others here, at the same
places, without noise and told the level 0.
"""

# T tokens, C features of a token, F H W frames, rows, columns of a latent

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.ltx.pipeline_ltx import calculate_shift
from diffusers.pipelines.ltx.pipeline_ltx_condition import linear_quadratic_schedule
from PIL import Image
from torch import Tensor

from dit.batch import LatentSample
from dit.config import RunConfig
from dit.convert.errors import ConvertError
from dit.convert.import_ import import_weights
from dit.data.pack import pack_samples
from dit.models.ltx.family import FAMILY as LTX
from dit.models.ltx.family import LtxConfig
from dit.models.patch_layout import PatchLayout
from dit.models.positions import patchify, unpatchify
from dit.sampling.commands.generate_media import generate_opened
from dit.sampling.commands.options import GenerationOptions
from dit.sampling.conditions.clips import read_clip, shorter
from dit.sampling.given_pictures import OF_VALIDATION, GivenPictures
from dit.sampling.media_files import _write_mp4
from dit.sampling.open_checkpoint import OpenCheckpoint
from dit.sampling.prompts import Prompt, read_prompts
from dit.sampling.validation.requests import sample_inputs
from tests.families.case import NEGATIVE, PROMPT, STEPS, gap
from tests.families.generation import from_noise, noise_of, opened, texts_of
from tests.families.ltx import CAUSAL, EVEN, SCHEDULERS, _even, coordinates, pipeline

GRID, FPS = (2, 3, 2), 25.0
FRAMES, HEIGHT, WIDTH = 9, 96, 64
MOST = "model.reference_latents=2"


def levels_of(kind: str) -> Tensor:
    """From 1 to 0, as the pipelines make them."""
    if kind == CAUSAL:
        return torch.cat([linear_quadratic_schedule(STEPS), torch.zeros(1)])
    scheduler: Any = FlowMatchEulerDiscreteScheduler(**SCHEDULERS[kind])
    names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    shift = calculate_shift(int(np.prod(GRID)), *(SCHEDULERS[kind][name] for name in names))
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / STEPS, STEPS), mu=shift)
    return scheduler.sigmas


@torch.no_grad()
def judged(
    network: Any,
    noise_CFHW: Tensor,
    references: Sequence[Tensor],
    texts: Mapping[str, Mapping[str, Tensor]],
    model: Any,
    *,
    guidance: float,
) -> Tensor:
    """The latent [C, F, H, W] that the network makes of the noise beside the references."""
    cut = [patchify(one.float(), 1, 1) for one in (*references, noise_CFHW)]
    place = coordinates if model.frame_positions == "causal" else _even
    where = torch.cat([place(grid, model, FPS) for grid, _ in cut], dim=1)[None]
    clean_TC, state_TC = torch.cat([rows for _, rows in cut[:-1]]), cut[-1][1]
    kind = CAUSAL if model.frame_positions == "causal" else EVEN
    levels = levels_of(kind)

    def velocity(text_LE: Tensor, level: Tensor) -> Tensor:
        told_T = torch.cat([torch.zeros(len(clean_TC)), level.expand(len(state_TC)) * 1000])
        made = network(
            torch.cat([clean_TC, state_TC])[None],
            text_LE.float()[None],
            told_T[None],
            torch.ones(1, len(text_LE)),
            video_coords=where,
        )
        return made.sample[0, len(clean_TC) :]

    for level, after in pairwise(levels):
        with_TC = velocity(texts["prompt"]["text"], level)
        if guidance != 1:
            without_TC = velocity(texts["negative_prompt"]["text"], level)
            with_TC = without_TC + guidance * (with_TC - without_TC)
        state_TC = state_TC + (after - level) * with_TC
    return unpatchify(state_TC, cut[-1][0], 1, 1)


def clip(file: Path, frames: int, seed: int) -> Path:
    draw = np.random.default_rng(seed).integers(0, 256, (frames, 3, 4, 3), dtype=np.uint8)
    large = [np.asarray(Image.fromarray(one).resize((WIDTH, HEIGHT))) for one in draw]
    _write_mp4(file, np.stack(large), fps=FPS)
    return file


def made(run: OpenCheckpoint, noise: Tensor, **options: Any) -> Tensor:
    size = {"height": HEIGHT, "width": WIDTH, "num_video_frames": FRAMES, "fps": FPS}
    usual = {"num_steps": STEPS, "sampler": "euler", "negative_prompt": NEGATIVE}
    asked = GenerationOptions(**size | usual | options)
    with from_noise(run.config, noise):
        (one,) = generate_opened(run, [Prompt(text=PROMPT)], seed=0, options=asked, latents=True)
    assert one.latent_CFHW is not None
    return one.latent_CFHW


@pytest.mark.slow
@pytest.mark.parametrize("kind", [EVEN, CAUSAL])
def test_reference_videos(groups: Any, tmp_path: Path, kind: str) -> None:
    pipe, noise = pipeline(tmp_path, kind), noise_of(GRID, 8)
    run = opened(tmp_path, MOST)
    videos = [clip(tmp_path / f"{n}.mp4", frames, n) for n, frames in enumerate((12, 3))]
    # Cut to the frames of the sample, and to whole latent frames.
    pixels = [
        read_clip(str(file), (frames, HEIGHT, WIDTH), option="")
        for file, frames in zip(videos, (9, 1), strict=True)
    ]
    latents = [run.decoder.encode(one.transpose(0, 1)) for one in pixels]  # type: ignore[union-attr]
    shown = {"reference_video": tuple(map(str, videos))}
    for guidance in (1.0, 3.0):
        wanted = judged(
            pipe.transformer, noise, latents, texts_of(run), run.config.model, guidance=guidance
        )
        found = made(run, noise, guidance=guidance, **shown)
        assert gap(found, wanted) <= 1e-4
    other = made(run, noise, guidance=3.0, reference_video=shown["reference_video"][1:])
    assert gap(other, found) > 1e-2


def test_reference_videos_that_are_none(groups: Any, tmp_path: Path) -> None:
    pipeline(tmp_path, CAUSAL)
    run, noise = opened(tmp_path), noise_of(GRID, 8)
    file = str(clip(tmp_path / "a.mp4", 9, 1))
    message = r"--reference_video .*a\.mp4: the network takes no references \(model\.reference_lat"
    with pytest.raises(ValueError, match=message):
        made(run, noise, reference_video=(file,))
    model: Any = replace(run.config.model, reference_latents=1)  # type: ignore[call-arg]
    run = replace(run, config=replace(run.config, model=model))
    with pytest.raises(ValueError, match=r"--reference_video .*a\.png is not named like a video"):
        made(run, noise, reference_video=(str(tmp_path / "a.png"),))
    (tmp_path / "b.mp4").write_text("no video")
    with pytest.raises(ValueError, match=r"--reference_video .*b\.mp4 cannot be read as a video"):
        made(run, noise, reference_video=(str(tmp_path / "b.mp4"),))
    with pytest.raises(ValueError, match="--reference_size published: no pipeline of the codec"):
        made(run, noise, reference_video=(file,), reference_size="published")


def test_a_reference_that_is_too_short_is_named(tmp_path: Path) -> None:
    file, notice = (
        str(clip(tmp_path / "a.mp4", 12, 1)),
        "has fewer frames than the sample (12 of 17): the first 9",
    )
    assert notice in shorter(file, 17, stride=8, option="--reference_video")
    assert not shorter(file, 9, stride=8, option="--reference_video")


def test_an_import_is_told_of_references(groups: Any, tmp_path: Path) -> None:
    pipeline(tmp_path, CAUSAL)
    done = import_weights(tmp_path / "pipeline", tmp_path / "a", objective=[MOST])
    assert done.config.model.reference_latents == 2  # type: ignore[attr-defined]
    with pytest.raises(ConvertError, match=r"takes model.frame_positions=... or model.reference_l"):
        import_weights(tmp_path / "pipeline", tmp_path / "b", objective=["model.num_layers=3"])


def test_reference_videos_of_prompts_and_of_held_out_samples(tmp_path: Path) -> None:
    """What validations read: a file of prompts, and the references of a pack."""
    clip(tmp_path / "a.mp4", 12, 1)
    (tmp_path / "p.json").write_text(json.dumps([{"caption": "x", "reference_path": "a.mp4"}]))
    (prompt,) = read_prompts(tmp_path / "p.json")
    given = GivenPictures(references=prompt.references, options=OF_VALIDATION.of(prompt))
    config = RunConfig(model=LtxConfig(**LTX.tiny["ltxv_2b"], name="custom"))
    wanted = LTX.inputs(config.model)
    decoder: Any = SimpleNamespace(temporal_stride=8, encode=lambda x: x[:, ::8, ::32, ::32])
    made = given.inputs(decoder, wanted, size=(FRAMES, HEIGHT, WIDTH), multiple=32)
    pixels = read_clip(prompt.references[0], (FRAMES, HEIGHT, WIDTH), option="")
    assert torch.equal(made["reference_latent_0"], decoder.encode(pixels.transpose(0, 1)))
    shown_HW3 = given.shown(HEIGHT, WIDTH)
    assert shown_HW3 is not None
    assert np.array_equal(shown_HW3, ((pixels[0] + 1) * 127.5).round().byte().permute(1, 2, 0))
    latent = torch.randn(4, 3, 4, 6)
    sample = LatentSample(
        key="a",
        latent_CFHW=torch.randn(4, 2, 4, 6),
        text_LE=torch.randn(3, 16),
        fps=25.0,
        others={"reference_latent_0": latent},
    )
    layout = PatchLayout.of(config)
    found = sample_inputs(pack_samples([sample], layout), 0, layout)
    assert torch.equal(found["reference_latent_0"], latent)
