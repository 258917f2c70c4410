"""Tiny random networks of Cosmos-Predict2 and 2.5, and samples for them with given frames."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dit.batch import LatentSample
from dit.config import RunConfig
from dit.data.pack import PatchLayout
from dit.models.dit.family import DitConfig
from tests.published import PROJECTED

VIDEO = {"in_channels": 5}
NETWORKS: dict[str, dict[str, Any]] = {
    "images": {"rope_scale": (1.0, 4.0, 4.0), "concat_padding_mask": True},
    "images, without a padding mask": {"rope_scale": (1.0, 4.0, 4.0), "num_layers": 3},
    "images, wide heads": {
        **{"num_attention_heads": 2, "attention_head_dim": 32, "rope_scale": (1.0, 4.0, 4.0)},
        **{"concat_padding_mask": True, "mlp_ratio": 2.5},
    },
    "video": {**VIDEO, "rope_scale": (1.0, 3.0, 3.0), "concat_padding_mask": True},
    "video, as of 14B": {
        **{**VIDEO, "rope_scale": (20 / 24, 2.0, 2.0), "concat_padding_mask": True},
        **{"num_attention_heads": 5, "adaln_lora_dim": 8},
    },
    "video, without a padding mask": {**VIDEO, "patch_size": (1, 1, 1)},
    "video, learnable positions": {
        **{**VIDEO, "extra_pos_embed_type": "learnable", "concat_padding_mask": True},
        **{"patch_size": (1, 2, 2), "num_layers": 1},
    },
    "2.5": {
        **{**VIDEO, **PROJECTED, "rope_scale": (1.0, 3.0, 3.0), "concat_padding_mask": True},
    },
    "2.5, one wide head": {
        **{**VIDEO, **PROJECTED, "num_attention_heads": 1, "attention_head_dim": 64},
        **{"concat_padding_mask": True, "num_layers": 3},
    },
    "2.5, more text than width": {
        **{**VIDEO, **PROJECTED, "crossattn_proj_in_channels": 120, "mlp_ratio": 2.0},
        **{"concat_padding_mask": True, "patch_size": (1, 1, 1)},
    },
}
"""Changes to `published.TINY`."""
GRIDS = ((1, 3, 5), (3, 4, 2), (2, 5, 3), (4, 2, 2), (3, 1, 4))
GIVEN, TEXTS = (0, 2, 1, 0, 1), (7, 1, 12, 3, 5)
RATES = (math.nan, 16.0, 30.0, 16.0, math.nan)
LEVELS = (0.03, 0.31, 0.72, 0.988, 0.5)
"""Of five samples: grids in patches, given frames, rows of text, frames per second, levels."""


def samples(config: RunConfig) -> list[LatentSample]:
    """Five samples of different sizes; those of video networks have 0, 1 or 2 given frames."""
    model, rng = config.model, torch.Generator().manual_seed(3)
    found = []
    for index, ((f, h, w), given) in enumerate(zip(GRIDS, GIVEN, strict=True)):
        size = (f * model.patch_temporal, h * model.patch_spatial, w * model.patch_spatial)
        sample = LatentSample(
            key=str(index),
            latent_CFHW=torch.randn(model.in_channels, *size, generator=rng),
            text_LE=torch.randn(TEXTS[index], model.crossattn_emb_size, generator=rng),
            fps=RATES[index],
        )
        frames = torch.randn(model.in_channels, given, *size[1:], generator=rng)
        if given and PatchLayout.of(config).has_clean_tokens:
            sample = replace(sample, others={"first_frame_latent": frames})
        found.append(sample)
    return found


def told_diffusers(sample: LatentSample, level: float, model: DitConfig) -> dict[str, Any]:
    """What the pipelines hand to the network of one sample, by the names of its arguments."""
    latent_CFHW, text_LE = sample.latent_CFHW, sample.text_LE
    if model.text_pad_to is not None:
        text_LE = nn.functional.pad(text_LE, (0, 0, 0, model.text_pad_to - len(text_LE)))
    told = {
        "encoder_hidden_states": text_LE[None],
        "padding_mask": torch.zeros(1, 1, 8, 8),
        "fps": None if math.isnan(sample.fps) or model.base_fps is None else sample.fps,
        "return_dict": False,
    }
    if not model.condition_mask:
        return told | {"hidden_states": latent_CFHW[None], "timestep": torch.tensor([level])}
    given = sample.others.get("first_frame_latent", latent_CFHW[:, :0])
    count, frames = given.shape[1], latent_CFHW.shape[1]
    level_F = torch.full((frames,), level)
    level_F[:count] = 1e-4
    mask = torch.zeros(1, 1, *latent_CFHW.shape[1:])
    mask[:, :, :count] = 1
    return told | {
        "hidden_states": torch.cat([given, latent_CFHW[:, count:]], dim=1)[None],
        "timestep": level_F.view(1, 1, -1, 1, 1),
        "condition_mask": mask,
    }


def gap(ours: Tensor, theirs: Tensor) -> float:
    """Largest absolute difference over the root mean square of theirs."""
    return float((ours - theirs).abs().max() / theirs.square().mean().sqrt())
