"""We generate what HunyuanVideo 1.5's pipelines of Diffusers do, from their folders and noise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from diffusers import HunyuanVideo15Pipeline
from diffusers.guiders import AdaptiveProjectedGuidance, ClassifierFreeGuidance
from PIL import Image
from torch import Tensor

from dit.config import Problems, Weights
from dit.convert.export import ExportOptions, export_weights
from dit.convert.import_ import import_weights
from dit.convert.verify import compare_forward, compare_tensors
from dit.data.pack import PatchLayout, pack_samples
from dit.models.training_checks import check_trainable
from dit.sampling import generate
from dit.sampling.commands.generate_media import generate_opened
from dit.sampling.commands.options import GenerationOptions
from dit.sampling.guiders import open_guider
from dit.sampling.open_checkpoint import LoadOptions, OpenCheckpoint, open_checkpoint
from dit.sampling.prompts import Prompt
from tests.cosmos_predict import gap
from tests.hunyuan_pipelines import SCALE, SHIFT, STEPS, made_by, pipeline

PROMPT, NEGATIVE = 'a sign says "open" and “shut”', "blurry"
FRAMES, ROWS, COLUMNS = 3, 4, 6  # of a latent


def noise() -> Tensor:
    return torch.randn(4, FRAMES, ROWS, COLUMNS, generator=torch.Generator().manual_seed(5))


def opened(folder: Path) -> OpenCheckpoint:
    """The pipeline's network, imported, with its encoders and VAE."""
    done = import_weights(folder / "pipeline", folder / "ours")
    options = LoadOptions(t5_cache_dir=str(folder / "pipeline"))
    return open_checkpoint(done.path, weights="model", options=options)


def ours(run: OpenCheckpoint, *prompts: Prompt, **options) -> Tensor:
    """Our latents of the first of some prompts in one pack, from the same noise."""
    _, height, width = run.latent_stride.pixels((FRAMES, ROWS, COLUMNS))
    size = {"height": height, "width": width, "num_video_frames": 4 * FRAMES - 3}
    options = {"num_steps": STEPS, "sampler": "euler", "negative_prompt": NEGATIVE} | options
    asked = GenerationOptions(**size, **options)

    def drawn(batch, seeds):
        blank = generate.Request(
            inputs={}, negative={}, latent_FHW=(FRAMES, ROWS, COLUMNS), fps=24.0, seed=0
        )
        sample = replace(generate._blank(0, blank, run.config, {}), latent_CFHW=noise())
        return pack_samples([sample] * len(seeds), PatchLayout.of(run.config)).latent_TC

    with patch.object(generate, "initial_noise", drawn):
        made = generate_opened(run, list(prompts), seed=0, options=asked, latents=True)
    assert made[0].latent_CFHW is not None
    return made[0].latent_CFHW


def picture(folder: Path) -> Path:
    """A file of the size that the pipeline gives it: its own resizing is not ours."""
    rng, file = np.random.default_rng(3), folder / "first.png"
    Image.fromarray(rng.integers(0, 256, (4 * ROWS, 4 * COLUMNS, 3), dtype=np.uint8)).save(file)
    return file


GUIDER = {
    "guidance_scale": 3.0,
    "guidance_rescale": 0.7,
    "start": 0.25,
    "use_original_formulation": True,
}
GUIDERS = {
    "rescaled": lambda: ClassifierFreeGuidance(**GUIDER),
    "projected": lambda: AdaptiveProjectedGuidance(
        guidance_scale=4.0, adaptive_projected_guidance_momentum=-0.5
    ),
}


@pytest.mark.slow
def test_text_to_video(groups, tmp_path: Path) -> None:
    """Without guidance, with it, and with guiders that other pipelines have."""
    pipe, folder = pipeline(tmp_path), str(tmp_path / "pipeline")
    run, prompt = opened(tmp_path), Prompt(text=PROMPT)
    flow = run.config.objective.flow
    assert (flow.flow_shift, flow.sampling_levels) == (SHIFT, "even")
    assert len(run.encoder.encode_all(PROMPT)["text_2"]) and not len(run.null["text_2"])
    texts = {"prompt": PROMPT, "negative_prompt": NEGATIVE}
    theirs = made_by(pipe, noise(), **texts)
    guided = ours(run, prompt, guider=folder)
    assert gap(guided, theirs) <= 1e-4
    assert gap(ours(run, prompt, guidance=SCALE), theirs) <= 1e-4
    pipe.guider = pipe.guider.new(guidance_scale=1.0)
    for options in ({"guidance": 1.0}, {"guidance": 1.0, "guider": folder}):
        without = ours(run, prompt, **options)
        assert gap(without, made_by(pipe, noise(), **texts)) <= 1e-4
    assert gap(without, guided) > 1e-2
    for name, made in GUIDERS.items():
        pipe.guider = made()
        pipe.guider.save_pretrained(tmp_path / name)
        theirs = made_by(pipe, noise(), **texts)
        # Other prompts in the pack: each sample has a guider, and a running mean, of its own.
        found = ours(run, prompt, Prompt(text="a hen"), guider=str(tmp_path / name))
        assert gap(found, theirs) <= 1e-4 and gap(found, guided) > 1e-2
    with pytest.raises(ValueError, match=r"leave out --guidance_rescale"):
        ours(run, prompt, guider=folder, guidance_rescale=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("use_meanflow", [False, True])
def test_image_to_video(groups, tmp_path: Path, use_meanflow: bool) -> None:
    """A distilled network is told where a step ends, generates, and is not trained."""
    pipe = pipeline(tmp_path, image=True, use_meanflow=use_meanflow)
    run, file = opened(tmp_path), picture(tmp_path)
    image, prompt = Image.open(file), Prompt(text=PROMPT, image=str(file))
    folder, texts = str(tmp_path / "pipeline"), {"prompt": PROMPT, "negative_prompt": NEGATIVE}
    guided = ours(run, prompt, guider=folder)
    assert gap(guided, made_by(pipe, noise(), image=image, **texts)) <= 1e-4
    pipe.guider = pipe.guider.new(guidance_scale=1.0)
    theirs = made_by(pipe, noise(), image=image, **texts)
    # One of text alone beside it: a list of zeros for a batch is none of ours.
    without = ours(run, prompt, Prompt(text=PROMPT), guidance=1.0)
    assert gap(without, theirs) <= 1e-4 and gap(without, guided) > 1e-2
    alone = ours(run, Prompt(text=PROMPT), guidance=1.0)
    assert gap(alone, without) > 1e-2
    verified = compare_forward(tmp_path / "pipeline", run.path, Weights.MODEL)
    assert verified.largest <= 1e-4 * verified.scale
    if use_meanflow:
        with pytest.raises(ValueError, match=r"sampler heun: .*whole steps \(mean flow\)"):
            ours(run, prompt, sampler="heun")
        with pytest.raises(Problems, match=r"model.use_meanflow=true: .*no objective here teaches"):
            check_trainable(run.config)
        return
    check_trainable(run.config)
    parts = {n: p for n, p in pipe.components.items() if n[:5] not in ("image", "featu")}
    of_text = HunyuanVideo15Pipeline(**parts)
    of_text.set_progress_bar_config(disable=True)
    assert gap(alone, made_by(of_text, noise(), **texts)) <= 1e-4


def test_a_pipeline_goes_through_our_checkpoint(groups, tmp_path: Path) -> None:
    """Import, verify, export with the other parts: the videos stay, and so does the guider."""
    pipe = pipeline(tmp_path, guider=GUIDERS["rescaled"]())
    source = tmp_path / "pipeline"
    done = import_weights(source, tmp_path / "ours")
    assert compare_tensors(source, done.path, Weights.MODEL)[0].different == 0
    export_weights(done.path, tmp_path / "out", ExportOptions(pipeline_from=source))
    again = HunyuanVideo15Pipeline.from_pretrained(tmp_path / "out", torch_dtype=torch.float32)
    again.set_progress_bar_config(disable=True)
    for name in ("text_encoder", "text_encoder_2"):  # in the precision of theirs
        setattr(again, name, getattr(pipe, name))
    names = GUIDER.keys()
    for guider in (again.guider, open_guider(tmp_path / "out")):
        assert {name: guider.config[name] for name in names} == GUIDER
    assert again.target_size == pipe.target_size != 640
    texts = {"prompt": PROMPT, "negative_prompt": NEGATIVE}
    weights = again.transformer.state_dict()
    assert all(torch.equal(weights[n], x) for n, x in pipe.transformer.state_dict().items())
    assert gap(made_by(again, noise(), **texts), made_by(pipe, noise(), **texts)) <= 1e-4


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, r"guider_config.json cannot be read"),
        ('{"_class_name": "SkipLayerGuidance"}', r"'SkipLayerGuidance'; known are Classifier"),
        ("[]", r"is of class None; known"),
        ('{"_class_name": "ClassifierFreeGuidance", "start": 7}', r"describes no Classifier"),
    ],
)
def test_what_is_no_guider(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "guider_config.json").write_text(content)
    with pytest.raises(ValueError, match=words):
        open_guider(tmp_path)
