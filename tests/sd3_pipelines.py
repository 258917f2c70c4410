"""A folder of Stable Diffusion 3's pipeline with tiny random parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import (
    AutoTokenizer,
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    T5Config,
    T5EncoderModel,
)

from tests import tiny_pipelines
from tests.wan_networks import fill_random

TINY = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
    "attention_head_dim": 12,
    "num_attention_heads": 4,
    "joint_attention_dim": 24,
    "caption_projection_dim": 48,
    "pooled_projection_dim": 12,
    "pos_embed_max_size": 8,
    "dual_attention_layers": (0,),
    "qk_norm": "rms_norm",
}
"""Of config.json."""


def random_sd3(*, seed: int = 0, **changes: Any) -> SD3Transformer2DModel:
    """Diffusers' network with random weights everywhere."""
    network = SD3Transformer2DModel(**(TINY | changes)).eval()
    fill_random(network, seed=seed)
    return network


def text_parts(root: Path) -> Path:
    """Two CLIP encoders of widths 12 and 8, T5 of width 24, and their tokenizers."""
    sizes = {
        "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
        "vocab_size": 98, "max_position_embeddings": 77,
        "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": 2,
    }  # fmt: skip
    parts: dict[str, Any] = {}
    for end, width, pooled in (("", 12, 4), ("_2", 8, 8)):
        config = CLIPTextConfig(**sizes, hidden_size=width, projection_dim=pooled)
        parts[f"text_encoder{end}"] = tiny_pipelines.randomized(CLIPTextModelWithProjection(config))
        parts[f"tokenizer{end}"] = tiny_pipelines.tokenizer(77)
    t5 = T5Config(vocab_size=98, d_model=24, d_kv=8, d_ff=16, num_layers=2, num_heads=2)
    parts["text_encoder_3"] = tiny_pipelines.randomized(T5EncoderModel(t5))
    parts["tokenizer_3"] = tiny_pipelines.tokenizer()
    return tiny_pipelines.save(root, parts)


def pipeline(folder: Path) -> StableDiffusion3Pipeline:
    """The pipeline with random weights, saved in `folder`/pipeline."""
    parts, bf16 = text_parts(folder / "parts"), {"torch_dtype": torch.bfloat16}
    clip: Any = CLIPTextModelWithProjection
    opened = StableDiffusion3Pipeline(
        transformer=random_sd3(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=AutoencoderKL.from_pretrained(tiny_pipelines.flux(folder / "vae") / "vae"),
        text_encoder=clip.from_pretrained(parts / "text_encoder", **bf16),
        text_encoder_2=clip.from_pretrained(parts / "text_encoder_2", **bf16),
        text_encoder_3=T5EncoderModel.from_pretrained(parts / "text_encoder_3", **bf16),
        tokenizer=AutoTokenizer.from_pretrained(parts / "tokenizer"),
        tokenizer_2=AutoTokenizer.from_pretrained(parts / "tokenizer_2"),
        tokenizer_3=AutoTokenizer.from_pretrained(parts / "tokenizer_3"),
    )
    opened.set_progress_bar_config(disable=True)
    opened.save_pretrained(folder / "pipeline")
    return opened
