"""We generate what HunyuanImage 2.1's pipeline of Diffusers does, from its folder and noise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import HunyuanImagePipeline
from torch import Tensor

from dit.config import Problems, Weights
from dit.convert.export import ExportOptions, export_weights
from dit.convert.import_ import import_weights
from dit.convert.verify import compare_forward, compare_tensors
from dit.models.training_checks import check_trainable
from dit.sampling.commands.generate_media import generate_opened
from dit.sampling.commands.options import GenerationOptions
from dit.sampling.guiders import open_guiders
from dit.sampling.open_checkpoint import LoadOptions, OpenCheckpoint, open_checkpoint
from dit.sampling.prompts import Prompt
from tests.cosmos_predict import gap
from tests.given_noise import from_noise
from tests.hunyuan_image_pipelines import GUIDER, OF_QUOTED, SHIFT, STEPS, made_by, pipeline

QUOTED, PLAIN, NEGATIVE = 'a sign says "open" and “shut”', "a red fox & a hen", "blurry"
ROWS, COLUMNS = 6, 4  # of a latent


def noise() -> Tensor:
    return torch.randn(4, ROWS, COLUMNS, generator=torch.Generator().manual_seed(5))


def opened(folder: Path) -> OpenCheckpoint:
    """The pipeline's network, imported, with its encoders and VAE."""
    done = import_weights(folder / "pipeline", folder / "ours")
    options = LoadOptions(t5_cache_dir=str(folder / "pipeline"))
    return open_checkpoint(done.path, weights="model", options=options)


def ours(run: OpenCheckpoint, *prompts: str, **options) -> list[Tensor]:
    """Our latents of prompts in one pack, each from the same noise."""
    _, height, width = run.latent_stride.pixels((1, ROWS, COLUMNS))
    size = {"height": height, "width": width, "num_video_frames": 1}
    options = {"num_steps": STEPS, "sampler": "euler", "negative_prompt": NEGATIVE} | options
    asked, words = GenerationOptions(**size, **options), [Prompt(text=one) for one in prompts]
    with from_noise(run.config, noise()[:, None]):
        made = generate_opened(run, words, seed=0, options=asked, latents=True)
    return [one.latent_CFHW[:, 0] for one in made if one.latent_CFHW is not None]


@pytest.mark.slow
def test_text_to_image_and_the_way_back(groups, tmp_path: Path) -> None:
    """Without guidance, and with both guiders in one pack; then import, verify, export."""
    pipe, source = pipeline(tmp_path), tmp_path / "pipeline"
    run = opened(tmp_path)
    flow = run.config.objective.flow
    assert (flow.flow_shift, flow.sampling_levels, flow.timestep_scale) == (SHIFT, "even", 1000)
    for text in (QUOTED, PLAIN):
        states, mask, glyphs, glyph_mask = pipe.encode_prompt(text)
        found = run.encoder.encode_all(text)
        for name, rows, kept in (("text", states, mask), ("text_2", glyphs, glyph_mask)):
            assert found[name].shape == rows[kept.bool()].shape
            assert len(found[name]) == run.encoder.count(text) or name == "text_2"
    assert len(run.encoder.encode_all(QUOTED)["text_2"]) and not len(run.null["text_2"])
    both = [
        made_by(pipe, noise(), prompt=text, negative_prompt=NEGATIVE) for text in (QUOTED, PLAIN)
    ]
    guided = ours(run, QUOTED, PLAIN, guider=str(source))
    assert max(map(gap, guided, both)) <= 1e-4
    # One scale for both, where it is asked for.
    pipe.guider, pipe.ocr_guider = (one.new(guidance_scale=1.0) for one in (pipe.guider,) * 2)
    for options in ({}, {"guider": str(source)}):
        (without,) = ours(run, QUOTED, guidance=1.0, **options)
        assert gap(without, made_by(pipe, noise(), prompt=QUOTED)) <= 1e-4
    assert gap(without, guided[0]) > 1e-2

    tensors, _ = compare_tensors(source, run.path, Weights.MODEL)
    verified = compare_forward(source, run.path, Weights.MODEL)
    assert tensors.different == 0 and verified.largest <= 1e-4 * verified.scale
    export_weights(run.path, tmp_path / "out", ExportOptions(pipeline_from=source))
    again = HunyuanImagePipeline.from_pretrained(tmp_path / "out", torch_dtype=torch.float32)
    weights = again.transformer.state_dict()
    assert all(torch.equal(weights[n], x) for n, x in pipe.transformer.state_dict().items())
    ours_too = open_guiders(tmp_path / "out")
    for usual, quoted in ((again.guider, again.ocr_guider), (ours_too.usual, ours_too.of_quoted)):
        assert {name: usual.config[name] for name in GUIDER} == GUIDER
        assert {name: quoted.config[name] for name in OF_QUOTED} == OF_QUOTED


def test_the_distilled_network_generates_alone(groups, tmp_path: Path) -> None:
    """It is told a scale and where a step ends, in one pass, and is not trained."""
    pipe = pipeline(tmp_path, distilled=True)
    run = opened(tmp_path)
    assert run.config.objective.guidance == 3.25
    made = []
    for told in (None, 1.0):
        options = {} if told is None else {"distilled_guidance_scale": told}
        theirs = made_by(pipe, noise(), prompt=QUOTED, **options)
        made += ours(run, QUOTED, distilled_guidance=told)
        assert gap(made[-1], theirs) <= 1e-4
    assert gap(*made) > 1e-2
    verified = compare_forward(tmp_path / "pipeline", run.path, Weights.MODEL)
    assert verified.largest <= 1e-4 * verified.scale
    with pytest.raises(ValueError, match=r"sampler heun: .*whole steps \(mean flow\)"):
        ours(run, QUOTED, sampler="heun")
    with pytest.raises(Problems, match=r"model.use_meanflow=true: .*no objective here teaches"):
        check_trainable(run.config)
