"""Wan's pipelines of given pictures and of two experts, from their folders and noise."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline
from PIL import Image

from dit.config import Problems
from dit.convert.errors import ConvertError
from dit.convert.export import ExportOptions, export_weights
from dit.convert.import_ import import_weights
from dit.sampling.commands.load_options import LoadOptions
from dit.sampling.open_checkpoint import open_checkpoint
from dit.sampling.prompts import Prompt
from tests.families.case import NEGATIVE, VIDEO, gap
from tests.families.generation import noise_of, opened, ours
from tests.families.wan import NETWORKS, made_by, pipeline, random_wan
from tests.media_files import image

PROMPT = "a  red fox &amp; a hen"


def as_text_to_video(pipe) -> dict:
    names = ("tokenizer", "text_encoder", "vae", "transformer", "scheduler")
    return {name: getattr(pipe, name) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["i2v_2.1", "flf2v", "i2v_2.2", "5b"])
def test_image_to_video(groups, tmp_path: Path, kind: str) -> None:
    pipe = pipeline(tmp_path, kind, expand_timesteps=kind == "5b")
    run, channels = opened(tmp_path), 48 if kind == "5b" else 16
    _, height, width = run.latent_stride.pixels(VIDEO)
    # An image encoder sees the picture before it is resized in theirs, and after it in ours.
    has_encoder = kind in ("i2v_2.1", "flf2v")
    size = (width, height) if has_encoder else (50, 40)
    first, last = (image(tmp_path / f"{n}.png", *size, seed=n) for n in range(2))
    images = {"image": Image.open(first)}
    prompt = Prompt(text=PROMPT, image=str(first))
    if kind == "flf2v":
        images["last_image"] = Image.open(last)
        prompt = replace(prompt, last_image=str(last))
    for guidance in (1.0, 3.5):
        call = {"prompt": PROMPT, "negative_prompt": NEGATIVE, "guidance_scale": guidance}
        theirs = made_by(pipe, noise_of(VIDEO, channels), **images, **call)
        made = ours(run, noise_of(VIDEO, channels), prompt, guidance=guidance, sampler="unipc")
        assert gap(made, theirs) <= 1e-4
    other = replace(prompt, image=str(last))
    assert gap(ours(run, noise_of(VIDEO, channels), other, sampler="unipc"), made) > 1e-2
    if kind == "5b":
        alone = WanPipeline(**as_text_to_video(pipe), expand_timesteps=True)
        alone.set_progress_bar_config(disable=True)
        theirs = made_by(alone, noise_of(VIDEO, channels), **call)
        made = ours(
            run, noise_of(VIDEO, channels), Prompt(text=PROMPT), guidance=3.5, sampler="unipc"
        )
        assert gap(made, theirs) <= 1e-4
        return
    if kind == "flf2v":
        with pytest.raises(ValueError, match="give --last_image FILE"):
            ours(run, noise_of(VIDEO, channels), replace(prompt, last_image=None))
    else:
        with pytest.raises(ValueError, match=r"--last_image .*first picture alone"):
            ours(run, noise_of(VIDEO, channels), replace(prompt, last_image=str(last)))
    with pytest.raises(ValueError, match=r"`condition_latent`.*give --image FILE, or image_path"):
        ours(run, noise_of(VIDEO, channels), Prompt(text=PROMPT))
    with pytest.raises(ValueError, match=r"--image .*gone.png cannot be read"):
        ours(run, noise_of(VIDEO, channels), replace(prompt, image=str(tmp_path / "gone.png")))


def expert(folder: Path, part: str, levels: str, shift: float = 3.0) -> Path:
    """One network of a pipeline, imported as what was trained on a part of the levels."""
    told = ("name=flow", f"flow_shift={shift}", "sampling_levels=unipc", f"level_range={levels}")
    words = [f"objective.{word}" for word in told]
    target = folder / f"{part} {levels} {shift}"
    return import_weights(folder / "pipeline" / part, target, objective=words).path


def both_experts(folder: Path) -> tuple[Path, Path]:
    """The two networks of a pipeline, which says what levels each is for."""
    found = []
    for name, part in (("high", "pipeline"), ("low", "pipeline/transformer_2")):
        found.append(import_weights(folder / part, folder / name))
    flows = [one.config.objective for one in found]
    assert [flow.level_range for flow in flows] == [(0.875, 1.0), (0.0, 0.875)]
    assert {flow.flow_shift for flow in flows} == {3.0}
    assert "level_range=[0, 0.875] of the pipeline's boundary_ratio" in found[1].objective_note
    return found[0].path, found[1].path


def test_a_boundary_without_a_second_transformer_is_none(groups, tmp_path: Path) -> None:
    """Diffusers' converter has written one for Wan 2.1, whose one network has all levels."""
    pipeline(tmp_path, "t2v", boundary_ratio=0.9)
    found = import_weights(tmp_path / "pipeline", tmp_path / "whole")
    assert found.config.objective.level_range is None
    index = tmp_path / "pipeline/model_index.json"
    index.write_text(
        json.dumps(
            json.loads(index.read_text()) | {"transformer_2": ["a", "b"], "boundary_ratio": 9}
        )
    )
    with pytest.raises(ConvertError, match=r"model_index.json says boundary_ratio=9"):
        import_weights(tmp_path / "pipeline", tmp_path / "other")


def test_an_expert_goes_back_into_its_place_in_the_pipeline(groups, tmp_path: Path) -> None:
    second = random_wan(seed=1, **NETWORKS["t2v"])
    pipe = pipeline(tmp_path, "t2v", transformer_2=second, boundary_ratio=0.875)
    other = random_wan(seed=2, **NETWORKS["t2v"])
    other.save_pretrained(tmp_path / "trained")
    told = ("objective.name=flow", "objective.flow_shift=5", "objective.level_range=[0,0.875]")
    run = import_weights(tmp_path / "trained", tmp_path / "run", objective=told)
    options = ExportOptions(pipeline_from=tmp_path / "pipeline")
    export_weights(run.path, tmp_path / "export", options)
    opened = WanPipeline.from_pretrained(tmp_path / "export")
    for found, wanted in ((opened.transformer, pipe.transformer), (opened.transformer_2, other)):
        theirs = wanted.state_dict()
        assert all(torch.equal(value, theirs[name]) for name, value in found.state_dict().items())
    # The run samples with Euler, and the pipeline that it came from with UniPC.
    assert isinstance(opened.scheduler, FlowMatchEulerDiscreteScheduler)
    assert opened.scheduler.config.shift == 5

    whole = import_weights(tmp_path / "trained", tmp_path / "all", objective=told[:2])
    with pytest.raises(ConvertError, match=r"level_range=null, .* for \[0, 0.875\] and \[0.875, 1"):
        export_weights(whole.path, tmp_path / "none", options)


@pytest.mark.slow
def test_two_experts(groups, tmp_path: Path) -> None:
    second = random_wan(seed=1, **NETWORKS["t2v"])
    pipe = pipeline(tmp_path, "t2v", transformer_2=second, boundary_ratio=0.875)
    high, low = both_experts(tmp_path)
    encoders = LoadOptions(t5_cache_dir=str(tmp_path / "pipeline"))
    call = {"prompt": PROMPT, "negative_prompt": NEGATIVE, "guidance_scale": 3.5}
    theirs = made_by(pipe, noise_of(VIDEO, 16), **call)
    asked = {"guidance": 3.5, "sampler": "unipc"}
    moves: list = []
    for offload in (False, True):
        both = replace(encoders, checkpoint_path_low=str(low), offload_experts=offload)
        run = open_checkpoint(high, weights="model", options=both)
        with patch.object(type(run.model.second), "to", lambda *told: moves.append(told)):
            assert gap(ours(run, noise_of(VIDEO, 16), Prompt(text=PROMPT), **asked), theirs) <= 1e-4
        assert offload or not moves
    # 2 of 4 steps have levels from 875 on; each calls its expert with and without the caption.
    above, below = run.model.first, run.model.second
    wanted = [(below, "cpu"), (above, run.model.device)] * 4
    assert moves == wanted + [(above, "cpu"), (below, run.model.device)] * 4
    for options, words in (
        (replace(both, checkpoint_path_low=None), "give --checkpoint_path_low, too"),
        (encoders, r"level_range=\[0.875, 1.0\].*both experts"),
        (replace(both, checkpoint_path_low=str(high)), r"\[0.875, 1.0\] of .* and \[0.875, 1.0\]"),
        (
            replace(both, checkpoint_path_low=str(expert(tmp_path, "transformer_2", "[0,0.9]"))),
            r"\[0.875, 1.0\] of --checkpoint_path and \[0.0, 0.9\] of --checkpoint_path_low do not",
        ),
        (
            replace(
                both,
                checkpoint_path_low=str(expert(tmp_path, "transformer_2", "[0,0.875]", 5.0)),
            ),
            "flow_shift=3.0 of --checkpoint_path and 5.0",
        ),
    ):
        with pytest.raises((ValueError, Problems), match=words):
            open_checkpoint(high, weights="model", options=options)
