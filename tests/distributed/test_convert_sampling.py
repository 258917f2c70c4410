"""Digits from an export in Diffusers' own loops are those of `generate_dit.py --sampler euler`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import CosmosTransformer3DModel, EDMEulerScheduler, FlowMatchEulerDiscreteScheduler
from PIL import Image

from dit.codecs import text, vae
from dit.config import ObjectiveConfig
from dit.config_loading import read_config
from tests.entering import Enter
from tests.launching import ROOT, SMALL, run

PROMPTS = ("a handwritten zero", "a handwritten seven", "x")
STEPS, GUIDANCE, SEED = 8, 1.5, 3


@pytest.fixture(scope="module", params=["edm", "flow"])
def trained(request, enter: Enter, digits: Path, tmp_path_factory) -> Path:
    """Forty steps, with the export that the run makes of them."""
    folder = tmp_path_factory.mktemp(request.param) / "run"
    conf = ROOT / f"conf/dit_digits{'' if request.param == 'edm' else '_flow'}.yaml"
    settings = (*SMALL, "dataset.num_workers=0", "train.train_iters=40", "train.eval_interval=0")
    shift = ("objective.flow_shift=2.5",) if request.param == "flow" else ()
    places = (f"dataset.path={digits}", f"checkpoint.save={folder}", *shift)
    export = ("checkpoint.also_save_hf=true", "optimizer.lr=5e-3")
    done = enter("pretrain_dit", "--config-file", conf, *settings, *places, *export)
    assert done.code == 0, done.said
    return folder


def _start(seed: int, config) -> torch.Tensor:
    """Noise of a request as our sampler draws it, as a latent [1, C, 1, H, W]."""
    p, c = config.model.patch_spatial, config.model.in_channels
    side = 4 // p
    tokens = torch.randn(side**2, c * p**2, generator=torch.Generator().manual_seed(seed))
    return tokens.view(side, side, c, p, p).permute(2, 0, 3, 1, 4).reshape(1, c, 1, 4, 4)


def _edm(network, scheduler, noise, objective: ObjectiveConfig) -> torch.Tensor:
    """Starts from sigma_max, and leaves the scale of the noise behind."""
    latents = noise * objective.sigma_max
    for t in scheduler.timesteps:
        raw = network(scheduler.scale_model_input(latents, t), t)
        latents = scheduler.step(raw, t, latents).prev_sample
    return latents / objective.sigma_data


def _flow(network, scheduler, noise, objective: ObjectiveConfig) -> torch.Tensor:
    latents = noise
    for t in scheduler.timesteps:
        latents = scheduler.step(network(latents, t), t, latents).prev_sample
    return latents


@torch.no_grad()
def _in_diffusers(folder: Path) -> list[torch.Tensor]:
    """Latents from the exported folder, with nothing of ours but noise and captions."""
    export = folder / "diffusers" / "step_00000040"
    checkpoint = folder / "checkpoints" / "step_00000040"
    config = read_config(checkpoint / "config.yaml")
    transformer = CosmosTransformer3DModel.from_pretrained(export)
    kind = json.loads((export / "scheduler_config.json").read_text())["_class_name"]
    edm = kind == "EDMEulerScheduler"
    encoder = text.text_encoder_of_card(json.loads((checkpoint / "dataset_card.json").read_text()))
    latents = []
    for i, prompt in enumerate(PROMPTS):
        captions = [encoder.encode(words)[None].float() for words in (prompt, "")]

        def network(latent, t, captions=captions):
            told = [
                transformer(latent, t.expand(1), caption, fps=None).sample for caption in captions
            ]
            return told[1] + GUIDANCE * (told[0] - told[1])

        scheduler = EDMEulerScheduler if edm else FlowMatchEulerDiscreteScheduler
        scheduler = scheduler.from_pretrained(export)
        scheduler.set_timesteps(STEPS)
        loop = _edm if edm else _flow
        latents.append(loop(network, scheduler, _start(SEED + i, config), config.objective)[0])
    return latents


@pytest.mark.slow
def test_diffusers_makes_the_digits_of_generate_dit(enter: Enter, trained, tmp_path):
    asked = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    options = ("--num_steps", STEPS, "--guidance", GUIDANCE, "--seed", SEED, "--sampler", "euler")
    place = ("--checkpoint_path", trained, "--output_dir", tmp_path)
    done = enter("generate_dit", *place, *asked, *options)
    assert done.code == 0, done.said
    entries = json.loads((tmp_path / "samples.json").read_text())
    ours = np.stack([np.array(Image.open(tmp_path / entry["file"])) for entry in entries])

    latents = _in_diffusers(trained)
    card = json.loads((trained / "checkpoints/step_00000040/dataset_card.json").read_text())
    decoder = vae.codec_of_card(card)
    theirs = np.stack([decoder.decode(latent)[0].numpy() for latent in latents])
    assert np.abs(theirs.astype(int) - ours.astype(int)).max() <= 1
    assert np.abs(theirs.astype(int)[0] - theirs.astype(int)[1]).max() > 10


SAMPLE = """
import sys, torch
from dit.sampling.generate import Request, SamplingSettings, generate_latents
from dit.config import Sampler
from dit.sampling.open_checkpoint import open_checkpoint

run, output, seed, steps, guidance, *prompts = sys.argv[1:]
opened = open_checkpoint(run, weights="ema")
requests = [
    Request(
        inputs=opened.encoder.encode_all(prompt),
        negative=opened.null,
        latent_FHW=(1, 4, 4),
        fps=float("nan"),
        seed=int(seed) + i,
    )
    for i, prompt in enumerate(prompts)
]
settings = SamplingSettings(
    num_steps=int(steps), guidance=float(guidance), sampler=Sampler.EULER
)
torch.save(
    generate_latents(opened.model, requests, config=opened.config, settings=settings), output
)
"""


@pytest.mark.slow
def test_latents_agree_to_a_thousandth(trained, tmp_path):
    """The same without rounding to grey levels, which hides four digits."""
    file, numbers = tmp_path / "latents.pt", [str(number) for number in (SEED, STEPS, GUIDANCE)]
    done = run([sys.executable, "-c", SAMPLE, str(trained), str(file), *numbers, *PROMPTS])
    assert done.returncode == 0, done.stderr
    for ours, theirs in zip(torch.load(file), _in_diffusers(trained), strict=True):
        assert float((ours - theirs).abs().max()) <= 1e-3
        assert float(ours.std()) > 0.1
