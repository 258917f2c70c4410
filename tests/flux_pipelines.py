"""Folders of FLUX's pipelines with tiny random parts, and what they make of a noise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxKontextPipeline,
    FluxPipeline,
)
from torch import Tensor
from transformers import AutoTokenizer, CLIPTextModel, T5EncoderModel

from tests import tiny_pipelines
from tests.flux_networks import random_flux

NETWORK = {"joint_attention_dim": 16, "pooled_projection_dim": 16}
"""Of config.json; the tiny text encoders make so many numbers."""
SCHEDULERS: dict[str, dict[str, Any]] = {
    # scheduler_config.json of FLUX.1 dev and Kontext, and of schnell.
    "dev": {"shift": 3.0, "use_dynamic_shifting": True},
    "schnell": {"shift": 1.0, "use_dynamic_shifting": False},
}
STEPS = 4


def pipeline(folder: Path, kind: str) -> Any:
    """The pipeline of `dev`, `schnell` or `kontext`, saved in `folder`."""
    parts, bf16 = tiny_pipelines.flux(folder / "parts"), {"torch_dtype": torch.bfloat16}
    scheduler = SCHEDULERS["schnell" if kind == "schnell" else "dev"]
    made: dict[str, Any] = {
        "tokenizer": AutoTokenizer.from_pretrained(parts / "tokenizer"),
        "tokenizer_2": AutoTokenizer.from_pretrained(parts / "tokenizer_2"),
        # In the precision in which shards hold what they make.
        "text_encoder": CLIPTextModel.from_pretrained(parts / "text_encoder", **bf16),
        "text_encoder_2": T5EncoderModel.from_pretrained(parts / "text_encoder_2", **bf16),
        "vae": AutoencoderKL.from_pretrained(parts / "vae"),
        "transformer": random_flux(**NETWORK, guidance_embeds=kind != "schnell"),
        "scheduler": FlowMatchEulerDiscreteScheduler(**scheduler),
    }
    opened = (FluxKontextPipeline if kind == "kontext" else FluxPipeline)(**made)
    opened.set_progress_bar_config(disable=True)
    opened.save_pretrained(folder / "pipeline")
    return opened


def made_by(
    pipe: Any,
    noise_CHW: Tensor,
    *,
    prompt: Mapping[str, Tensor],
    negative_prompt: Mapping[str, Tensor],
    **call: Any,
) -> Tensor:
    """Latents [C, H, W] of a pipeline from `noise_CHW` and prompts as our text encoder has them."""
    channels, rows, columns = noise_CHW.shape
    texts: dict[str, Any] = {}
    for prefix, text in (("", prompt), ("negative_", negative_prompt)):
        # In float32 as the network is; the pipeline's own are of the type of its text encoders.
        texts[f"{prefix}prompt_embeds"] = text["text"][None].float()
        texts[f"{prefix}pooled_prompt_embeds"] = text["pooled_text"][None].float()
    pipe.text_encoder.float()  # positions of text have its type
    height, width = (side * pipe.vae_scale_factor for side in (rows, columns))
    (found,) = pipe(
        **texts,
        height=height,
        width=width,
        num_inference_steps=STEPS,
        latents=FluxPipeline._pack_latents(noise_CHW[None], 1, channels, rows, columns),
        output_type="latent",
        return_dict=False,
        **call,
    )
    pipe.text_encoder.bfloat16()
    return FluxPipeline._unpack_latents(found, height, width, pipe.vae_scale_factor)[0]
