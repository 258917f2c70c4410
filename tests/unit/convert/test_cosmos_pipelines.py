"""What the pipelines of Cosmos-Predict2 and 2.5 tell their networks, our objective tells ours."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from diffusers import DiffusionPipeline

from dit.checkpoint_paths import saved_config
from dit.config import Sampler
from dit.convert.cli import main
from dit.convert.errors import ConvertError
from dit.convert.export import ExportOptions, check_expressible, export_weights
from dit.convert.import_ import import_weights
from dit.data.pack import pack_samples
from dit.models.dit.model import DiT
from dit.models.patch_layout import PatchLayout
from dit.sampling import generate
from dit.sampling.generate import Request, SamplingSettings, check_requests, generate_latents
from dit.train.checkpoint.state_dict import load_weights
from tests.families.case import gap
from tests.families.cosmos_pipelines import PIPELINES, Checker, pipeline, save, watched
from tests.unit.convert.test_round_trip import _assert_same, _tensors

STEPS = 4
CASES = [("images", 0), ("video", 1), ("video", 2), ("2.5", 0), ("2.5", 1), ("2.5", 2)]
"""Pipelines and given latent frames; that of Predict2's video needs one at least."""

NOISE = {
    frames: torch.randn(4, frames, 4, 6, generator=torch.Generator().manual_seed(frames))
    for frames in (1, 3)
}
TEXT = {"images": {"text_pad_to": 9}, "video": {"text_pad_to": 9}, "2.5": {}}


def rows(width: int, *, seed: int) -> torch.Tensor:
    return torch.randn(9, width, generator=torch.Generator().manual_seed(seed))


def run(pipe, *, given: int, guidance: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Four steps from noise of (3 or 1, 4, 6) cells."""
    config = pipe.transformer.config
    width = config.text_embed_dim
    if config.use_crossattn_projection:
        width = config.crossattn_proj_in_channels
    frames = 3 if config.in_channels == 5 else 1
    texts = {"prompt_embeds": rows(width, seed=1), "negative_prompt_embeds": rows(width, seed=2)}
    texts = {name: text[None] for name, text in texts.items()}
    return watched(
        pipe,
        given=given,
        guidance=guidance,
        noise=NOISE[frames],
        num_inference_steps=STEPS,
        **texts,
    )


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_comes_back_and_runs(groups, resize, tmp_path, capsys, name):
    pipe = pipeline(name)
    source, back = save(tmp_path / "hf", pipe), tmp_path / "back"
    words = ["--megatron-path", str(tmp_path / "ours"), "--hf-path"]
    assert main(["import", *words, str(source)]) == 0
    assert f"objective: flow, of {type(pipe).__name__}" in capsys.readouterr().out
    config = saved_config(tmp_path / "ours")
    assert (config.objective.name, config.objective.timestep_scale) == ("flow", 1.0)
    assert main(["export", *words, str(back), "--pipeline-from", str(source)]) == 0
    _assert_same(_tensors(source / "transformer"), _tensors(back / "transformer"))
    for file in ("model_index.json", "scheduler/scheduler_config.json", "vae/config.json"):
        assert (back / file).read_bytes() == (source / file).read_bytes()
    ours = {"safety_checker": Checker(), "text_encoder": None, "tokenizer": None}
    again = DiffusionPipeline.from_pretrained(back, **ours)
    again.set_progress_bar_config(disable=True)
    given = 0 if name == "images" else 1
    assert torch.equal(run(again, given=given)[1], run(pipe, given=given)[1])


@pytest.mark.parametrize("guidance", [1.0, 3.5])
@pytest.mark.parametrize(("name", "given"), CASES)
def test_we_generate_what_the_pipeline_does(groups, resize, tmp_path, name, given, guidance):
    """From the same noise; its guidance is one less than ours."""
    pipe = pipeline(name)
    done = import_weights(save(tmp_path / "hf", pipe), tmp_path / "ours", **TEXT[name])
    config = done.config
    fed, theirs = run(pipe, given=given, guidance=guidance - 1 if guidance > 1 else 1.0)
    text, negative = (rows(config.model.crossattn_emb_size, seed=seed) for seed in (1, 2))
    inputs = {"text": text} | ({"first_frame_latent": fed[:, :given]} if given else {})
    size = tuple(fed.shape[1:])
    request = Request(inputs=inputs, negative={"text": negative}, latent_FHW=size, fps=16.0, seed=0)
    network = DiT(config.model, groups)
    load_weights(done.path, [network], groups, averaged=False)
    sampler = Sampler.UNIPC if name == "2.5" else Sampler.EULER
    settings = SamplingSettings(num_steps=STEPS, guidance=guidance, sampler=sampler)
    layout = PatchLayout.of(config)
    noise = pack_samples(
        [replace(check_requests([request], config)[0], latent_CFHW=NOISE[size[0]])], layout
    )
    with patch.object(generate, "initial_noise", lambda *_: noise.latent_TC):
        (made,) = generate_latents(network, [request], config=config, settings=settings)
    assert gap(made[:, given:], theirs[:, given:]) <= 1e-4
    if given:
        # The pipelines move given frames from noise as well, and not all the way.
        assert torch.equal(made[:, :given], fed[:, :given])
        assert gap(made[:, :given], theirs[:, :given]) <= 0.05


def test_pipelines_that_would_feed_other_inputs(groups, tmp_path):
    folders = {name: save(tmp_path / name, pipeline(name)) for name in PIPELINES}
    for name, other, named in (
        ("images", "video", "model.condition_mask=false, but Cosmos2VideoToWorldPipeline passes"),
        ("images", "2.5", "model.text_pad_to=512, but Cosmos2_5_PredictBasePipeline"),
        ("video", "images", "model.condition_mask=true, but Cosmos2TextToImagePipeline"),
        (
            "video",
            "2.5",
            "model.base_fps=24.0, but Cosmos2_5_PredictBasePipeline passes no",
        ),
        (
            "2.5",
            "video",
            "base_fps=null, but Cosmos2VideoToWorldPipeline passes a frame rate",
        ),
        ("2.5", "images", "model.text_pad_to=null"),
    ):
        done = import_weights(folders[name], tmp_path / f"{name} {other}")
        options = ExportOptions(pipeline_from=folders[other])
        with pytest.raises(ConvertError, match=named):
            check_expressible(done.config, options)


def test_a_scale_of_levels_that_the_pipeline_does_not_have(groups, tmp_path):
    source = save(tmp_path / "hf", pipeline("images"))
    done = import_weights(source, tmp_path / "a", objective=["objective.timestep_scale=1000"])
    with pytest.raises(ConvertError, match=r"timestep_scale=1000\.0, and Cosmos2TextToImage.*1\.0"):
        export_weights(done.path, tmp_path / "back", ExportOptions(pipeline_from=source))
