"""Pictures and clips at frames of a video, beside Diffusers' `LTXConditionPipeline`."""

# C features of a token, T tokens, F H W frames, rows, columns

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import av
import numpy as np
import pytest
import torch
from diffusers.pipelines.ltx import pipeline_ltx_condition
from diffusers.pipelines.ltx.pipeline_ltx_condition import LTXVideoCondition
from PIL import Image
from torch import Tensor

from dit.batch import PackedBatch
from dit.config import Sampler
from dit.models.positions import patchify
from dit.sampling import generate
from dit.sampling.commands.generate_media import generate_opened
from dit.sampling.commands.options import GenerationOptions
from dit.sampling.conditions import tokens as conditions
from dit.sampling.conditions.clips import read_clip
from dit.sampling.conditions.files import condition_files
from dit.sampling.media_files import _write_mp4
from dit.sampling.open_checkpoint import OpenCheckpoint
from dit.sampling.prompts import Prompt
from tests.families.case import NEGATIVE, PROMPT, STEPS, gap
from tests.families.generation import opened, texts_of
from tests.families.ltx import CAUSAL, EVEN, pipeline, texts_for

GRID = (5, 3, 2)
FRAMES, HEIGHT, WIDTH = 33, 96, 64
PICTURE, CLIP = "--image", "--video"
CASES = {
    # Of each condition: option, frame, strength.
    "a first picture": ([(PICTURE, 0, 0.7)], {}),
    "a first picture with noise": ([(PICTURE, 0, 1.0)], {"condition_noise": 0.15}),
    "a later picture": ([(PICTURE, 16, 1.0)], {}),
    "a weak later picture": ([(PICTURE, 11, 0.7)], {"guidance_rescale": 0.7}),
    "a clip": ([(CLIP, 8, 1.0)], {"condition_noise": 0.15}),
    "a weak clip at the start": ([(CLIP, 0, 0.7)], {"guidance": 1.0}),
    "several": (
        [(PICTURE, 0, 1.0), (PICTURE, 32, 0.05), (CLIP, 8, 0.7)],
        {"condition_noise": 0.15, "guidance_rescale": 0.7},
    ),
    "several, unguided": (
        [(PICTURE, 0, 0.7), (CLIP, 8, 1.0), (CLIP, 24, 0.5)],
        {"condition_noise": 0.15, "guidance": 1.0},
    ),
}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory, groups: Any) -> tuple[Any, OpenCheckpoint]:
    """Their pipeline and our network."""
    folder = tmp_path_factory.mktemp("ltx")
    pipe = pipeline(folder, CAUSAL)
    encode = pipe.vae.encode
    # Theirs draws from the distribution of a latent, ours takes its mean.
    pipe.vae.encode = lambda x: Namespace(latents=encode(x).latent_dist.mode())
    return pipe, opened(folder)


def files(folder: Path) -> dict[str, Path]:
    """A picture, and a clip of 21 pictures, of which 17 are whole latent frames."""
    draw = np.random.default_rng(2)
    small = draw.integers(0, 256, (21, 4, 6, 3), dtype=np.uint8)
    large = np.stack([np.asarray(Image.fromarray(x).resize((70, 50))) for x in small])
    Image.fromarray(large[5]).save(folder / "picture.png")
    _write_mp4(folder / "clip.mp4", large, fps=25)
    return {PICTURE: folder / "picture.png", CLIP: folder / "clip.mp4"}


def theirs_of(pipe: Any, told: list[Any], found: dict[str, Path], **call: Any) -> tuple:
    """Latents [C, F, H, W], and all that the pipeline drew, in its order."""
    with av.open(str(found[CLIP])) as container:
        clip = [frame.to_image() for frame in container.decode(video=0)]
    media: dict[str, Any] = {CLIP: {"video": clip}, PICTURE: {"image": Image.open(found[PICTURE])}}
    given = [
        LTXVideoCondition(**media[option], frame_index=frame, strength=strength)
        for option, frame, strength in told
    ]
    generator, drawn = torch.Generator().manual_seed(7), list[Tensor]()

    def draw(shape: Any, **_: Any) -> Tensor:
        drawn.append(torch.randn(tuple(shape), generator=generator))
        return drawn[-1].clone()

    with patch.object(pipeline_ltx_condition, "randn_tensor", draw):
        (made,) = pipe(
            conditions=given,
            height=HEIGHT,
            width=WIDTH,
            num_frames=FRAMES,
            frame_rate=25,
            num_inference_steps=STEPS,
            output_type="latent",
            return_dict=False,
            **call,
        )
    return made[0], drawn


@contextmanager
def noise_of(drawn: list[Tensor], own: int) -> Iterator[None]:
    """What the pipeline drew, as tokens, where ours draws: `own` conditions have tokens."""
    parts_TC = [patchify(one[0], 1, 1)[1] for one in drawn[: 1 + own]]
    first_TC, at_steps = torch.cat(parts_TC), drawn[1 + own :]
    extra = len(first_TC) - len(parts_TC[0])

    def padded(values_TC: Tensor, batch: PackedBatch) -> Tensor:
        made_TC = torch.zeros_like(batch.latent_TC, dtype=torch.float32)
        made_TC[: len(values_TC)] = values_TC
        return made_TC

    def at_start(batch: PackedBatch, seeds: Any) -> Tensor:
        return padded(first_TC, batch)

    def at_step(batch: PackedBatch, seeds: Any, step: int) -> Tensor:
        (theirs_TC,) = at_steps[step]
        return padded(torch.cat([theirs_TC[extra:], theirs_TC[:extra]]), batch)

    with ExitStack() as stack:
        stack.enter_context(patch.object(generate, "initial_noise", at_start))
        stack.enter_context(patch.object(conditions, "step_noise", at_step))
        yield


def options_of(told: list[Any], found: dict[str, Path], **more: Any) -> GenerationOptions:
    """Options as the command line gives them: images, then clips."""
    in_order = [one for kind in (PICTURE, CLIP) for one in told if one[0] == kind]
    return GenerationOptions(
        image=tuple(str(found[o]) for o, *_ in in_order if o == PICTURE),
        video=tuple(str(found[o]) for o, *_ in in_order if o == CLIP),
        at_frame=tuple(frame for _, frame, _ in in_order),
        strength=tuple(strength for *_, strength in in_order),
        **{"num_steps": STEPS, "sampler": "euler", "guidance": 3.0, "fps": 25.0} | more,
        negative_prompt=NEGATIVE,
        height=HEIGHT,
        width=WIDTH,
        num_video_frames=FRAMES,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_conditions_are_those_of_the_pipeline(
    parts: tuple[Any, OpenCheckpoint], tmp_path: Path, name: str
) -> None:
    (pipe, run), (told, more), found = parts, CASES[name], files(tmp_path)
    options = options_of(told, found, **more)
    call = {
        "guidance_scale": options.guidance,
        "guidance_rescale": options.guidance_rescale,
        "image_cond_noise_scale": options.condition_noise,
    }
    wanted, drawn = theirs_of(pipe, told, found, **texts_for(texts_of(run)), **call)
    with noise_of(drawn, own=sum(frame > 0 for _, frame, _ in told)):
        (made,) = generate_opened(run, [Prompt(text=PROMPT)], seed=0, options=options, latents=True)
    assert made.latent_CFHW is not None
    assert gap(made.latent_CFHW, wanted) <= 1e-4


def test_a_neighbour_has_no_conditions(parts: tuple[Any, OpenCheckpoint]) -> None:
    _, run = parts
    latent = torch.randn(8, 3, *GRID[1:], generator=torch.Generator().manual_seed(1))
    given = (
        conditions.Condition(latent_CFHW=latent[:, :1], strength=0.5),
        conditions.Condition(latent_CFHW=latent, frame=8),
    )
    text = run.encoder.encode_all(PROMPT)
    usual: dict[str, Any] = {"inputs": text, "negative": dict(run.null), "latent_FHW": GRID}
    plain, shown = (
        generate.Request(**usual, fps=25.0, seed=3, conditions=of) for of in ((), given)
    )
    settings = generate.SamplingSettings(
        num_steps=2, guidance=3.0, guidance_rescale=0.5, sampler=Sampler.EULER, condition_noise=0.15
    )

    def made(*requests: generate.Request) -> list[Tensor]:
        return generate.generate_latents(run.model, requests, config=run.config, settings=settings)

    (alone,), (own,), both = made(plain), made(shown), made(shown, plain)
    assert gap(both[1], alone) <= 1e-5 and gap(both[0], own) <= 1e-5
    assert gap(own, alone) > 0.1
    with pytest.raises(ValueError, match=r"at noise levels of their own; use --sampler euler"):
        settings = replace(settings, sampler=Sampler.HEUN)
        made(shown)


def test_other_networks_are_given_none(groups: Any, tmp_path: Path) -> None:
    pipeline(tmp_path, EVEN)
    run, found = opened(tmp_path), files(tmp_path)
    with pytest.raises(ValueError, match=r"--image .*png: the network shows no pictures or"):
        options = options_of([(PICTURE, 8, 1.0)], found)
        generate_opened(run, [Prompt(text=PROMPT)], seed=0, options=options)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"at_frame": (8,)}, r"--at_frame 8: there is no picture or clip; give --image or --video"),
        (
            {"image": ("a", "b")},
            r"--at_frame needs one value for each of 2 pictures and clips, but has 0; give",
        ),
        (
            {"image": ("a",), "video": ("b",), "at_frame": (0, 8), "strength": (0.5,)},
            r"--strength needs one value for each of 2 pictures",
        ),
        (
            {"image": ("a",), "strength": (1.5,)},
            r"--strength 1\.5 must be above 0 and at most 1",
        ),
        (
            {"video": ("a",), "last_image": "b"},
            r"--last_image b: with other pictures, give it as --image with --at_frame",
        ),
        ({"condition_noise": -1}, r"--condition_noise -1 must lie in \[0, 1\]; 0 adds no noise"),
    ],
)
def test_options_that_do_not_fit(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        condition_files(GenerationOptions(**given))


def test_what_the_options_name(tmp_path: Path) -> None:
    assert condition_files(GenerationOptions(image=("a",))) == ()
    images = GenerationOptions(image=("a",), video=("b",), at_frame=(16, 0), strength=(1, 0.5))
    found = [(one.option, one.file, one.frame, one.strength) for one in condition_files(images)]
    assert found == [("--image", "a", 16, 1), ("--video", "b", 0, 0.5)]
    with pytest.raises(ValueError, match=r"--at_frame 16 of --image a must lie in 0 to 8"):
        condition_files(images)[0].check(9)
    with pytest.raises(ValueError, match=r"--video .*text\.mp4 cannot be read as a video"):
        (tmp_path / "text.mp4").write_text("no video")
        read_clip(str(tmp_path / "text.mp4"), (9, 32, 32), option="--video")
