"""Diffusers' models with random weights, as folders that others might have published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import CosmosTransformer3DModel

TINY = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 4,
    "attention_head_dim": 24,
    "num_layers": 2,
    "text_embed_dim": 20,
    "adaln_lora_dim": 16,
    "max_size": (8, 16, 16),
    "rope_scale": (1.0, 1.0, 1.0),
    "concat_padding_mask": False,
    "extra_pos_embed_type": None,
}
PROJECTED = {
    "use_crossattn_projection": True,
    "crossattn_proj_in_channels": 28,
    "encoder_hidden_states_channels": 20,
}


class NearestResize:
    """Stands in for torchvision, which has no CPU build here: a mask of zeros stays zeros."""

    class functional:  # noqa: N801
        @staticmethod
        def resize(mask, size, interpolation):
            return torch.nn.functional.interpolate(mask, size=size, mode="nearest")

    class InterpolationMode:
        NEAREST = "nearest"


def random_model(*, seed: int = 0, **changes: Any) -> CosmosTransformer3DModel:
    """A model of milliseconds whose weights are all random; its own start has many zeros."""
    model = CosmosTransformer3DModel(**(TINY | changes)).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        wave = torch.randn(parameter.shape, generator=generator)
        spread = 0.2 if parameter.ndim == 1 else parameter.shape[1] ** -0.5
        with torch.no_grad():
            parameter.copy_(wave * spread + (parameter.ndim == 1))
    return model


def publish(folder: Path, model: CosmosTransformer3DModel, *, max_shard_size: str = "10GB") -> Path:
    """`save_pretrained`."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder
