"""Folders of Qwen-Image's pipelines with tiny random parts, and what they make of a noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from torch import Tensor
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from tests import tiny_pipelines
from tests.wan_networks import fill_random

PIPELINES = {
    "qwen_image": "QwenImagePipeline",
    "qwen_image_edit": "QwenImageEditPipeline",
    "qwen_image_edit_2511": "QwenImageEditPlusPipeline",
}
TINY = {
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 2,
    "attention_head_dim": 12,
    "num_attention_heads": 4,
    "joint_attention_dim": 16,
    "axes_dims_rope": (4, 4, 4),
}
"""Of config.json."""
SCHEDULER = {
    "use_dynamic_shifting": True,
    "shift": 1.0,
    "base_shift": 0.5,
    "max_shift": 0.9,
    "base_image_seq_len": 256,
    "max_image_seq_len": 8192,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
}
"""scheduler_config.json of the published weights."""
STEPS = 4


def random_qwen_image(*, seed: int = 0, **changes: Any) -> QwenImageTransformer2DModel:
    """Diffusers' network with random weights everywhere."""
    network = QwenImageTransformer2DModel(**(TINY | changes)).eval()
    fill_random(network, seed=seed)
    return network


def pipeline(folder: Path, size: str) -> Any:
    """The pipeline of a named size, saved in `folder`.

    Those that edit have no processor, for Transformers' own needs torchvision, and so no text
    encoder.
    """
    parts = tiny_pipelines.qwen_image(folder / "parts")
    edits = size != "qwen_image"
    made: dict[str, Any] = {
        "tokenizer": AutoTokenizer.from_pretrained(parts / "tokenizer"),
        # In the precision in which shards hold what it makes.
        "text_encoder": Qwen2_5_VLForConditionalGeneration.from_pretrained(
            parts / "text_encoder", torch_dtype=torch.bfloat16
        ),
        "vae": AutoencoderKLQwenImage.from_pretrained(parts / "vae"),
        "transformer": random_qwen_image(zero_cond_t=size == "qwen_image_edit_2511"),
        "scheduler": FlowMatchEulerDiscreteScheduler(**SCHEDULER),
    }
    if edits:
        made |= {"tokenizer": None, "text_encoder": None, "processor": None}
    opened = getattr(diffusers, PIPELINES[size])(**made)
    opened.set_progress_bar_config(disable=True)
    opened.save_pretrained(folder / "pipeline")
    return opened


def made_by(
    pipe: Any, noise_CHW: Tensor, *, prompt: Tensor, negative_prompt: Tensor, **call: Any
) -> Tensor:
    """Latents [C, H, W] of a pipeline from `noise_CHW` and texts [L, E] as our encoder has them."""
    channels, rows, columns = noise_CHW.shape
    height, width = (side * pipe.vae_scale_factor for side in (rows, columns))
    (found,) = pipe(
        prompt_embeds=prompt[None].float(),
        negative_prompt_embeds=negative_prompt[None].float(),
        height=height,
        width=width,
        num_inference_steps=STEPS,
        latents=QwenImagePipeline._pack_latents(noise_CHW[None], 1, channels, rows, columns),
        output_type="latent",
        return_dict=False,
        **call,
    )
    unpacked = QwenImagePipeline._unpack_latents(found, height, width, pipe.vae_scale_factor)
    return unpacked[0, :, 0]
