"""Folders of HunyuanImage 2.1's pipeline with tiny random parts, and what they make of a noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLHunyuanImage,
    FlowMatchEulerDiscreteScheduler,
    HunyuanImagePipeline,
    HunyuanImageTransformer2DModel,
)
from diffusers.guiders import AdaptiveProjectedMixGuidance
from torch import Tensor
from transformers import (
    AutoTokenizer,
    ByT5Tokenizer,
    Qwen2_5_VLForConditionalGeneration,
    T5EncoderModel,
)

from tests import tiny_pipelines
from tests.wan_networks import fill_random

SHIFT, STEPS = 5.0, 4
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
    "text_embed_2_dim": 16,
    "rope_axes_dim": (8, 8),
}
"""Of config.json; the tiny encoders make so many numbers."""
DISTILLED = {"guidance_embeds": True, "use_meanflow": True}
GUIDER = {"guidance_scale": 3.0, "adaptive_projected_guidance_start_step": 1}
OF_QUOTED = {"guidance_scale": 5.0, "adaptive_projected_guidance_start_step": 0}


def random_hunyuan_image(*, seed: int = 0, **changes: Any) -> HunyuanImageTransformer2DModel:
    """Diffusers' network with random weights everywhere."""
    network = HunyuanImageTransformer2DModel(**(TINY | changes)).eval()
    fill_random(network, seed=seed)
    return network


def pipeline(folder: Path, *, distilled: bool = False) -> Any:
    """The pipeline, saved in `folder`; the distilled one has no guiders."""
    parts, bf16 = tiny_pipelines.hunyuanimage(folder / "parts"), {"torch_dtype": torch.bfloat16}
    guiders: dict[str, Any] = {
        "guider": AdaptiveProjectedMixGuidance(**GUIDER),
        "ocr_guider": AdaptiveProjectedMixGuidance(**OF_QUOTED),
    }
    vlm: Any = Qwen2_5_VLForConditionalGeneration
    opened = HunyuanImagePipeline(
        tokenizer=AutoTokenizer.from_pretrained(parts / "tokenizer"),
        tokenizer_2=ByT5Tokenizer.from_pretrained(parts / "tokenizer_2"),
        # In the precision in which shards hold what they make.
        text_encoder=vlm.from_pretrained(parts / "text_encoder", **bf16),
        text_encoder_2=T5EncoderModel.from_pretrained(parts / "text_encoder_2", **bf16),
        vae=AutoencoderKLHunyuanImage.from_pretrained(parts / "vae"),
        transformer=random_hunyuan_image(**(DISTILLED if distilled else {})),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        **({} if distilled else guiders),
    )
    opened.set_progress_bar_config(disable=True)
    opened.save_pretrained(folder / "pipeline")
    return opened


def made_by(pipe: Any, noise_CHW: Tensor, **call: Any) -> Tensor:
    """Latents [C, H, W] of a pipeline from `noise_CHW`."""
    height, width = (side * pipe.vae_scale_factor for side in noise_CHW.shape[1:])
    (found,) = pipe(
        height=height,
        width=width,
        num_inference_steps=STEPS,
        latents=noise_CHW[None],
        output_type="latent",
        return_dict=False,
        **call,
    )
    return found[0]
