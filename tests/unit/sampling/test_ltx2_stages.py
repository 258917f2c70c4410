"""LTX-2 in two stages with a latent upsampler between them, beside Diffusers' pipelines."""

# C channels, F frames, H rows, W columns of a latent; K channels, A frames of that of a sound

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    LTX2LatentUpsamplePipeline,
    LTX2Pipeline,
)
from diffusers import FlowMatchEulerDiscreteScheduler as Scheduler
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel
from diffusers.pipelines.ltx2.utils import DISTILLED_SIGMA_VALUES, STAGE_2_DISTILLED_SIGMA_VALUES
from torch import Tensor

from dit.config import Sampler
from dit.convert.import_ import import_weights
from dit.sampling.commands import stages
from dit.sampling.commands.generate_media import generate_opened, notes_on
from dit.sampling.commands.load_options import LoadOptions
from dit.sampling.commands.options import GenerationOptions
from dit.sampling.commands.stages import SECOND_STAGE, Stages
from dit.sampling.conditions.sound import JointStreams, SoundRequest, sound_frames
from dit.sampling.generate import Generated, Request, SamplingSettings, generate_streams
from dit.sampling.open_checkpoint import OpenCheckpoint, open_checkpoint
from dit.sampling.prompts import Prompt
from tests.families import ltx2, pipeline_parts
from tests.families.case import gap
from tests.unit.sampling.test_ltx2_pipelines import FPS, NETWORK, SCHEDULER, Connected, texts_of

FRAMES, CELL = 17, 32
SIGMAS = DISTILLED_SIGMA_VALUES[-4:]
OFF = {
    f"{stream}{name}": value
    for stream in ("", "audio_")
    for name, value in (
        *(("guidance_scale", 1.0), ("stg_scale", 0.0), ("modality_scale", 1.0)),
        ("guidance_rescale", 0.0),
    )
}


def upsampler(scale: float, **changes: Any) -> Any:
    """A tiny random network that enlarges latents of 8 channels."""
    sizes: dict[str, Any] = {"in_channels": 8, "mid_channels": 32, "num_blocks_per_stage": 1}
    return pipeline_parts.randomized(
        LTX2LatentUpsamplerModel(**{**sizes, "rational_spatial_scale": scale} | changes)
    )


@pytest.fixture(scope="module")
def made(groups: Any, tmp_path_factory: Any) -> tuple[Any, OpenCheckpoint]:
    """A pipeline without text encoder, and the import of the whole pipeline, opened."""
    del groups  # process groups for the import
    folder = tmp_path_factory.mktemp("ltx2")
    source = pipeline_parts.ltx2(folder / "pipeline")
    widths = {"attention_head_dim": 8, "audio_attention_head_dim": 4, "caption_channels": 16}
    widths |= {"cross_attention_dim": 32, "audio_cross_attention_dim": 16}
    network = ltx2.CASE.random(seed=4, **NETWORK, **ltx2.VERSIONS["2.3"] | widths)
    network.save_pretrained(source / "transformer")
    vaes: dict[str, Any] = {
        "vae": AutoencoderKLLTX2Video.from_pretrained(source / "vae"),
        "audio_vae": AutoencoderKLLTX2Audio.from_pretrained(source / "audio_vae"),
    }
    none = dict.fromkeys(("text_encoder", "tokenizer", "connectors", "vocoder"))
    # As the documentation of the distilled networks says.
    fixed = {"use_dynamic_shifting": False, "shift_terminal": None}
    pipe = LTX2Pipeline(
        transformer=network, scheduler=Scheduler(**SCHEDULER | fixed), **vaes, **none
    )
    pipe.set_progress_bar_config(disable=True)
    done = import_weights(source, folder / "ours")
    options = LoadOptions(t5_cache_dir=str(source))
    return pipe, open_checkpoint(done.path, weights="model", options=options)


def noise(latent_FHW: tuple[int, ...], config: Any) -> tuple[Tensor, Tensor]:
    """Noise of a latent [C, F, H, W] and of the sound [K, A]; other numbers for other sizes."""
    rng = torch.Generator().manual_seed(latent_FHW[1])
    frames = sound_frames(config.model, frames=FRAMES, fps=FPS)
    return torch.randn(8, *latent_FHW, generator=rng), torch.randn(16, frames, generator=rng)


@torch.no_grad()
def theirs(pipe: Any, run: Any, enlarge: Any, small: Any, large: Any) -> Generated:
    """Whitened latents of three pipelines in a row."""
    mean, std = pipe.audio_vae.latents_mean, pipe.audio_vae.latents_std
    scale = pipe.vae.config.scaling_factor
    pipe.register_modules(connectors=Connected(texts_of(run.config.model)))
    states = {"prompt_embeds": torch.zeros(1, 7, 4), "prompt_attention_mask": torch.ones(1, 7)}
    told = {**states, **OFF, "num_frames": FRAMES, "frame_rate": FPS}
    told |= {"output_type": "latent", "return_dict": False}
    noise_CFHW, noise_KA = noise(small, run.config)
    video, heard = pipe(
        latents=pipe._pack_latents(noise_CFHW[None]),
        audio_latents=pipe._denormalize_audio_latents(noise_KA.T[None], mean, std),
        height=small[1] * CELL,
        width=small[2] * CELL,
        sigmas=SIGMAS,
        **told,
    )
    between = LTX2LatentUpsamplePipeline(vae=pipe.vae, latent_upsampler=enlarge)
    (video,) = between(
        latents=video,
        height=small[1] * CELL,
        width=small[2] * CELL,
        output_type="latent",
        return_dict=False,
    )
    noise_CFHW, noise_KA = noise(large, run.config)
    drawn = {1: pipe._pack_latents(noise_CFHW[None]), 0: noise_KA.T[None]}
    of_latents = {tuple(one.shape): one for one in drawn.values()}
    with patch(
        "diffusers.pipelines.ltx2.pipeline_ltx2.randn_tensor",
        lambda shape, **_: of_latents[tuple(shape)].clone(),
    ):
        video, heard = pipe(
            latents=video,
            audio_latents=heard,
            height=large[1] * CELL,
            width=large[2] * CELL,
            sigmas=STAGE_2_DISTILLED_SIGMA_VALUES,
            noise_scale=STAGE_2_DISTILLED_SIGMA_VALUES[0],
            **told,
        )
    video = pipe._normalize_latents(video, pipe.vae.latents_mean, pipe.vae.latents_std, scale)
    rows = pipe._normalize_audio_latents(pipe._pack_audio_latents(heard), mean, std)
    return Generated(video[0], rows[0].T)


def ours(run: OpenCheckpoint, options: GenerationOptions) -> Generated:
    def request(index: int, size: Any) -> Request:
        return Request(
            **texts_of(run.config.model),
            latent_FHW=run.latent_stride.latent(size),
            fps=FPS,
            seed=index,
            sound=SoundRequest(frames=sound_frames(run.config.model, frames=FRAMES, fps=FPS)),
        )

    def drawn(streams: JointStreams, *_: Any) -> Tensor:
        found_TC = torch.zeros_like(streams.row.latent_TC)
        video = streams.pack
        noise_CFHW, noise_KA = noise(video.grids[0], run.config)
        found_TC[: noise_CFHW[0].numel(), :8] = noise_CFHW.flatten(1).T
        first = len(video.segment_T)
        found_TC[first : first + noise_KA.shape[1], :16] = noise_KA.T
        return found_TC

    both = Stages.of(options, run)
    with patch.object(JointStreams, "noise", drawn):
        (found,) = both.generate(
            run.model,
            {0: (FRAMES, options.height or 0, options.width or 0)},
            request,
            config=run.config,
            settings=SamplingSettings(sampler=Sampler.EULER),
        )
    return found


@pytest.mark.parametrize(
    ("scale", "asked", "small", "large"),
    [
        (2.0, (128, 192), (3, 2, 3), (3, 4, 6)),
        # 97 rows are 4 cells, and the upsampler makes multiples of three.
        (1.5, (97, 192), (3, 4, 4), (3, 6, 6)),
    ],
)
def test_both_stages_are_those_of_the_pipelines(
    made: Any, tmp_path: Path, scale: float, asked: Any, small: Any, large: Any
) -> None:
    pipe, run = made
    enlarge = upsampler(scale)
    enlarge.save_pretrained(tmp_path / "latent_upsampler")
    options = GenerationOptions(
        upsampler=str(tmp_path), sigmas=tuple(SIGMAS), height=asked[0], width=asked[1]
    )
    found, wanted = ours(run, options), theirs(pipe, run, enlarge, small, large)
    assert tuple(STAGE_2_DISTILLED_SIGMA_VALUES) == SECOND_STAGE
    assert found.latent_CFHW.shape == (8, *large)
    assert found.sound_KA is not None and wanted.sound_KA is not None
    assert gap(found.latent_CFHW, wanted.latent_CFHW) <= 1e-4
    assert gap(found.sound_KA, wanted.sound_KA) <= 1e-4


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"in_channels": 4}, "with 4 channels, and the run has 8; give the upsampler of the run's"),
        ({"temporal_upsample": True}, "does not enlarge rows and columns alone; give the folder"),
        ({"rational_spatial_scale": 0.75}, "does not enlarge rows and columns alone"),
        ({"_class_name": "LTXLatentUpsamplerModel"}, "is of class 'LTXLatentUpsamplerModel'; give"),
        (None, r"config\.json cannot be read .* give the folder of a LTX2LatentUpsamplerModel"),
    ],
)
def test_another_upsampler_is_refused(made: Any, tmp_path: Path, changes: Any, said: str) -> None:
    if changes is not None:
        config = {"_class_name": "LTX2LatentUpsamplerModel", "in_channels": 8, **changes}
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"--upsampler {tmp_path}: .*{said}"):
        Stages.of(GenerationOptions(upsampler=str(tmp_path)), made[1])


def test_an_imported_pipeline_makes_clips_with_sound_in_two_stages(
    made: Any, tmp_path: Path
) -> None:
    _, run = made
    upsampler(2.0).save_pretrained(tmp_path)
    options = GenerationOptions(
        **{"height": 96, "width": 130, "num_video_frames": FRAMES, "fps": FPS, "guidance": 1.0},
        **{"sampler": "euler", "sigmas": (1.0, 0.5), "upsampled_sigmas": (0.5,)},
        upsampler=str(tmp_path),
    )
    prompts, taken = [Prompt(text="a bell")], list[tuple[Any, Any]]()

    def watched(model: Any, requests: Any, *, config: Any, **told: Any) -> Any:
        levels = config.objective.sampling_timesteps
        taken.append((requests[0].latent_FHW, levels))
        return generate_streams(model, requests, config=config, **told)

    with patch.object(stages, "generate_streams", watched):
        (clip,) = generate_opened(run, prompts, seed=0, options=options)
    assert taken == [((3, 2, 3), (1000, 500)), ((3, 4, 6), (500,))]
    assert clip.frames_FHW3.shape == (FRAMES, 96, 130, 3)
    # Of 35 latents of sound, 4 frames of 10 ms each but the first, which has one.
    assert clip.sound is not None and clip.sound.samples_CS.shape == (2, 480 * (4 * 35 - 3))
    (note,) = notes_on(run, options, prompts)
    assert note.startswith("generates 128 rows instead of 96, 192 columns instead of 130")


def test_damaged_weights_are_found_before_the_first_stage(made: Any, tmp_path: Path) -> None:
    upsampler(2.0).save_pretrained(tmp_path)
    file = tmp_path / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    options = GenerationOptions(upsampler=str(tmp_path), height=128, width=192)
    said = f"--upsampler {tmp_path}: the weights cannot be read .*; download the folder again"
    with pytest.raises(ValueError, match=said):
        ours(made[1], options)


def test_other_networks_have_one_stage(made: Any, tmp_path: Path) -> None:
    other: Any = SimpleNamespace(config=SimpleNamespace(model=SimpleNamespace(family="dit")))
    with (
        patch("dit.sampling.commands.stages.has_sound", lambda _: False),
        pytest.raises(ValueError, match=r"--upsampler x: model\.family=dit generates in one stage"),
    ):
        Stages.of(GenerationOptions(upsampler="x"), other)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sigmas": (1.0, 0.5, 0.5)}, "--sigmas 1.0 0.5 0.5 must be falling noise levels above 0"),
        ({"sigmas": (1.5, 0.5)}, "--sigmas 1.5 0.5 must be falling .* the first at most 1"),
        ({"sigmas": (0.5, 0.0)}, "--sigmas 0.5 0.0 must be falling"),
        ({"sigmas": (float("nan"),)}, "--sigmas nan must be falling"),
        (
            {"sigmas": (1.0, 0.5), "num_steps": 3},
            r"--num_steps 3 is not the number of --sigmas \(2\); leave it out",
        ),
        ({"upsampled_sigmas": (0.5,)}, "second stage; give --upsampler, too, or leave them out"),
    ],
)
def test_levels_fall_and_have_a_stage(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        GenerationOptions(**options)
