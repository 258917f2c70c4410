"""We generate what FLUX's pipelines of Diffusers do, from their folders and the same noise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from PIL import Image
from torch import Tensor

from dit.config import Sampler, TextPadding, Weights
from dit.convert.errors import ConvertError
from dit.convert.export import ExportOptions, export_weights
from dit.convert.import_ import import_weights
from dit.convert.verify import compare_forward, compare_tensors
from dit.sampling import generate
from dit.sampling.commands.generate_media import generate_opened, options_of_prompt
from dit.sampling.commands.options import GenerationOptions
from dit.sampling.generate import Request, SamplingSettings, generate_latents
from dit.sampling.open_checkpoint import LoadOptions, OpenCheckpoint, open_checkpoint
from dit.sampling.prompts import Prompt
from tests.families.case import gap
from tests.families.flux import STEPS, made_by, pipeline
from tests.given_noise import from_noise

PROMPT, NEGATIVE = "a red fox & a hen", "blurry"
ROWS, COLUMNS = 6, 4  # of a latent
NAN = float("nan")


def noise() -> Tensor:
    return torch.randn(4, ROWS, COLUMNS, generator=torch.Generator().manual_seed(5))


def opened(folder: Path) -> OpenCheckpoint:
    """The pipeline's network, imported, with its text encoders and VAE."""
    done = import_weights(folder / "pipeline", folder / "ours")
    options = LoadOptions(t5_cache_dir=str(folder / "pipeline"))
    return open_checkpoint(done.path, weights="model", options=options)


def texts_of(run: OpenCheckpoint) -> dict[str, Any]:
    return {
        "prompt": run.encoder.encode_all(PROMPT),
        "negative_prompt": run.encoder.encode_all(NEGATIVE),
    }


def ours(run: OpenCheckpoint, **options) -> Tensor:
    """Our latents from the same noise."""
    _, height, width = run.latent_stride.pixels((1, ROWS, COLUMNS))
    size = {"height": height, "width": width, "num_video_frames": 1}
    asked = GenerationOptions(
        num_steps=STEPS, sampler="euler", negative_prompt=NEGATIVE, **size, **options
    )
    with from_noise(run.config, noise()[:, None]):
        (picture,) = generate_opened(
            run, [Prompt(text=PROMPT)], seed=0, options=asked, latents=True
        )
    assert picture.latent_CFHW is not None
    return picture.latent_CFHW[:, 0]


@pytest.mark.parametrize("kind", ["dev", "schnell"])
def test_text_to_image(groups, tmp_path: Path, kind: str) -> None:
    pipe = pipeline(tmp_path, kind)
    run, dev = opened(tmp_path), kind == "dev"
    objective, model = run.config.objective, run.config.model
    assert (objective.name, objective.guidance) == ("flow", 1.0 if dev else None)
    assert objective.flow.time_shift_type == ("exponential" if dev else None)
    assert objective.flow.sampling_levels == "even" and model.text_pad_to is TextPadding.STORED
    texts, made = texts_of(run), []
    states, pooled, _ = pipe.encode_prompt(prompt=PROMPT, prompt_2=None)
    assert gap(texts["prompt"]["text"].float(), states[0].float()) <= 0.05  # bfloat16
    assert torch.equal(texts["prompt"]["pooled_text"], pooled[0])
    for told, scale in ((3.5, 1.0), (1.0, 1.0), (3.5, 2.5)):
        theirs = made_by(pipe, noise(), **texts, guidance_scale=told, true_cfg_scale=scale)
        mine = {"distilled_guidance": told} if dev else {}
        made.append(ours(run, guidance=scale, **mine))
        assert gap(made[-1], theirs) <= 1e-4
    assert (gap(made[0], made[1]) > 1e-2) == dev and gap(made[0], made[2]) > 1e-2
    if dev:  # what training was told, in one pass
        assert torch.equal(ours(run), made[1])
    else:
        with pytest.raises(ValueError, match=r"--distilled_guidance 3.5: .* told no guidance"):
            ours(run, distilled_guidance=3.5)


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
    texts = texts_of(run)
    _, height, width = run.latent_stride.pixels((1, ROWS, COLUMNS))
    own = {"max_area": height * width, "_auto_resize": False, "guidance_scale": 2.5}
    config = replace(run.config, objective=replace(run.config.objective, guidance=2.5))
    made = []
    for scale, given in ((1.0, reference), (3.0, reference), (1.0, None)):
        image = None if given is None else given[None]
        theirs = made_by(pipe, noise(), **texts, **own, true_cfg_scale=scale, image=image)
        inputs = texts["prompt"]
        if given is not None:
            inputs = {**inputs, "reference_latent_0": given[:, None]}
        request = Request(
            inputs=inputs,
            negative=texts["negative_prompt"],
            latent_FHW=(1, ROWS, COLUMNS),
            fps=NAN,
            seed=0,
        )
        settings = SamplingSettings(num_steps=STEPS, guidance=scale, sampler=Sampler.EULER)
        with from_noise(run.config, noise()[:, None]):
            (found,) = generate_latents(run.model, [request], config=config, settings=settings)
        made.append(found[:, 0])
        assert gap(made[-1], theirs) <= 1e-4
    assert gap(made[0], made[1]) > 1e-2 and gap(made[0], made[2]) > 1e-2


def test_reference_pictures_of_files(groups, tmp_path: Path) -> None:
    """At three sizes, what the VAE makes of the file; too many are an error."""
    pipeline(tmp_path, "kontext")
    run, files = opened(tmp_path), [tmp_path / f"{n}.png" for n in range(2)]
    rng = np.random.default_rng(3)
    for file in files:
        Image.fromarray(rng.integers(0, 256, (22, 33, 3), dtype=np.uint8)).save(file)
    seen: list[Any] = []

    def recorded(model, requests, **told):
        seen.append(requests[0].inputs["reference_latent_0"])
        return generate_latents(model, requests, **told)

    with patch.object(generate, "generate_latents", recorded):
        made = [
            ours(run, reference=(str(files[0]),), reference_size=size) for size in ("own", "target")
        ]
    assert gap(made[0], made[1]) > 1e-2 and gap(made[1], ours(run)) > 1e-2
    # Of 2 pixels in a cell, and 4 in a token.
    assert [tuple(latent.shape) for latent in seen] == [(4, 1, 10, 16), (4, 1, ROWS, COLUMNS)]
    vae = run.decoder
    assert vae is not None
    picture = Image.open(files[0]).resize((32, 20), Image.Resampling.LANCZOS)
    colours = torch.from_numpy(np.asarray(picture, dtype=np.float32) / 127.5 - 1).permute(2, 0, 1)
    torch.testing.assert_close(seen[0], vae.encode(colours[:, None]), rtol=1e-2, atol=1e-2)
    with pytest.raises(ValueError, match=r"1.png: the network takes 1 at most"):
        ours(run, reference=tuple(map(str, files)))


def test_a_pipeline_goes_through_our_checkpoint(groups, tmp_path: Path) -> None:
    """Import, verify, export with the other parts: the pictures stay."""
    pipe = pipeline(tmp_path, "dev")
    source = tmp_path / "pipeline"
    done = import_weights(source, tmp_path / "ours")
    tensors, _ = compare_tensors(source, done.path, Weights.MODEL)
    assert tensors.different == 0
    forward = compare_forward(source, done.path, Weights.MODEL)
    assert forward.largest <= 1e-4 * forward.scale
    export_weights(done.path, tmp_path / "out", ExportOptions(pipeline_from=source))
    again = FluxPipeline.from_pretrained(tmp_path / "out", torch_dtype=torch.float32)
    assert again.scheduler.config.use_dynamic_shifting
    again.set_progress_bar_config(disable=True)
    rng = torch.Generator().manual_seed(7)
    drawn = {
        n: torch.randn(*size, generator=rng)
        for n, size in (("text", (5, 16)), ("pooled_text", (16,)))
    }
    texts = {"prompt": drawn, "negative_prompt": drawn, "guidance_scale": 3.5}
    assert torch.equal(made_by(again, noise(), **texts), made_by(pipe, noise(), **texts))
    kontext = tmp_path / "kontext"
    pipeline(kontext, "kontext")
    with pytest.raises(ConvertError, match=r"reference_latents=0, and it feeds a reference"):
        options = ExportOptions(pipeline_from=kontext / "pipeline")
        export_weights(done.path, tmp_path / "wrong", options)
