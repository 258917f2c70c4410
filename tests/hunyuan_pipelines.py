"""Folders of HunyuanVideo 1.5's pipelines with tiny random parts, and what they make of a noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15ImageToVideoPipeline,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from diffusers.guiders import ClassifierFreeGuidance
from torch import Tensor
from transformers import (
    AutoTokenizer,
    ByT5Tokenizer,
    Qwen2_5_VLTextModel,
    SiglipImageProcessor,
    SiglipVisionModel,
    T5EncoderModel,
)

from tests import tiny_pipelines
from tests.wan_networks import fill_random

SHIFT, SCALE, STEPS = 5.0, 6.0, 4
TINY = {
    "in_channels": 9,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "mlp_ratio": 2.0,
    "text_embed_dim": 16,
    "text_embed_2_dim": 16,
    "image_embed_dim": 16,
    "rope_axes_dim": (4, 4, 8),
    "target_size": 20,  # the pipeline of a picture makes 16 x 24 of one of this shape
}
"""Of config.json; the tiny encoders make so many numbers."""


def random_hunyuan(*, seed: int = 0, **changes: Any) -> HunyuanVideo15Transformer3DModel:
    """Diffusers' network with random weights everywhere."""
    network = HunyuanVideo15Transformer3DModel(**(TINY | changes)).eval()
    fill_random(network, seed=seed)
    return network


def pipeline(folder: Path, *, image: bool = False, guider: Any = None, **changes: Any) -> Any:
    """The pipeline for text, or for a first frame with text, saved in `folder`."""
    parts, bf16 = tiny_pipelines.hunyuan(folder / "parts"), {"torch_dtype": torch.bfloat16}
    made: dict[str, Any] = {
        "tokenizer": AutoTokenizer.from_pretrained(parts / "tokenizer"),
        "tokenizer_2": ByT5Tokenizer.from_pretrained(parts / "tokenizer_2"),
        # In the precision in which shards hold what they make.
        "text_encoder": Qwen2_5_VLTextModel.from_pretrained(parts / "text_encoder", **bf16),
        "text_encoder_2": T5EncoderModel.from_pretrained(parts / "text_encoder_2", **bf16),
        "vae": AutoencoderKLHunyuanVideo15.from_pretrained(parts / "vae"),
        "transformer": random_hunyuan(**changes),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        "guider": guider or ClassifierFreeGuidance(guidance_scale=SCALE),
    }
    if image:
        processor = SiglipImageProcessor.from_pretrained(parts / "feature_extractor")
        encoder = SiglipVisionModel.from_pretrained(parts / "image_encoder")
        made |= {"image_encoder": encoder, "feature_extractor": processor}
    opened = (HunyuanVideo15ImageToVideoPipeline if image else HunyuanVideo15Pipeline)(**made)
    opened.set_progress_bar_config(disable=True)
    opened.save_pretrained(folder / "pipeline")
    return opened


def made_by(pipe: Any, noise_CFHW: Tensor, **call: Any) -> Tensor:
    """Latents [C, F, H, W] of a pipeline from `noise_CFHW`."""
    frames, *sides = noise_CFHW.shape[1:]
    if "image" not in call:
        height, width = (side * pipe.vae_scale_factor_spatial for side in sides)
        call |= {"height": height, "width": width}
    (found,) = pipe(
        num_frames=4 * frames - 3,
        num_inference_steps=STEPS,
        latents=noise_CFHW[None],
        output_type="latent",
        return_dict=False,
        **call,
    )
    return found[0]
