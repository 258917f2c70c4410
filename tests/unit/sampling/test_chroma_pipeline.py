"""We encode and generate what Diffusers' ChromaPipeline does, from the same noise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ChromaPipeline, FlowMatchEulerDiscreteScheduler
from torch.nn.functional import pad

from dit.config import LevelSpacing, RunConfig, Sampler, Weights
from dit.convert.diffusers_config import objective_config
from dit.convert.export import ExportOptions, export_weights
from dit.convert.import_ import import_weights
from dit.convert.verify import compare_forward
from dit.models.registry import family_of
from dit.sampling.generate import Request, SamplingSettings, generate_latents
from dit.sampling.open_checkpoint import LoadOptions, open_checkpoint
from tests.chroma_pipelines import pipeline
from tests.cosmos_predict import gap
from tests.given_noise import from_noise

PROMPT, NEGATIVE = "a red fox & a hen", ""
STEPS = 4
ROWS, COLUMNS = 6, 4  # of a latent
EULER = SamplingSettings(num_steps=STEPS, sampler=Sampler.EULER)


def _spaced(config: RunConfig, pipe: Any, spacing: LevelSpacing) -> RunConfig:
    """With another scheduler in the pipeline, such as that of Chroma1-Base with beta sigmas."""
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, **{f"use_{spacing}_sigmas": True})
    content = {"_class_name": type(pipe.scheduler).__name__, **pipe.scheduler.config}
    even = family_of(config.model).objective.settings
    found = objective_config(content, place="here", of_family=even, model=config.model)
    return replace(config, objective=found.objective)


@pytest.mark.slow
def test_text_to_image_and_the_way_back(groups, tmp_path: Path) -> None:
    """Import, texts, pictures with and without guidance, export."""
    pipe, source = pipeline(tmp_path), tmp_path / "pipeline"
    done = import_weights(source, tmp_path / "ours")
    options = LoadOptions(t5_cache_dir=str(source))
    run = open_checkpoint(done.path, weights="model", options=options)
    flow = run.config.objective.flow
    assert (flow.time_shift_type, flow.sampling_levels) == ("exponential", "even")
    texts = [run.encoder.encode_all(one)["text"] for one in (PROMPT, NEGATIVE)]
    for caption, text in zip((PROMPT, NEGATIVE), texts, strict=True):
        states, _, mask, *_ = pipe.encode_prompt(caption, do_classifier_free_guidance=False)
        # A token for each letter, the end, and one of padding.
        assert len(text) == len(caption) + 2 == int(mask.sum())
        assert gap(text.float(), states[0][mask[0] > 0].float()) <= 0.05  # bfloat16
    pipe.to(torch.float32)
    # With masks of booleans: those of ones and zeros that the pipeline makes of a caption are added
    # to the products of attention, and hide no padding.
    embeds: dict[str, Any] = {}
    for prefix, text in zip(("", "negative_"), texts, strict=True):
        padded = pad(text.float(), (0, 0, 0, 5), value=1.0)
        embeds[f"{prefix}prompt_embeds"] = padded[None]
        embeds[f"{prefix}prompt_attention_mask"] = torch.arange(len(padded))[None] < len(text)
    height, width = (side * pipe.vae_scale_factor for side in (ROWS, COLUMNS))
    own = {"height": height, "width": width, "num_inference_steps": STEPS}
    request = Request(
        inputs={"text": texts[0]}, negative={"text": texts[1]},
        latent_FHW=(1, ROWS, COLUMNS), fps=float("nan"), seed=0,
    )  # fmt: skip
    noise = torch.randn(4, ROWS, COLUMNS, generator=torch.Generator().manual_seed(5))
    packed = ChromaPipeline._pack_latents(noise[None], 1, 4, ROWS, COLUMNS)
    made = []
    for scale in (1.0, 4.0):
        (theirs,) = pipe(
            **embeds, **own, guidance_scale=scale, latents=packed, output_type="latent",
            return_dict=False,
        )  # fmt: skip
        with from_noise(run.config, noise[:, None]):
            (found,) = generate_latents(
                run.model, [request], config=run.config, settings=replace(EULER, guidance=scale)
            )
        made.append(found[:, 0])
        latent = ChromaPipeline._unpack_latents(theirs, height, width, pipe.vae_scale_factor)
        assert gap(made[-1], latent[0]) <= 1e-4
    assert gap(made[0], made[1]) > 1e-2
    for spacing in LevelSpacing:
        config = _spaced(run.config, pipe, spacing)
        (theirs,) = pipe(
            **embeds, **own, guidance_scale=1.0, latents=packed, output_type="latent",
            return_dict=False,
        )  # fmt: skip
        with from_noise(config, noise[:, None]):
            (found,) = generate_latents(run.model, [request], config=config, settings=EULER)
        latent = ChromaPipeline._unpack_latents(theirs, height, width, pipe.vae_scale_factor)
        assert gap(found[:, 0], latent[0]) <= 1e-4 < gap(found[:, 0], made[0])
    forward = compare_forward(source, done.path, Weights.MODEL)
    assert forward.largest <= 1e-4 * forward.scale
    export_weights(done.path, tmp_path / "out", ExportOptions(pipeline_from=source))
    again = ChromaPipeline.from_pretrained(tmp_path / "out", torch_dtype=torch.float32)
    for name, tensor in pipe.transformer.state_dict().items():
        assert torch.equal(again.transformer.state_dict()[name], tensor), name
