"""Folders of HunyuanVideo's pipelines with tiny random parts, and what they make of a noise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideoImageToVideoPipeline,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
)
from torch import Tensor
from transformers import (
    AutoTokenizer,
    CLIPImageProcessor,
    CLIPTextModel,
    LlamaModel,
    LlavaForConditionalGeneration,
)

from tests import tiny_pipelines
from tests.wan_networks import fill_random

SHIFT, STEPS = 7.0, 4
TINY = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "num_refiner_layers": 1,
    "mlp_ratio": 2.0,
    "text_embed_dim": 16,
    "pooled_projection_dim": 16,
    "rope_axes_dim": (4, 4, 8),
}
"""Of config.json; the tiny encoders make so many numbers."""
SHOWN: dict[str, dict[str, Any]] = {
    "latent_concat": {"in_channels": 9, "guidance_embeds": False},
    "token_replace": {},
}


def random_hunyuan_video(*, seed: int = 0, **changes: Any) -> HunyuanVideoTransformer3DModel:
    """Diffusers' network with random weights everywhere."""
    network = HunyuanVideoTransformer3DModel(**(TINY | changes)).eval()
    fill_random(network, seed=seed)
    return network


def pipeline(folder: Path, shown: str | None = None) -> Any:
    """The pipeline for text, or for a first frame, saved in `folder`/pipeline.

    The text encoders for a first frame are in bfloat16, as we open them for generation.
    """
    make = tiny_pipelines.hunyuan_video_i2v if shown else tiny_pipelines.hunyuan_video
    parts = make(folder / "parts")
    sizes = {"image_condition_type": shown, **SHOWN[shown]} if shown else {}
    made: dict[str, Any] = {
        "vae": AutoencoderKLHunyuanVideo.from_pretrained(parts / "vae"),
        "transformer": random_hunyuan_video(**sizes),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=SHIFT),
    }
    if shown:
        network: Any = LlavaForConditionalGeneration
        opened: Any = HunyuanVideoImageToVideoPipeline(
            **made,
            text_encoder=network.from_pretrained(parts / "text_encoder", dtype=torch.bfloat16),
            text_encoder_2=CLIPTextModel.from_pretrained(
                parts / "text_encoder_2", dtype=torch.bfloat16
            ),
            tokenizer=AutoTokenizer.from_pretrained(parts / "tokenizer"),
            tokenizer_2=AutoTokenizer.from_pretrained(parts / "tokenizer_2"),
            image_processor=CLIPImageProcessor.from_pretrained(parts / "image_processor"),
        )
    else:
        opened = HunyuanVideoPipeline(
            **made,
            text_encoder=LlamaModel.from_pretrained(parts / "text_encoder"),
            text_encoder_2=CLIPTextModel.from_pretrained(parts / "text_encoder_2"),
            tokenizer=AutoTokenizer.from_pretrained(parts / "tokenizer"),
            tokenizer_2=AutoTokenizer.from_pretrained(parts / "tokenizer_2"),
        )
    opened.set_progress_bar_config(disable=True)
    opened.save_pretrained(folder / "pipeline")
    return opened


def made_by(
    pipe: Any,
    noise_CFHW: Tensor,
    *,
    prompt: Mapping[str, Tensor],
    negative_prompt: Mapping[str, Tensor],
    **call: Any,
) -> Tensor:
    """Latents [C, F, H, W] of a pipeline from `noise_CFHW`, of prompts as our encoder has them."""
    texts: dict[str, Any] = {}
    for prefix, text in (("", prompt), ("negative_", negative_prompt)):
        texts[f"{prefix}prompt_embeds"] = text["text"][None].float()
        texts[f"{prefix}prompt_attention_mask"] = torch.ones(1, len(text["text"]))
        texts[f"{prefix}pooled_prompt_embeds"] = text["pooled_text"][None].float()
    return latents_of(pipe, noise_CFHW, **texts, **call)


def latents_of(pipe: Any, noise_CFHW: Tensor, **call: Any) -> Tensor:
    """Latents [C, F, H, W] of a pipeline from `noise_CFHW`; it encodes the prompts of `call`."""
    frames, *sides = noise_CFHW.shape[1:]
    height, width = (8 * side for side in sides)
    (found,) = pipe(
        height=height,
        width=width,
        num_frames=4 * frames - 3,
        num_inference_steps=STEPS,
        latents=noise_CFHW[None],
        output_type="latent",
        return_dict=False,
        **call,
    )
    return found[0]
