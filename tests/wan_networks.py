"""Tiny networks of the family `wan`, and Diffusers' with random weights, as others publish them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import nn

from dit.models.wan.family import MODEL_SIZES, WanConfig
from dit.models.wan.family import TINY as TINY_SIZES

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

KINDS = {
    "t2v": "wan2.1_t2v_1.3b",
    "i2v": "wan2.2_i2v_a14b",
    "i2v_image": "wan2.1_i2v_14b",
    "flf2v": "wan2.1_flf2v_14b",
    "ti2v": "wan2.2_ti2v_5b",
}
CONDITIONS: dict[str, dict[str, Any]] = {
    kind: {**MODEL_SIZES[size], **TINY_SIZES[size]} for kind, size in KINDS.items()
}
"""The family's own tiny networks, of each kind."""


def wan_model(kind: str = "t2v", **changes: Any) -> WanConfig:
    """A float32 model of milliseconds, of one of `CONDITIONS`."""
    sizes = {"name": "custom", "num_layers": 2, "text_pad_to": None}
    return WanConfig(**(CONDITIONS[kind] | sizes | changes))


def random_wan(*, seed: int = 0, **changes: Any) -> WanTransformer3DModel:
    """Diffusers' network with random weights everywhere; its own start has zeros and ones."""
    network = WanTransformer3DModel(**(TINY | changes)).eval()
    fill_random(network, seed=seed)
    return network


def fill_random(network: nn.Module, *, seed: int) -> None:
    """Norms near 1, biases near 0, matrices that keep the size of numbers."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in network.named_parameters():
        wave = torch.randn(parameter.shape, generator=generator)
        norm = parameter.ndim == 1 and name.endswith("weight")
        spread = 0.2 if parameter.ndim == 1 else parameter[0].numel() ** -0.5
        with torch.no_grad():
            parameter.copy_(wave * spread + norm)


def publish_wan(folder: Path, network: WanTransformer3DModel) -> Path:
    """`save_pretrained`."""
    network.save_pretrained(folder)
    return folder
