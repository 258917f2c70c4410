"""FLUX.2 in Diffusers: tiny random networks, and what they make of a noise."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModel
from diffusers.pipelines.flux2.pipeline_flux2 import Flux2Pipeline
from torch import Tensor, nn

from dit.batch import PackedBatch
from dit.config import ModelConfig
from tests.families.case import (
    COUNTED,
    COUNTED_TEXT,
    GUIDANCE,
    Case,
    latent_of,
    text_of,
)
from tests.packs import random_pack

TINY = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 12,
    "num_attention_heads": 4,
    "joint_attention_dim": 16,
    "guidance_embeds": True,
    "axes_dims_rope": (2, 4, 4, 2),
}
"""Of config.json."""
AXES = [(4, 4, 4, 4), (2, 6, 4, 8), (2, 2, 4, 2), (8, 4, 2, 2), (16, 6, 8, 2)]


def _configuration(number: int) -> dict[str, Any]:
    """Of config.json; every third one has no guidance embedding."""
    draw = random.Random(number)
    rope = AXES[number % len(AXES)]
    return {
        "num_attention_heads": draw.choice([1, 2, 3, 5]),
        "attention_head_dim": sum(rope),
        "axes_dims_rope": rope,
        "mlp_ratio": draw.choice([1.0, 2.0, 3.0]),
        "in_channels": draw.choice([3, 8, 16]),
        "joint_attention_dim": draw.choice([8, 20]),
        "guidance_embeds": number % 3 > 0,
        "num_layers": draw.choice([1, 2]),
        "num_single_layers": draw.choice([1, 2, 3]),
    }


def _pack(model: ModelConfig, number: int) -> PackedBatch:
    """Pictures of unequal odd sides, captions of no rows, two samples with references."""
    draw, references = random.Random(number), number % 3
    grids = [(1, draw.randint(1, 5), draw.randint(1, 5)) for _ in range(4)] + [(1, 5, 3)]
    texts = ([7, 0, 12, 3, 20], [0, 0, 5, 1, 0], [0] * 5)[number // 5 % 3]
    told = GUIDANCE if model.guidance_embed else None  # type: ignore[attr-defined]
    packed: Any = replace(model, reference_latents=references)  # type: ignore[call-arg]
    batch = random_pack(grids, texts, model=packed, guidance=told)
    assert [len(r) for r in batch.references or [()] * 5] == [0, references, 0, references, 0]
    return batch


def _theirs(network: nn.Module, batch: PackedBatch, index: int, level: float, model: Any) -> Tensor:
    """Rows and positions of tokens are the pipeline's."""
    start, grids = batch.starts[index], [batch.grids[index]]
    grids += batch.references[index] if batch.references else ()
    pictures = []
    for _, height, width in grids:
        shifted = replace(batch, starts=(start,), grids=((1, height, width),))
        pictures.append(latent_of(shifted, 0, model)[:, 0][None])
        start += height * width
    ids = [Flux2Pipeline._prepare_latent_ids(pictures[0])]
    if pictures[1:]:
        ids.append(Flux2Pipeline._prepare_image_ids(pictures[1:]))
    text = text_of(batch, index)
    made = network(
        torch.cat([Flux2Pipeline._pack_latents(one) for one in pictures], dim=1),
        encoder_hidden_states=text,
        timestep=torch.tensor([level / 1000]),
        img_ids=torch.cat(ids, dim=1).float(),
        txt_ids=Flux2Pipeline._prepare_text_ids(text).float(),
        guidance=torch.tensor([GUIDANCE]) if model.guidance_embed else None,
    ).sample
    return made[0, : batch.latent_tokens[index]]


def _arguments(model: Any) -> dict[str, Any]:
    frames, rows, columns = COUNTED
    tokens = frames * rows * columns
    return {
        "hidden_states": torch.zeros(1, tokens, model.patch_features),
        "encoder_hidden_states": torch.zeros(1, COUNTED_TEXT, model.crossattn_emb_size),
        "img_ids": torch.zeros(tokens, 4),
        "txt_ids": torch.zeros(COUNTED_TEXT, 4),
        "guidance": torch.zeros(1) if model.guidance_embed else None,
    }


def _unread(model: Any, name: str, batch: PackedBatch) -> bool:
    """What sees text alone, where no sample has any."""
    of_text = "add" in name or "context" in name or "modulation_txt" in name
    return not batch.text_starts[-1] and of_text


CASE = Case(
    network=Flux2Transformer2DModel,
    tiny=TINY,
    parameters={
        "flux2_dev": 32_223_281_152,
        "flux2_klein_4b": 3_875_544_576,
        "flux2_klein_9b": 9_078_581_248,
    },
    configuration=_configuration,
    cases=12,
    quick=3,
    pack=_pack,
    theirs=_theirs,
    unread=_unread,
    counted=[("flux2_klein_4b", {}), ("flux2_dev", {})],
    arguments=_arguments,
    refused=[
        ({"rope_axes": (4, 4, 2, 2)}, "add up to 12, and hidden_size=6144 .* width 128"),
        ({"rope_axes": (3, 5, 4, 2)}, "must be even"),
        ({"reference_latents": -1}, "must not be negative"),
        ({"mlp_ratio": 2.999}, "MLP width .* does not divide by num_attention_heads=48"),
        ({"num_single_layers": 0}, "num_single_layers=0 must be at least 1"),
    ],
    adapted=(
        *("to_qkv_mlp_proj", "linear_in", "linear_out", "norm_out.linear"),
        "single_transformer_blocks.1.attn.to_out",
        "double_stream_modulation_img.linear",
    ),
)
random_flux2 = CASE.random
