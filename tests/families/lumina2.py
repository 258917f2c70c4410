"""Lumina Image 2.0 in Diffusers: tiny random networks, and what they make of a noise."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.transformers.transformer_lumina2 import Lumina2Transformer2DModel
from diffusers.pipelines.lumina2.pipeline_lumina2 import Lumina2Pipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AutoTokenizer, Gemma2Model

from dit.batch import PackedBatch
from dit.config import ModelConfig
from tests.families import case, pipeline_parts

TINY = {
    "in_channels": 4,
    "hidden_size": 48,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "num_attention_heads": 6,
    "num_kv_heads": 2,
    "multiple_of": 1,
    "ffn_dim_multiplier": 0.5,
    "axes_dim_rope": (2, 2, 4),
    "cap_feat_dim": 16,
}
"""Keys of a tiny config.json."""


def _configuration(number: int) -> dict[str, Any]:
    """Of config.json; most have three heads of queries for one of keys."""
    draw, axes = random.Random(number), case.AXES[(number + 1) % len(case.AXES)]
    keys, readers = draw.choice([1, 2]), (3, 1, 2)[number // 4 % 3]
    width, multiplier = keys * readers * sum(axes), draw.choice([None, 0.5, 1.25])
    return {
        "in_channels": draw.choice([1, 3, 16]),
        "hidden_size": width,
        "num_attention_heads": keys * readers,
        "num_kv_heads": keys,
        "num_layers": draw.choice([1, 2, 3]),
        "num_refiner_layers": draw.choice([1, 2]),
        "multiple_of": 256 if multiplier is None and width % 64 == 0 else 1,
        "ffn_dim_multiplier": multiplier,
        "axes_dim_rope": axes,
        "cap_feat_dim": draw.choice([8, 20]),
    }


def _pack(model: ModelConfig, number: int) -> PackedBatch:
    return case.mixed_pack(model, number, case.picture)


def _theirs(network: nn.Module, batch: PackedBatch, index: int, level: float, model: Any) -> Tensor:
    """As the pipeline calls it and turns it round, with padding that the mask hides."""
    text = case.text_of(batch, index)
    (made,) = network(
        case.latent_of(batch, index, model)[:, 0][None],
        timestep=torch.tensor([1 - level / 1000]),
        encoder_hidden_states=pad(text, (0, 0, 0, 3), value=1.0),
        encoder_attention_mask=(torch.arange(text.shape[1] + 3) < text.shape[1])[None].long(),
        return_dict=False,
    )
    return -case.rows_of(made[0][:, None], model)


def _arguments(model: Any) -> dict[str, Any]:
    frames, rows, columns = case.COUNTED
    sides = frames * rows * model.patch_spatial, columns * model.patch_spatial
    return {
        "hidden_states": torch.zeros(1, model.in_channels, *sides),
        "encoder_hidden_states": torch.zeros(1, case.COUNTED_TEXT, model.crossattn_emb_size),
        "encoder_attention_mask": torch.ones(1, case.COUNTED_TEXT, dtype=torch.int64),
    }


CASE = case.Case(
    network=Lumina2Transformer2DModel,
    tiny=TINY,
    parameters={"lumina2": 2_609_769_152},
    configuration=_configuration,
    cases=12,
    pack=_pack,
    theirs=_theirs,
    adapted_by={"lumina2": (Lumina2Pipeline, {})},
    unread_comfyui=True,
    published_levels={"lumina2": case.levels_of(shift=6.0)},
    page=case.Page(
        model="Lumina-Image-2.0", keys=("model.num_layers=2", "model.num_refiner_layers=1")
    ),
    their_operations=case.head_of_text,
    counted=[("lumina2", {}), ("lumina2", {"num_refiner_layers": 2})],
    arguments=_arguments,
    refused=[
        ({"num_kv_heads": 5}, "num_kv_heads=5 must divide num_attention_heads=24"),
        ({"tensor_model_parallel_size": 3}, "=3 must divide num_kv_heads=8, .* 1, 2, 4 or 8"),
        ({"rope_axes": (4, 4, 2)}, "must add up to 96, .* sum is 10"),
        ({"num_refiner_layers": 0}, "num_refiner_layers=0 must be at least 1"),
        ({"patch_temporal": 2}, "Lumina Image 2.0 is a network of images"),
        ({"text_pad_to": 8}, "must be null: Lumina Image 2.0 does not attend"),
    ],
    adapted=("norm1.linear", "linear_1", "linear_3", "norm_out.linear_1"),
)
random_lumina2 = CASE.random

LONGEST = 256
"""Rows of a text in the pipeline."""


def pipeline(folder: Path) -> Lumina2Pipeline:
    """The pipeline with random weights, saved in `folder`/pipeline."""
    kinds = {"text_encoder": Gemma2Model, "tokenizer": AutoTokenizer, "vae": AutoencoderKL}
    opened = Lumina2Pipeline(
        transformer=random_lumina2(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
        **case.parts_of(pipeline_parts.lumina2(folder / "parts"), **kinds),
    )
    return case.saved(opened, folder)


def made_by(pipe: Any, noise_CFHW: Tensor, texts: case.Texts, **call: Any) -> Tensor:
    """Latent [C, 1, H, W] of the pipeline from `noise_CFHW` and texts as our encoder has them."""
    for name, text in texts.items():
        rows = text["text"].float()
        call[f"{name}_embeds"] = pad(rows, (0, 0, 0, LONGEST - len(rows)), value=1.0)[None]
        call[f"{name}_attention_mask"] = (torch.arange(LONGEST) < len(rows))[None].long()
    sides = case.sides_of(noise_CFHW, pipe.vae_scale_factor)
    return case.latents_made(pipe, noise_CFHW[:, 0][None], **sides, **call)[0][:, None]


def _encoded(pipe: Any, texts: case.Texts) -> list[tuple[Tensor, Tensor]]:
    made = pipe.encode_prompt(case.PROMPT, negative_prompt=case.NEGATIVE)
    pairs = zip(("prompt", "negative_prompt"), (made[:2], made[2:]), strict=True)
    return [(texts[name]["text"], rows[mask.bool()]) for name, (rows, mask) in pairs]


GENERATIONS = {
    "lumina2": case.Generation(
        pipeline=pipeline,
        made_by=made_by,
        size=(1, 6, 10),
        objective={"name": "flow", "sampling_levels": "even", "flow_shift": 6.0},
        encoded=_encoded,
        calls=[
            *(({"guidance_scale": scale}, {"guidance": scale}) for scale in (4.0, 1.0, 2.5)),
            (
                {"guidance_scale": 4.0, "cfg_normalization": False, "cfg_trunc_ratio": 0.5},
                {"guidance": 4.0, "guidance_least_norm": 1.0, "guidance_steps": 0.5},
            ),
            (
                {"guidance_scale": 4.0, "cfg_trunc_ratio": 0.7},
                {"guidance": 4.0, "guidance_steps": 0.7},
            ),
        ],
        slow=False,
    )
}
