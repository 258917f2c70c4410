"""Folders of Cosmos-Predict2's and 2.5's pipelines, with tiny random parts, and what they do."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from diffusers.pipelines.cosmos.pipeline_cosmos2_5_predict import Cosmos2_5_PredictBasePipeline
from diffusers.pipelines.cosmos.pipeline_cosmos2_text2image import Cosmos2TextToImagePipeline
from diffusers.pipelines.cosmos.pipeline_cosmos2_video2world import Cosmos2VideoToWorldPipeline
from torch import Tensor

from tests.families.dit import NETWORKS, random_model
from tests.families.pipeline_parts import randomized

# As Diffusers' scripts/convert_cosmos_to_diffusers.py makes them.
KARRAS = {"use_karras_sigmas": True}
UNIPC = {
    **{**KARRAS, "use_flow_sigmas": True, "prediction_type": "flow_prediction"},
    **{"sigma_max": 200.0, "sigma_min": 0.01},
}
PIPELINES: dict[str, tuple[Any, Any, str]] = {
    "images": (Cosmos2TextToImagePipeline, FlowMatchEulerDiscreteScheduler, "images"),
    "video": (Cosmos2VideoToWorldPipeline, FlowMatchEulerDiscreteScheduler, "video"),
    "2.5": (Cosmos2_5_PredictBasePipeline, UniPCMultistepScheduler, "2.5"),
}
"""Class of the pipeline and of its scheduler, and its network of `NETWORKS`."""


class Checker:
    """Stands in for the guardrail, which is a package of its own with models of its own."""

    def to(self, device):
        return self


def pipeline(name: str) -> Any:
    """One of `PIPELINES`; captions come to it as the rows of an encoder."""
    kind, scheduler, network = PIPELINES[name]
    vae = AutoencoderKLWan(
        base_dim=4, z_dim=4, num_res_blocks=1, latents_mean=[0.1] * 4, latents_std=[0.8] * 4
    )
    made = kind(
        text_encoder=None,
        tokenizer=None,
        transformer=random_model(**NETWORKS[network]),
        vae=randomized(vae),
        scheduler=scheduler(**(UNIPC if name == "2.5" else KARRAS)),
        safety_checker=Checker(),
    )
    made.set_progress_bar_config(disable=True)
    return made


def save(folder: Path, pipe: Any) -> Path:
    """The folder of a pipeline; each user brings the checker."""
    pipe.register_modules(safety_checker=None)
    pipe.save_pretrained(folder)
    pipe.register_modules(safety_checker=Checker())
    return folder


@dataclass(kw_only=True)
class Seen:
    """What a pipeline gave its network and its scheduler, call after call, and what came out."""

    network: list[dict[str, Any]] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    velocities: list[Tensor] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    latents: Tensor = field(default_factory=lambda: torch.empty(0))


def watched(pipe: Any, *, given: int, guidance: float, noise: Tensor, **call: Any) -> Seen:
    """Runs a pipeline on `noise` [C, F, H, W] with `given` latent frames of a random video."""
    seen = Seen()

    def see(_module: Any, _arguments: Any, told: dict[str, Any], output: Any) -> None:
        seen.network.append({k: v.clone() if isinstance(v, Tensor) else v for k, v in told.items()})
        seen.outputs.append(output[0].clone())

    step = pipe.scheduler.step

    def watched_step(velocity: Tensor, t: Any, state: Tensor, **options: Any) -> Any:
        seen.velocities.append(velocity.clone())
        seen.states.append(state.clone())
        return step(velocity, t, state, **options)

    frames, height, width = noise.shape[1], noise.shape[2] * 8, noise.shape[3] * 8
    size: dict[str, Any] = {"height": height, "width": width}
    images = isinstance(pipe, Cosmos2TextToImagePipeline)
    if not images:
        size["num_frames"] = 4 * frames - 3
    if given:
        rng = torch.Generator().manual_seed(11)
        video = torch.rand(4 * given - 3, 3, height, width, generator=rng)
        size["video"] = [video]
        if isinstance(pipe, Cosmos2_5_PredictBasePipeline):
            size["num_latent_conditional_frames"] = given
    handle = pipe.transformer.register_forward_hook(see, with_kwargs=True)
    pipe.scheduler.step = watched_step
    try:
        (made,) = pipe(
            latents=noise[None],
            guidance_scale=guidance,
            # That of Predict2's video draws its given frames from what the VAE says of them.
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
            return_dict=False,
            **size,
            **call,
        )
    finally:
        handle.remove()
        pipe.scheduler.step = step
    seen.latents = made[0][:, None] if images else made[0]
    return seen
