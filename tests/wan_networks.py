"""Tiny networks of the family `wan`, and Diffusers' with random weights, as others publish them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel

from dit.config import Precision
from dit.models.wan.config import ImageCondition, WanConfig

TINY = {
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 16,
    "ffn_dim": 64,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}
"""Of config.json."""

CONDITIONS: dict[str, dict[str, Any]] = {
    "t2v": {},
    "i2v": {"image_condition": ImageCondition.FIRST_FRAME},
    "i2v_image": {
        "image_condition": ImageCondition.FIRST_FRAME,
        "image_embed_size": 10,
        "image_embed_length": 5,
    },
    "flf2v": {
        "image_condition": ImageCondition.FIRST_AND_LAST_FRAME,
        "image_embed_size": 10,
        "image_embed_length": 6,
        "image_embed_positions": True,
    },
    "ti2v": {"image_condition": ImageCondition.CLEAN_FIRST_FRAME},
}
"""Wan 2.1 and 2.2's text-to-video; 2.2's image-to-video; 2.1's; first and last frame; 2.2's 5B."""


def wan_model(kind: str = "t2v", **changes: Any) -> WanConfig:
    """A float32 model of milliseconds, of one of `CONDITIONS`."""
    sizes: dict[str, Any] = {
        "name": "custom",
        "num_layers": 2,
        "hidden_size": 48,
        "num_attention_heads": 4,
        "mlp_ratio": 1.5,
        "in_channels": 4,
        "crossattn_emb_size": 16,
        "text_pad_to": None,
        "freq_dim": 16,
        "precision": Precision.FP32,
    }
    return WanConfig(**(sizes | CONDITIONS[kind] | changes))


def random_wan(*, seed: int = 0, **changes: Any) -> WanTransformer3DModel:
    """Diffusers' network with random weights everywhere; its own start has zeros and ones."""
    network = WanTransformer3DModel(**(TINY | changes)).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in network.named_parameters():
        wave = torch.randn(parameter.shape, generator=generator)
        norm = parameter.ndim == 1 and name.endswith("weight")
        spread = 0.2 if parameter.ndim == 1 else parameter[0].numel() ** -0.5
        with torch.no_grad():
            parameter.copy_(wave * spread + norm)
    return network


def publish_wan(folder: Path, network: WanTransformer3DModel) -> Path:
    """`save_pretrained`."""
    network.save_pretrained(folder)
    return folder
