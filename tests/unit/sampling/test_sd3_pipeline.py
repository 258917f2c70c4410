"""We encode and generate what Diffusers' StableDiffusion3Pipeline does, from the same noise."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import StableDiffusion3Pipeline

from dit.config import Sampler, TextPadding, Weights
from dit.convert.export import ExportOptions, export_weights
from dit.convert.import_ import import_weights
from dit.convert.verify import compare_forward
from dit.sampling.generate import Request, SamplingSettings, generate_latents
from dit.sampling.open_checkpoint import LoadOptions, open_checkpoint
from tests.families.case import gap
from tests.families.sd3 import pipeline
from tests.given_noise import from_noise

PROMPT, NEGATIVE = "a red fox & a hen", "blurry"
STEPS = 4
ROWS, COLUMNS = 6, 4  # of a latent


def test_text_to_image_and_the_way_back(groups, tmp_path: Path) -> None:
    """Import, texts, pictures with and without guidance, export."""
    pipe, source = pipeline(tmp_path), tmp_path / "pipeline"
    done = import_weights(source, tmp_path / "ours")
    options = LoadOptions(t5_cache_dir=str(source))
    run = open_checkpoint(done.path, weights="model", options=options)
    assert run.config.model.text_pad_to is TextPadding.STORED
    assert run.config.objective.flow.flow_shift == 3.0
    states = pipe.encode_prompt(PROMPT, None, None, negative_prompt=NEGATIVE)
    texts = [run.encoder.encode_all(one) for one in (PROMPT, NEGATIVE)]
    for text, rows, pooled in zip(texts, states[:2], states[2:], strict=True):
        assert text["text"].shape == rows[0].shape
        assert gap(text["text"].float(), rows[0].float()) <= 0.05  # bfloat16
        assert gap(text["pooled_text"].float(), pooled[0].float()) <= 0.05
    pipe.to(torch.float32)
    embeds = {
        f"{prefix}{name}_embeds": text[key][None].float()
        for prefix, text in zip(("", "negative_"), texts, strict=True)
        for name, key in (("prompt", "text"), ("pooled_prompt", "pooled_text"))
    }
    height, width = (side * pipe.vae_scale_factor for side in (ROWS, COLUMNS))
    own = {"height": height, "width": width, "num_inference_steps": STEPS}
    request = Request(
        inputs=texts[0], negative=texts[1], latent_FHW=(1, ROWS, COLUMNS), fps=float("nan"), seed=0
    )
    noise = torch.randn(4, ROWS, COLUMNS, generator=torch.Generator().manual_seed(5))
    made = []
    for scale in (1.0, 3.0):
        (theirs,) = pipe(
            **embeds, **own, guidance_scale=scale, latents=noise[None],
            output_type="latent", return_dict=False,
        )  # fmt: skip
        settings = SamplingSettings(num_steps=STEPS, guidance=scale, sampler=Sampler.EULER)
        with from_noise(run.config, noise[:, None]):
            (found,) = generate_latents(run.model, [request], config=run.config, settings=settings)
        made.append(found[:, 0])
        assert gap(made[-1], theirs[0]) <= 1e-4
    assert gap(made[0], made[1]) > 1e-2
    forward = compare_forward(source, done.path, Weights.MODEL)
    assert forward.largest <= 1e-4 * forward.scale
    export_weights(done.path, tmp_path / "out", ExportOptions(pipeline_from=source))
    again = StableDiffusion3Pipeline.from_pretrained(tmp_path / "out", torch_dtype=torch.float32)
    for name, tensor in pipe.transformer.state_dict().items():
        assert torch.equal(again.transformer.state_dict()[name], tensor), name
