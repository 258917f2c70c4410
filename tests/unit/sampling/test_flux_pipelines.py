"""What FLUX's pipelines have of their own: a told scale, references, sizes of the card."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image

from dit.config import Sampler, TextPadding, Weights
from dit.convert.errors import ConvertError
from dit.convert.export import ExportOptions, export_weights
from dit.convert.verify import compare_forward
from dit.sampling.commands import stages
from dit.sampling.commands.generate_media import options_of_prompt
from dit.sampling.commands.options import GenerationOptions
from dit.sampling.generate import Request, SamplingSettings, generate_latents, generate_streams
from dit.sampling.prompts import Prompt
from tests.families.case import PICTURE, PROMPT, STEPS, gap
from tests.families.flux import made_by, pipeline
from tests.families.generation import from_noise, noise_of, opened, ours, texts_of
from tests.media_files import image


@pytest.mark.parametrize("kind", ["dev", "schnell"])
def test_a_told_scale(groups, tmp_path: Path, kind: str) -> None:
    """What training was told, in one pass, if nothing is asked for."""
    pipeline(tmp_path, kind)
    run, start = opened(tmp_path), noise_of(PICTURE)
    assert run.config.model.text_pad_to is TextPadding.STORED
    if kind == "dev":
        told = ours(run, start, guidance=1.0, distilled_guidance=1.0)
        assert torch.equal(ours(run, start), told)
        pipeline(tmp_path / "kontext", "kontext")
        options = ExportOptions(pipeline_from=tmp_path / "kontext/pipeline")
        with pytest.raises(
            ConvertError, match=r"reference_latents=0, but the pipeline passes a reference"
        ):
            export_weights(run.path, tmp_path / "wrong", options)
    else:
        with pytest.raises(ValueError, match=r"--distilled_guidance 3.5: .* takes no guidance"):
            ours(run, start, distilled_guidance=3.5)
        with pytest.raises(ValueError, match=r"--guidance_least_norm 1.0: .* not restore norms"):
            ours(run, start, guidance_least_norm=1.0)
        with pytest.raises(ValueError, match=r"--reference_guidance 2.0: .* for references"):
            ours(run, start, reference_guidance=2.0)


def test_a_codec_of_pictures_needs_no_number_of_frames(groups, tmp_path: Path) -> None:
    """The card of an imported pipeline lists no sizes."""
    pipeline(tmp_path, "schnell")
    run = opened(tmp_path)
    sized = options_of_prompt(GenerationOptions(height=12, width=8), Prompt(text=PROMPT), run)
    assert (sized.num_video_frames, sized.height, sized.width) == (1, 12, 8)
    with pytest.raises(ValueError, match="give --height, --width: the dataset card"):
        options_of_prompt(GenerationOptions(), Prompt(text=PROMPT), run)
    card = {**run.card, "sizes": [{"num_frames": 1, "height": 4, "width": 6}]}
    usual = options_of_prompt(GenerationOptions(), Prompt(text=PROMPT), replace(run, card=card))
    assert (usual.num_video_frames, usual.height, usual.width) == (1, 4, 6)


def test_a_picture_is_changed(groups, tmp_path: Path) -> None:
    """Kontext, with a reference of another size and without."""
    pipe = pipeline(tmp_path, "kontext")
    run = opened(tmp_path)
    assert run.config.model.reference_latents == 1
    verified = compare_forward(tmp_path / "pipeline", run.path, Weights.MODEL)
    assert verified.largest <= 1e-4 * verified.scale  # one of three samples has a reference
    reference = torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(6))
    texts, start = texts_of(run), noise_of(PICTURE)
    _, height, width = run.latent_stride.pixels(PICTURE)
    own = {"max_area": height * width, "_auto_resize": False, "guidance_scale": 2.5}
    config = replace(run.config, objective=replace(run.config.objective, guidance=2.5))
    made = []
    for scale, given in ((1.0, reference), (3.0, reference), (1.0, None)):
        image = None if given is None else given[None]
        theirs = made_by(pipe, start, texts, **own, true_cfg_scale=scale, image=image)
        inputs = {} if given is None else {"reference_latent_0": given[:, None]}
        request = Request(
            inputs={**texts["prompt"], **inputs},
            negative=texts["negative_prompt"],
            latent_FHW=PICTURE,
            fps=float("nan"),
            seed=0,
        )
        settings = SamplingSettings(num_steps=STEPS, guidance=scale, sampler=Sampler.EULER)
        with from_noise(run.config, start):
            made += generate_latents(run.model, [request], config=config, settings=settings)
        assert gap(made[-1], theirs) <= 1e-4
    assert gap(made[0], made[1]) > 1e-2 and gap(made[0], made[2]) > 1e-2


def test_reference_pictures_of_files(groups, tmp_path: Path) -> None:
    """At three sizes, what the VAE makes of the file; too many are an error."""
    pipeline(tmp_path, "kontext")
    run = opened(tmp_path)
    files = [image(tmp_path / f"{n}.png", 33, 22, seed=n) for n in range(2)]
    seen: list[Any] = []

    def recorded(model, requests, **told):
        seen.append(requests[0].inputs["reference_latent_0"])
        return generate_streams(model, requests, **told)

    with patch.object(stages, "generate_streams", recorded):
        made = [
            ours(run, noise_of(PICTURE), reference=(str(files[0]),), reference_size=size)
            for size in ("own", "target")
        ]
    assert gap(made[0], made[1]) > 1e-2 and gap(made[1], ours(run, noise_of(PICTURE))) > 1e-2
    # Of 2 pixels in a cell, and 4 in a token.
    assert [tuple(latent.shape) for latent in seen] == [(4, 1, 10, 16), (4, *PICTURE)]
    vae = run.decoder
    assert vae is not None
    picture = Image.open(files[0]).crop((0, 1, 32, 21))
    colours = torch.from_numpy(np.asarray(picture, dtype=np.float32) / 127.5 - 1).permute(2, 0, 1)
    torch.testing.assert_close(seen[0], vae.encode(colours[:, None]), rtol=1e-2, atol=1e-2)
    with pytest.raises(ValueError, match=r"1.png: the network takes at most 1"):
        ours(run, noise_of(PICTURE), reference=tuple(map(str, files)))
