"""Folders of Cosmos-Predict2's and 2.5's pipelines, with tiny random parts, and what they do."""

from __future__ import annotations

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


def watched(
    pipe: Any, *, given: int, guidance: float, noise: Tensor, **call: Any
) -> tuple[Tensor, Tensor]:
    """Runs a pipeline on `noise` [C, F, H, W] with `given` latent frames of a random video.

    Returns what its network is fed first, and the latents that come out, both [C, F, H, W].
    """
    fed: list[Tensor] = []

    def see(_module: Any, _arguments: Any, told: dict[str, Any]) -> None:
        fed.append(told["hidden_states"][0].clone())

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
    handle = pipe.transformer.register_forward_pre_hook(see, with_kwargs=True)
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
    return fed[0], made[0][:, None] if images else made[0]
