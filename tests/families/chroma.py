"""Tiny networks of Chroma in Diffusers, and a folder of its pipeline with random parts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    ChromaPipeline,
    ChromaTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
)
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AutoTokenizer, T5EncoderModel

from dit.batch import PackedBatch
from dit.config import ModelConfig
from tests.families import case, pipeline_parts
from tests.families.flux import packed_by_pipeline

TINY = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 12,
    "num_attention_heads": 4,
    "joint_attention_dim": 16,
    "axes_dims_rope": (4, 4, 4),
    "approximator_num_channels": 8,
    "approximator_hidden_dim": 20,
    "approximator_layers": 2,
}
"""Keys of a tiny config.json."""


def _configuration(number: int) -> dict[str, Any]:
    draw = random.Random(number)
    return case.shape_of(number, draw) | {
        "in_channels": 4 * draw.choice([1, 3, 4]),
        "num_single_layers": draw.choice([1, 2, 3]),
        "joint_attention_dim": draw.choice([8, 20]),
        "axes_dims_rope": case.AXES[number % len(case.AXES)],
        "approximator_num_channels": draw.choice([4, 8, 16]),
        "approximator_hidden_dim": draw.choice([10, 16]),
        "approximator_layers": draw.choice([1, 2, 5]),
    }


def _pack(model: ModelConfig, number: int) -> PackedBatch:
    return case.mixed_pack(model, number, case.picture)


def _theirs(network: nn.Module, batch: PackedBatch, index: int, level: float, model: Any) -> Tensor:
    """Rows of padding follow those that a shard stores; the mask hides them."""
    text, padding, (_, height, width) = case.text_of(batch, index), 3, batch.grids[index]
    hidden = packed_by_pipeline(case.latent_of(batch, index, model))
    kept, rows = text.shape[1], text.shape[1] + padding
    mask = torch.ones(1, rows + hidden.shape[1], dtype=torch.bool)
    mask[:, kept:rows] = False
    (made,) = network(
        hidden,
        encoder_hidden_states=torch.cat((text, torch.ones(1, padding, text.shape[-1])), dim=1),
        timestep=torch.tensor([level / 1000]),
        img_ids=FluxPipeline._prepare_latent_image_ids(1, height, width, "cpu", torch.float32),
        txt_ids=torch.zeros(rows, 3),
        attention_mask=mask,
        return_dict=False,
    )
    return made[0]


def _arguments(model: Any) -> dict[str, Any]:
    frames, rows, columns = case.COUNTED
    tokens = frames * rows * columns
    return {
        "hidden_states": torch.zeros(1, tokens, model.patch_features),
        "encoder_hidden_states": torch.zeros(1, case.COUNTED_TEXT, model.crossattn_emb_size),
        "img_ids": torch.zeros(tokens, 3),
        "txt_ids": torch.zeros(case.COUNTED_TEXT, 3),
    }


CASE = case.Case(
    network=ChromaTransformer2DModel,
    tiny=TINY,
    parameters={
        "chroma": 8_899_983_424,
    },
    configuration=_configuration,
    pack=_pack,
    theirs=_theirs,
    exportable={"mlp_ratio": 4.0},
    page=case.Page(model="Chroma1-HD"),
    counted=[("chroma", {})],
    adapted=("proj_mlp",),
    arguments=_arguments,
    refused=[
        ({"approximator_channels": 6}, "=6 must be a positive multiple of 4"),
        ({"approximator_layers": 65}, "approximator_layers=65 must be at most 64"),
        ({"text_pad_to": 8}, "text_pad_to=8 must be null: Chroma attends to one token"),
    ],
)
random_chroma = CASE.random


def pipeline(folder: Path) -> ChromaPipeline:
    """The pipeline with random weights, saved in `folder`/pipeline; its parts are FLUX's."""
    kinds = {"text_encoder_2": T5EncoderModel, "tokenizer_2": AutoTokenizer}
    parts = case.parts_of(pipeline_parts.flux(folder / "parts"), vae=AutoencoderKL, **kinds)
    opened = ChromaPipeline(
        transformer=random_chroma(),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        **{name.removesuffix("_2"): part for name, part in parts.items()},
    )
    return case.saved(opened, folder)


def made_by(pipe: Any, noise_CFHW: Tensor, texts: case.Texts, **call: Any) -> Tensor:
    """Latent [C, 1, H, W] of the pipeline from `noise_CFHW` and texts as our encoder has them.

    With masks of booleans: those of ones and zeros that the pipeline makes of a caption are added
    to the products of attention, and hide no padding.
    """
    for name, text in texts.items():
        padded = pad(text["text"].float(), (0, 0, 0, 5), value=1.0)
        call[f"{name}_embeds"] = padded[None]
        call[f"{name}_attention_mask"] = torch.arange(len(padded))[None] < len(text["text"])
    pipe.to(torch.float32)
    stride = pipe.vae_scale_factor
    sides = case.sides_of(noise_CFHW, stride)
    found = case.latents_made(pipe, packed_by_pipeline(noise_CFHW), **sides, **call)
    return ChromaPipeline._unpack_latents(found, **sides, vae_scale_factor=stride)[0][:, None]


def _encoded(pipe: Any, texts: case.Texts) -> list[tuple[Tensor, Tensor]]:
    """A token for each letter, the end, and one of padding."""
    found = []
    for caption, name in ((case.PROMPT, "prompt"), ("", "negative_prompt")):
        states, _, mask, *_ = pipe.encode_prompt(caption, do_classifier_free_guidance=False)
        text = texts[name]["text"]
        assert len(text) == len(caption) + 2 == int(mask.sum())
        found.append((text, states[0][mask[0] > 0]))
    return found


GENERATIONS = {
    "chroma": case.Generation(
        pipeline=pipeline,
        made_by=made_by,
        objective={"time_shift_type": "exponential", "sampling_levels": "even"},
        encoded=_encoded,
        calls=[({"guidance_scale": scale}, {"guidance": scale}) for scale in (1.0, 4.0)],
        negative="",
    )
}
