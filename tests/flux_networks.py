"""Tiny networks of the family `flux`, and Diffusers' with random weights."""

from __future__ import annotations

from typing import Any

from diffusers import FluxTransformer2DModel

from dit.models.flux.family import MODEL_SIZES, FluxConfig
from dit.models.flux.family import TINY as TINY_SIZES
from tests.wan_networks import fill_random

GUIDANCE = 3.5
TINY = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 12,
    "num_attention_heads": 4,
    "joint_attention_dim": 16,
    "pooled_projection_dim": 10,
    "guidance_embeds": True,
    "axes_dims_rope": (4, 4, 4),
}
"""Of config.json."""


def flux_model(kind: str = "flux1_kontext", **changes: Any) -> FluxConfig:
    """A float32 model of milliseconds, of one of the tiny sizes."""
    sizes = {"name": "custom", "num_layers": 2, "num_single_layers": 2}
    return FluxConfig(**(MODEL_SIZES[kind] | TINY_SIZES[kind] | sizes | changes))


def random_flux(*, seed: int = 0, **changes: Any) -> FluxTransformer2DModel:
    """Diffusers' network with random weights everywhere."""
    network = FluxTransformer2DModel(**(TINY | changes)).eval()
    fill_random(network, seed=seed)
    return network
