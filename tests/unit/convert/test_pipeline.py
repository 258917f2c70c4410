"""An export with the components of another pipeline is a pipeline that Diffusers runs."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLCosmos, DiffusionPipeline, EDMEulerScheduler
from diffusers.pipelines.cosmos.pipeline_cosmos_text2world import CosmosTextToWorldPipeline
from transformers import T5Config, T5EncoderModel, T5TokenizerFast

from dit.checkpoint_paths import saved_config
from dit.config import ObjectiveConfig, ObjectiveName, Sampler
from dit.config_loading import save_config
from dit.convert.cli import main
from dit.convert.errors import ConvertError
from dit.convert.export import ExportOptions, export_weights
from dit.convert.import_ import import_weights
from dit.convert.pipeline import check_pipeline
from dit.models.dit.model import DiT
from dit.models.positions import unpack_latents
from dit.sampling.generate import Request, SamplingSettings, generate_latents
from dit.sampling.ode_solvers import initial_noise
from dit.train.checkpoint.state_dict import load_weights
from tests.families.dit import publish, random_model
from tests.packs import random_pack

TOKENS = 16


class Checker:
    """Stands in for the guardrail, which is a package of its own with models of its own."""

    def to(self, device):
        return self

    def check_text_safety(self, prompt):
        return True

    def check_video_safety(self, video):
        return video


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A pipeline with a tiny random T5 and VAE; its transformer is of no use to us."""
    folder = tmp_path_factory.mktemp("published") / "pipeline"
    torch.manual_seed(0)
    letters = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), ("▁", -1.0)]
    letters += [(letter, -2.0) for letter in "abcdefghijklmnopqrstuvwxyz"]
    tokenizer = T5TokenizerFast(vocab=letters, extra_ids=0)
    sizes = {"d_kv": 10, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    encoder = T5EncoderModel(T5Config(vocab_size=len(letters), d_model=20, **sizes)).eval()
    vae = AutoencoderKLCosmos(
        latent_channels=4,
        encoder_block_out_channels=(8, 8, 8),
        decode_block_out_channels=(8, 8, 8),
        attention_resolutions=(8,),
        resolution=16,
        num_layers=1,
        patch_size=2,
        spatial_compression_ratio=4,
        temporal_compression_ratio=4,
        latents_mean=None,
        latents_std=None,
    ).eval()
    CosmosTextToWorldPipeline(
        text_encoder=encoder,
        tokenizer=tokenizer,
        transformer=random_model(num_layers=1),
        vae=vae,
        scheduler=EDMEulerScheduler(final_sigmas_type="sigma_min"),
        safety_checker=Checker(),
    ).save_pretrained(folder)
    index = json.loads((folder / "model_index.json").read_text())
    index["safety_checker"] = [None, None]  # each user brings it
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def ours(groups, tmp_path) -> Path:
    """A checkpoint of a run with a noise range of its own."""
    done = import_weights(
        publish(tmp_path / "hf", random_model()), tmp_path / "a", text_pad_to=TOKENS
    )
    return _with_objective(done.path, sigma_max=30.0, sigma_data=0.7)


def _with_objective(place: Path, **changes) -> Path:
    config = replace(saved_config(place), objective=ObjectiveConfig(**changes))
    (place / "manifest.json").unlink()
    (place / "null_text.safetensors").touch()  # without a manifest it must be there
    save_config(config, place / "config.yaml")
    return place


@pytest.fixture
def exported(published, ours, tmp_path) -> Path:
    words = ["--megatron-path", str(ours), "--hf-path", str(tmp_path / "out")]
    assert main(["export", *words, "--pipeline-from", str(published)]) == 0
    return tmp_path / "out"


def test_the_pipeline_runs(resize, exported):
    pipe = DiffusionPipeline.from_pretrained(exported, safety_checker=Checker())
    assert pipe.scheduler.config.sigma_max == 30.0
    assert pipe.scheduler.config.final_sigmas_type == "zero"
    assert pipe.transformer.config.num_layers == 2  # ours, not the published one's
    pipe.set_progress_bar_config(disable=True)
    (frames,) = pipe(
        prompt="a hand waving",
        negative_prompt="",
        height=32,
        width=48,
        num_frames=5,
        num_inference_steps=2,
        max_sequence_length=TOKENS,
        output_type="pt",
        return_dict=False,
    )
    assert frames.ndim == 5 and frames.shape[2] == 3  # batch, frames, colours, rows, columns
    assert frames.isfinite().all() and frames.std() > 0


def test_the_pipeline_makes_our_latents(groups, resize, exported, ours):
    """From the same noise, with its guidance of one less than ours."""
    config = saved_config(ours)
    model = DiT(config.model, groups)
    load_weights(ours, [model], groups, averaged=False)
    rng = torch.Generator().manual_seed(1)
    text, negative = (torch.randn(n, 20, generator=rng) for n in (9, 2))
    inputs, against = {"text": text}, {"text": negative}
    request = Request(inputs=inputs, negative=against, latent_FHW=(2, 4, 6), fps=16.0, seed=5)
    settings = SamplingSettings(num_steps=4, guidance=3.5, sampler=Sampler.EULER)
    (expected,) = generate_latents(model, [request], config=config, settings=settings)

    batch = random_pack([(2, 2, 3)], [1], model=config.model)
    (noise,) = unpack_latents(initial_noise(batch, [5]), batch, patch_temporal=1, patch_spatial=2)
    pipe = DiffusionPipeline.from_pretrained(exported, safety_checker=Checker())
    pipe.set_progress_bar_config(disable=True)
    full = (
        torch.nn.functional.pad(words, (0, 0, 0, TOKENS - len(words)))[None]
        for words in (text, negative)
    )
    (latents,) = pipe(
        **dict(zip(("prompt_embeds", "negative_prompt_embeds"), full, strict=True)),
        latents=noise[None],
        height=16,
        width=32,
        num_inference_steps=4,
        guidance_scale=2.5,
        fps=16,
        output_type="latent",
        return_dict=False,
    )
    assert float((latents[0] / config.objective.sigma_data - expected).abs().max()) <= 1e-3


def test_what_is_copied(published, exported):
    folders = {path.name for path in exported.iterdir()}
    theirs = {path.name for path in published.iterdir()} - {"safety_checker"}
    assert folders == theirs | {"README.md"}
    assert "DiffusionPipeline.from_pretrained" in (exported / "README.md").read_text()
    for file in ("vae/config.json", "tokenizer/tokenizer.json", "model_index.json"):
        assert (exported / file).read_bytes() == (published / file).read_bytes()


def _refused(published, ours, tmp_path, named):
    options = ExportOptions(pipeline_from=published)
    with pytest.raises(ConvertError, match=named):
        export_weights(ours, tmp_path / "out", options)
    assert not (tmp_path / "out").exists()


def test_pipelines_that_do_not_fit(published, ours, tmp_path):
    config = saved_config(ours)
    for changes, named in (
        ({"text_pad_to": None}, "model.text_pad_to=null"),
        ({"in_channels": 8}, "model.in_channels=8, and its VAE has 4"),
        ({"crossattn_emb_size": 24}, "crossattn_emb_size=24, and its text encoder has 20"),
    ):
        other = replace(config, model=replace(config.model, **changes))
        with pytest.raises(ConvertError, match=named):
            check_pipeline(published, other)
    flow = replace(config, objective=ObjectiveConfig(name=ObjectiveName.FLOW))
    with pytest.raises(ConvertError, match=r"objective\.name=flow"):
        check_pipeline(published, flow)
    flow = replace(config, objective=ObjectiveConfig(name=ObjectiveName.FLOW, prediction="x"))
    with pytest.raises(ConvertError, match=r"objective\.prediction=x, and .* takes velocities"):
        check_pipeline(published, flow)


def test_folders_that_are_no_such_pipeline(published, ours, tmp_path):
    _refused(tmp_path, ours, tmp_path, "has no model_index.json")
    copy = tmp_path / "copy"
    shutil.copytree(published, copy)
    shutil.rmtree(copy / "vae")
    _refused(copy, ours, tmp_path, "has no vae")
    (copy / "model_index.json").write_text('{"_class_name": "CosmosVideoToWorldPipeline"}')
    _refused(copy, ours, tmp_path, "is of class CosmosVideoToWorldPipeline")
