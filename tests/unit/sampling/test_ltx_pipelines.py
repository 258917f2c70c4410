"""LTX-Video's pipelines of a given first frame, and its codec, from folders and noise."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from dit.codecs.dataset_card import CodecError
from dit.codecs.text import TEXT_ENCODERS
from dit.codecs.text.families import LtxText
from dit.codecs.vae.ltx import Ltx
from dit.convert.errors import ConvertError
from dit.convert.import_ import import_weights
from dit.sampling.prompts import Prompt
from tests.families import encoding, pipeline_parts
from tests.families.case import NEGATIVE, PROMPT, VIDEO, gap
from tests.families.generation import noise_of, opened, ours, texts_of
from tests.families.ltx import CAUSAL, EVEN, FIRST_FRAME, made_by, pipeline, random_ltx, texts_for
from tests.media_files import image

CONDITIONED = {
    FIRST_FRAME: {},
    CAUSAL: {"strength": 1.0, "image_cond_noise_scale": 0.0},
}
DISTILLED = (1000.0, 993.7, 909.4, 421.9)
CAPTION = "a red fox & a hen"


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONDITIONED)
def test_a_first_frame_to_video(groups, tmp_path: Path, kind: str) -> None:
    pipe = pipeline(tmp_path, kind)
    encode = pipe.vae.encode
    # Theirs draws from the distribution of the frame's latent, ours takes its mean.
    pipe.vae.encode = lambda x: Namespace(latents=encode(x).latent_dist.mode())
    run = opened(tmp_path)
    texts = texts_for(texts_of(run))
    _, height, width = run.latent_stride.pixels(VIDEO)
    first, other = (image(tmp_path / f"{n}.png", width, height, seed=n) for n in (1, 2))
    given, noise = Prompt(text=PROMPT, image=str(first)), noise_of(VIDEO, 8)
    options: dict[str, Any] = {"fps": 25.0, "negative_prompt": NEGATIVE}
    for guidance, rescale in ((1.0, 0.0), (3.0, 0.7), (3.0, 0.0)):
        call = {"guidance_scale": guidance, "guidance_rescale": rescale}
        theirs = made_by(pipe, noise, image=Image.open(first), **texts, **call, **CONDITIONED[kind])
        told = {"guidance": guidance, "guidance_rescale": rescale}
        made = ours(run, noise, given, **told, **options)
        assert gap(made, theirs) <= 1e-4
    moved = ours(run, noise, Prompt(text=PROMPT, image=str(other)), guidance=3.0, **options)
    assert gap(moved, made) > 1e-2


@pytest.mark.slow
def test_a_list_of_timesteps_is_that_of_the_pipeline(groups, tmp_path: Path) -> None:
    pipe, noise = pipeline(tmp_path, CAUSAL), noise_of(VIDEO, 8)
    run = opened(tmp_path, f"objective.sampling_timesteps={list(DISTILLED)}")
    texts = texts_for(texts_of(run))
    options: dict[str, Any] = {"fps": 25.0, "negative_prompt": NEGATIVE, "guidance": 1.0}
    objective = replace(run.config.objective, sampling_timesteps=None)
    usual = ours(replace(run, config=replace(run.config, objective=objective)), noise, **options)
    with pytest.raises(ValueError, match=r"has 4 timesteps, one for each step; set --num_steps 4"):
        ours(run, noise, **options, num_steps=5)
    made = ours(run, noise, **options, num_steps=4)
    call = {"timesteps": list(DISTILLED), "guidance_scale": 1.0}
    assert gap(made, made_by(pipe, noise, **texts, **call)) <= 1e-4
    assert gap(made, usual) > 1e-2


def codec_of(folder: Path, **changes: Any) -> Ltx:
    return encoding.codec("ltx", folder, **changes)


def test_latents_and_pictures_are_those_of_the_pipeline(tmp_path: Path) -> None:
    from diffusers import AutoencoderKLLTXVideo, LTXConditionPipeline

    codec = codec_of(pipeline_parts.ltx(tmp_path / "parts"))
    vae: Any = AutoencoderKLLTXVideo.from_pretrained(tmp_path / "parts/vae")
    assert (codec.stride, codec.temporal_stride, codec.channels) == (32, 8, 8)
    clip = torch.rand(3, 9, 64, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    statistics = vae.latents_mean, vae.latents_std
    with torch.no_grad():
        wanted = LTXConditionPipeline._normalize_latents(
            vae.encode(clip[None]).latent_dist.mode(), *statistics, vae.config.scaling_factor
        )
        latent = codec.whitening.apply(codec.encode_raw(clip))
        assert (latent - wanted[0]).abs().max() < 1e-5 and latent.std() > 0.01
        raw = LTXConditionPipeline._denormalize_latents(wanted, *statistics)
        noise = torch.randn(raw[0].shape, generator=torch.Generator().manual_seed(0))
        mixed = (1 - codec.decoder_noise) * raw + codec.decoder_noise * noise
        shown = vae.decode(mixed, torch.tensor([codec.decoder_level])).sample[0]
        again = codec.decode_raw(codec.whitening.undo(latent))
    assert (again - shown).abs().max() < 1e-4
    assert codec.from_settings(codec.settings) == codec


@pytest.mark.parametrize(("kind", "masked", "rows"), [(EVEN, False, 128), (CAUSAL, True, 256)])
def test_captions_are_read_as_the_pipeline_reads_them(
    tmp_path: Path, kind: str, masked: bool, rows: int
) -> None:
    folder = pipeline_parts.ltx(tmp_path / "parts", pipeline=kind)
    found = TEXT_ENCODERS["ltx"].from_settings(
        {"model_name": str(folder), "max_length": 512, "precision": "float32"}
    )
    assert isinstance(found, LtxText)
    assert (found.masked, found.max_length) == (masked, rows)
    assert found.from_settings(found.settings) == found
    assert len(found.embed(CAPTION)["text"]) == len(CAPTION) + 1
    (folder / "model_index.json").unlink()
    assert found.from_settings(found.settings) == found
    with pytest.raises(CodecError, match=r"model_index\.json of LTXPipeline or LTXImageToVideo"):
        found.from_settings({"model_name": f"{folder}/", "max_length": 9, "precision": "float32"})


def test_a_network_without_its_pipeline_needs_its_positions(groups, tmp_path: Path) -> None:
    random_ltx().save_pretrained(tmp_path / "hf")
    with pytest.raises(ConvertError, match=r"does not determine model\.frame_positions"):
        import_weights(tmp_path / "hf", tmp_path / "none")
    with pytest.raises(
        ConvertError, match=r"^model\.frame_positions=cause must be even or causal$"
    ):
        import_weights(
            tmp_path / "hf", tmp_path / "none", objective=["model.frame_positions=cause"]
        )
    with pytest.raises(ConvertError, match=r"'model\.num_layers=3' cannot be set"):
        import_weights(tmp_path / "hf", tmp_path / "none", objective=["model.num_layers=3"])
    words = ["model.frame_positions=even", "objective.shift_terminal=0.1"]
    found = import_weights(tmp_path / "hf", tmp_path / "even", objective=words).config
    assert found.model.frame_positions == "even"  # type: ignore[attr-defined]
    assert found.objective.shift_terminal == 0.1


def test_what_the_pipeline_tells_is_not_told_otherwise(groups, tmp_path: Path) -> None:
    pipeline(tmp_path, EVEN)
    with pytest.raises(ConvertError, match=r"frame_positions=causal contradicts .* LTXPipeline"):
        import_weights(
            tmp_path / "pipeline", tmp_path / "x", objective=["model.frame_positions=causal"]
        )
