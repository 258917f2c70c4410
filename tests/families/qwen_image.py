"""Folders of Qwen-Image's pipelines with tiny random parts, and what they make of a noise."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from torch import Tensor, nn
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from dit.batch import PackedBatch
from dit.config import ModelConfig
from tests.families import case, pipeline_parts

PIPELINES = {
    "qwen_image": "QwenImagePipeline",
    "qwen_image_edit": "QwenImageEditPipeline",
    "qwen_image_edit_2511": "QwenImageEditPlusPipeline",
}
TINY = {
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 2,
    "attention_head_dim": 12,
    "num_attention_heads": 4,
    "joint_attention_dim": 16,
    "axes_dims_rope": (4, 4, 4),
}
"""Keys of a tiny config.json."""
SCHEDULER = {
    "use_dynamic_shifting": True,
    "shift": 1.0,
    "base_shift": 0.5,
    "max_shift": 0.9,
    "base_image_seq_len": 256,
    "max_image_seq_len": 8192,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
}
"""scheduler_config.json of the published weights."""


def _configuration(number: int) -> dict[str, Any]:
    draw = random.Random(number)
    channels = draw.choice([1, 3, 4])
    return case.shape_of(number, draw) | {
        "in_channels": 4 * channels,
        "out_channels": channels,
        "joint_attention_dim": draw.choice([8, 20]),
        "axes_dims_rope": case.AXES[number % len(case.AXES)],
        "zero_cond_t": number % 3 == 2,
    }


def _pack(model: ModelConfig, number: int) -> PackedBatch:
    references: Any = replace(model, reference_latents=number % 3)  # type: ignore[call-arg]
    return case.mixed_pack(references, number, case.picture)


def _theirs(network: nn.Module, batch: PackedBatch, index: int, level: float, model: Any) -> Tensor:
    """Packed by the pipeline's own function."""
    start, grids = batch.starts[index], [batch.grids[index]]
    grids += batch.references[index]
    rows = []
    for grid in grids:
        shifted = replace(batch, starts=(start,), grids=(grid,))
        picture_FCHW = case.latent_of(shifted, 0, model).transpose(0, 1)
        rows.append(QwenImagePipeline._pack_latents(picture_FCHW[None], 1, *picture_FCHW.shape[1:]))
        start += grid[1] * grid[2]
    (made,) = network(
        torch.cat(rows, dim=1),
        encoder_hidden_states=case.text_of(batch, index),
        timestep=torch.tensor([level / 1000]),
        img_shapes=[grids],
        return_dict=False,
    )
    return made[0, : rows[0].shape[1]]


def _arguments(model: Any) -> dict[str, Any]:
    frames, rows, columns = case.COUNTED
    tokens = frames * rows * columns
    return {
        "hidden_states": torch.zeros(1, tokens, model.patch_features),
        "encoder_hidden_states": torch.zeros(1, case.COUNTED_TEXT, model.crossattn_emb_size),
        "img_shapes": [[case.COUNTED]],
    }


CASE = case.Case(
    network=QwenImageTransformer2DModel,
    tiny=TINY,
    parameters={
        "qwen_image": 20_430_401_088,
        "qwen_image_edit": 20_430_401_088,
        "qwen_image_edit_2511": 20_430_401_088,
    },
    configuration=_configuration,
    pack=_pack,
    theirs=_theirs,
    unread=case.last_text(*case.TEXT_OF_LAST_BLOCK, "txt_mlp"),
    exportable={"mlp_ratio": 4.0},
    adapted_by={"qwen_image": (QwenImagePipeline, {})},
    their_operations=case.text_of_last_layer,
    counted=[("qwen_image", {})],
    still=case.UNREAD_TEXT,
    adapted=("img_mod.1", "norm_out.linear"),
    comfyui=True,
    arguments=_arguments,
    refused=[
        ({"text_pad_to": 8}, "must be null: Qwen-Image does not attend"),
        ({"rope_axes": (4, 4, 4)}, r"rope_axes=\[4, 4, 4\] must add up to .* sum is 12"),
        ({"rope_axes": (1, 4, 8)}, "must be even numbers"),
        ({"reference_latents": 9}, r"reference_latents=9 must be between 0 and 3"),
        ({"clean_references": True}, "needs reference_latents of at least 1"),
        ({"patch_temporal": 2}, "Qwen-Image is a network of images"),
    ],
)
random_qwen_image = CASE.random


def pipeline(folder: Path, size: str) -> Any:
    """The pipeline of a named size, saved in `folder`.

    Those that edit have no processor, for Transformers' own needs torchvision, and so no text
    encoder.
    """
    made: dict[str, Any] = {
        "transformer": random_qwen_image(zero_cond_t=size == "qwen_image_edit_2511"),
        "scheduler": FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        **case.parts_of(
            pipeline_parts.qwen_image(folder / "parts"),
            tokenizer=AutoTokenizer,
            text_encoder=Qwen2_5_VLForConditionalGeneration,
            vae=AutoencoderKLQwenImage,
        ),
    }
    if size != "qwen_image":
        made |= {"tokenizer": None, "text_encoder": None, "processor": None}
    opened = getattr(diffusers, PIPELINES[size])(**made)
    return case.saved(opened, folder)


def made_by(pipe: Any, noise_CFHW: Tensor, texts: case.Texts, **call: Any) -> Tensor:
    """Latent [C, 1, H, W] of a pipeline from `noise_CFHW` and texts as our encoder has them."""
    channels, _, rows, columns = noise_CFHW.shape
    stride, noise = pipe.vae_scale_factor, noise_CFHW.transpose(0, 1)
    latents = QwenImagePipeline._pack_latents(noise, 1, channels, rows, columns)
    call |= {f"{name}_embeds": text["text"][None].float() for name, text in texts.items()}
    sides = case.sides_of(noise_CFHW, stride)
    found = case.latents_made(pipe, latents, **sides, **call)
    return QwenImagePipeline._unpack_latents(found, **sides, vae_scale_factor=stride)[0]


def _encoded(pipe: Any, texts: case.Texts) -> list[tuple[Tensor, Tensor]]:
    states, _ = pipe.encode_prompt(prompt=case.PROMPT)
    return [(texts["prompt"]["text"], states[0])]


GENERATIONS = {
    "qwen_image": case.Generation(
        pipeline=lambda folder: pipeline(folder, "qwen_image"),
        made_by=made_by,
        channels=16,
        # Of the scheduler what we have of it, too.
        objective={
            **{"sampling_levels": "even", "timestep_scale": 1000, "base_shift": 0.5},
            **{"max_shift": 0.9, "base_image_seq_len": 256, "max_image_seq_len": 8192},
            **{"shift_terminal": 0.02, "time_shift_type": "exponential"},
        },
        encoded=_encoded,
        calls=[({"true_cfg_scale": scale}, {"guidance": scale}) for scale in (1.0, 4.0)],
    )
}
