"""Cosmos in Diffusers, tiny and random: the first one, Predict2 and Predict2.5."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers import CosmosTransformer3DModel
from diffusers.modular_pipelines.anima.modular_blocks_anima import AnimaAutoBlocks
from torch import Tensor, nn

from dit.batch import PackedBatch
from dit.config import ModelConfig
from dit.data.pack import pack_samples
from dit.models.patch_layout import PatchLayout
from tests.families.case import (
    COUNTED,
    COUNTED_TEXT,
    VIDEOS,
    Case,
    latent_of,
    levels_of,
    rows_of,
    text_of,
)
from tests.packs import random_pack, random_samples, run_config

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
"""Keys of a tiny config.json."""
PROJECTED = {
    "use_crossattn_projection": True,
    "crossattn_proj_in_channels": 28,
    "encoder_hidden_states_channels": 20,
}
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
"""Changes to `TINY`, of Predict2 and 2.5."""
TALL = 12
"""Tokens that captions are filled up to where zeros are attended."""


class NearestResize:
    """Stands in for torchvision, which has no CPU build here: a mask of zeros stays zeros."""

    class functional:  # noqa: N801
        @staticmethod
        def resize(mask, size, interpolation):
            return torch.nn.functional.interpolate(mask, size=size, mode="nearest")

    class InterpolationMode:
        NEAREST = "nearest"


def _configuration(number: int) -> dict[str, Any]:
    """Those of `NETWORKS`, then 36 whose neighbours differ in positions, mask and projection."""
    if number < len(NETWORKS):
        return [*NETWORKS.values()][number]
    draw, number = random.Random(number), number - len(NETWORKS)
    heads, width = draw.choice([(4, 24), (2, 16), (3, 32), (6, 12), (2, 26), (1, 64)])
    patch = draw.choice([(1, 2, 2), (1, 1, 1), (2, 2, 2), (2, 1, 1), (1, 3, 3)])
    channels, text = draw.choice([1, 3, 4, 16]), draw.choice([8, 20, 33])
    projected = PROJECTED | {"encoder_hidden_states_channels": text}
    return {
        "num_attention_heads": heads,
        "attention_head_dim": width,
        "num_layers": draw.choice([1, 2, 3]),
        "in_channels": channels,
        "out_channels": channels,
        "patch_size": patch,
        "mlp_ratio": draw.choice([4.0, 2.0, 2.5]),
        "adaln_lora_dim": draw.choice([4, 16, 24]),
        "text_embed_dim": text,
        "rope_scale": draw.choice([(1.0, 1.0, 1.0), (2.0, 1.0, 1.0), (1.0, 4.0, 3.0)]),
        "max_size": tuple(side * p for side, p in zip((7, 9, 9), patch, strict=True)),
        "extra_pos_embed_type": "learnable" if number % 2 else None,
        "concat_padding_mask": bool(number // 2 % 2),
        **(projected if number % 3 == 2 else {}),
    }


def _options(number: int) -> dict[str, Any]:
    """Captions of Predict2 are filled up; those of 2.5 are as the shards have them."""
    if number < len(NETWORKS):
        return {} if "2.5" in [*NETWORKS][number] else {"text_pad_to": TALL}
    return {"text_pad_to": (None, TALL)[number % 8 // 4]}


def _levels(number: int) -> Sequence[float]:
    if number < len(NETWORKS):
        return (0.03, 0.31, 0.72, 0.988, 0.5)
    return (-2.1, 0.3, 1.7, 437.5)


def _pack(model: ModelConfig, number: int) -> PackedBatch:
    """Pictures and videos, seldom of a multiple of anything; with 0, 1 or 2 given frames."""
    if number >= len(NETWORKS):
        draw, rates = random.Random(number), [math.nan, 16.0, 30.0, math.nan]
        shapes = [(1, draw.randint(1, 9), draw.randint(1, 9)), (1, 9, 2), (7, 1, 3)]
        drawn = (draw.randint(2, 5), draw.randint(1, 5), draw.randint(1, 5))
        return random_pack([*shapes, drawn], [7, 1, TALL, 3], model=model, fps=rates)
    grids, given = [(1, 3, 5), (3, 4, 2), (2, 5, 3), (4, 2, 2), (3, 1, 4)], (0, 2, 1, 0, 1)
    rates, rng = (math.nan, 16.0, 30.0, 16.0, math.nan), torch.Generator().manual_seed(3)
    layout, samples = PatchLayout.of(run_config(model=model)), []
    for sample, count in zip(
        random_samples(grids, (7, 1, TALL, 3, 5), model=model, fps=rates), given, strict=True
    ):
        size = (model.in_channels, count, *sample.latent_CFHW.shape[2:])
        frames = {"first_frame_latent": torch.randn(size, generator=rng)}
        others = frames if count and layout.has_clean_tokens else {}
        samples.append(replace(sample, others=others))
    return pack_samples(samples, layout)


def _theirs(network: nn.Module, batch: PackedBatch, index: int, level: float, model: Any) -> Tensor:
    """As the pipelines call it."""
    latent, text, fps = latent_of(batch, index, model), text_of(batch, index), batch.fps_N[index]
    missing = (model.text_pad_to or text.shape[1]) - text.shape[1]
    untold = fps.isnan() or model.base_fps is None
    told = {
        "hidden_states": latent[None],
        "encoder_hidden_states": nn.functional.pad(text, (0, 0, 0, missing)),
        "timestep": torch.tensor([level]),
        "padding_mask": torch.zeros(1, 1, 8, 8),
        "fps": None if untold else float(fps),
    }
    if model.condition_mask:
        clean = batch.clean_tokens[index]
        count = clean // math.prod(batch.grids[index][1:])
        mask = torch.zeros(1, 1, *latent.shape[1:])
        mask[:, :, :count] = 1
        level_F = torch.full((latent.shape[1],), level)
        level_F[:count] = CASE.clean_level
        told |= {"condition_mask": mask, "timestep": level_F.view(1, 1, -1, 1, 1)}
    return rows_of(network(**told).sample[0], model)


def _arguments(model: Any) -> dict[str, Any]:
    frames, rows, columns = COUNTED
    size = frames * model.patch_temporal, rows * model.patch_spatial, columns * model.patch_spatial
    return {
        "hidden_states": torch.zeros(1, model.in_channels, *size),
        "encoder_hidden_states": torch.zeros(1, COUNTED_TEXT, model.crossattn_emb_size),
        "padding_mask": torch.zeros(1, 1, 8, 8),
    }


CASE = Case(
    network=CosmosTransformer3DModel,
    tiny=TINY,
    parameters={},
    configuration=_configuration,
    cases=len(NETWORKS) + 16,
    quick=len(NETWORKS) + 4,
    options=_options,
    pack=_pack,
    theirs=_theirs,
    levels=_levels,
    clean_level=1e-4,
    adapted_by={"anima": (AnimaAutoBlocks, NETWORKS["images"])},
    published_levels={"anima": levels_of(shift=3.0)},
    counted=[("cosmos_7b", {"text_pad_to": None}), ("cosmos_7b", {})],
    arguments=_arguments,
    refused=(),
    grids=VIDEOS,
    trained={"extra_pos_embed_type": "learnable"},
    training=("model.text_pad_to=12",),
    second_attention="attn2",
    comfyui=True,
)
random_model = CASE.random


def publish(folder: Path, model: nn.Module, *, max_shard_size: str = "10GB") -> Path:
    """`save_pretrained`."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)  # type: ignore[operator]
    return folder
