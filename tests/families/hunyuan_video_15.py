"""Folders of HunyuanVideo 1.5's pipelines with tiny random parts, and what they make of a noise."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15ImageToVideoPipeline,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from diffusers.guiders import ClassifierFreeGuidance
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    ByT5Tokenizer,
    Qwen2_5_VLTextModel,
    SiglipImageProcessor,
    SiglipVisionModel,
    T5EncoderModel,
)

from dit.batch import PackedBatch
from dit.config import ModelConfig
from tests.families import case, pipeline_parts

SHIFT, SCALE = 5.0, 6.0
TINY = {
    "in_channels": 9,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "mlp_ratio": 2.0,
    "text_embed_dim": 16,
    "text_embed_2_dim": 16,
    "image_embed_dim": 16,
    "rope_axes_dim": (4, 4, 8),
    "target_size": 20,  # the pipeline of a picture makes 16 x 24 of one of this shape
}
"""Of config.json; the tiny encoders make so many numbers."""


def _configuration(number: int) -> dict[str, Any]:
    draw = random.Random(number)
    channels = draw.choice([1, 3, 4])
    return case.shape_of(number, draw) | {
        "in_channels": 2 * channels + 1,
        "out_channels": channels,
        "patch_size": draw.choice([1, 1, 2]),
        "patch_size_t": draw.choice([1, 1, 2]),
        "num_refiner_layers": draw.choice([1, 2]),
        "mlp_ratio": draw.choice([2.0, 4.0]),
        "text_embed_dim": draw.choice([8, 20]),
        "text_embed_2_dim": draw.choice([6, 10]),
        "image_embed_dim": draw.choice([6, 12]),
        "rope_axes_dim": case.AXES[number % len(case.AXES)],
    }


def _pack(model: ModelConfig, number: int) -> PackedBatch:
    return case.mixed_pack(
        model, number, lambda draw: (draw.randint(1, 4), draw.randint(1, 3), draw.randint(1, 4))
    )


def _theirs(network: nn.Module, batch: PackedBatch, index: int, level: float, model: Any) -> Tensor:
    """As the pipelines call it: rows of zeros where there is no picture, masks without gaps."""
    text, glyphs = case.text_of(batch, index), case.text_of(batch, index, "text_2")
    image = case.text_of(batch, index, "image_embed")
    parts = [case.latent_of(batch, index, model, rows) for rows in ("latent_TC", "condition_TC")]
    if not image.shape[1]:
        image = image.new_zeros(1, 2, image.shape[-1])
    (made,) = network(
        torch.cat(parts)[None],
        timestep=torch.tensor([level]),
        encoder_hidden_states=text,
        encoder_attention_mask=torch.ones(text.shape[:2]),
        encoder_hidden_states_2=glyphs,
        encoder_attention_mask_2=torch.ones(glyphs.shape[:2]),
        image_embeds=image,
        return_dict=False,
    )
    return case.rows_of(made[0], model)


def _arguments(model: Any) -> dict[str, Any]:
    """Of a caption alone: the description's rows beside it are an upper bound."""
    frames, rows, columns = case.COUNTED
    channels = model.in_channels + model.condition_channels
    return {
        "hidden_states": torch.zeros(1, channels, frames, 2 * rows, 2 * columns),
        "encoder_hidden_states": torch.zeros(1, case.COUNTED_TEXT, model.crossattn_emb_size),
        "encoder_attention_mask": torch.ones(1, case.COUNTED_TEXT),
        "encoder_hidden_states_2": torch.zeros(1, 0, model.glyph_embed_size),
        "encoder_attention_mask_2": torch.ones(1, 0),
        "image_embeds": torch.zeros(1, 0, model.image_embed_size),
    }


CASE = case.Case(
    network=HunyuanVideo15Transformer3DModel,
    tiny=TINY,
    parameters={
        "hunyuanvideo_15": 8_326_608_160,
    },
    configuration=_configuration,
    pack=_pack,
    theirs=_theirs,
    unread=case.last_text(*case.TEXT_OF_LAST_BLOCK, "ff_context"),
    zero=case.ONES_OF_REFINER,
    exportable={"glyph_hidden_size": 2048},
    their_operations=case.text_of_last_layer,
    counted=[("hunyuanvideo_15", {})],
    grids=case.VIDEOS,
    still=case.UNREAD_TEXT,
    arguments=_arguments,
    refused=[
        ({"num_refiner_layers": 0}, "num_refiner_layers=0 must be at least 1"),
        ({"rope_axes": (4, 4, 4)}, r"rope_axes=\[4, 4, 4\] must add up to .* sum is 12"),
        ({"text_pad_to": 8}, "must be null: HunyuanVideo 1.5 does not attend"),
    ],
)
random_hunyuan = CASE.random


def pipeline(folder: Path, *, image: bool = False, guider: Any = None, **changes: Any) -> Any:
    """The pipeline for text, or for a first frame with text, saved in `folder`."""
    kinds: dict[str, Any] = {"tokenizer": AutoTokenizer, "tokenizer_2": ByT5Tokenizer}
    kinds |= {"text_encoder": Qwen2_5_VLTextModel, "text_encoder_2": T5EncoderModel}
    kinds |= {"vae": AutoencoderKLHunyuanVideo15}
    if image:
        kinds |= {"image_encoder": SiglipVisionModel, "feature_extractor": SiglipImageProcessor}
    made: dict[str, Any] = {
        **case.parts_of(pipeline_parts.hunyuan(folder / "parts"), **kinds),
        "transformer": random_hunyuan(**changes),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        "guider": guider or ClassifierFreeGuidance(guidance_scale=SCALE),
    }
    opened = (HunyuanVideo15ImageToVideoPipeline if image else HunyuanVideo15Pipeline)(**made)
    return case.saved(opened, folder)


def made_by(pipe: Any, noise_CFHW: Tensor, **call: Any) -> Tensor:
    """Latents [C, F, H, W] of a pipeline from `noise_CFHW`."""
    if "image" not in call:
        call |= case.sides_of(noise_CFHW, pipe.vae_scale_factor_spatial)
    call |= {"num_frames": 4 * noise_CFHW.shape[1] - 3}
    return case.latents_made(pipe, noise_CFHW[None], **call)[0]


QUOTED = 'a sign says "open" and “shut”'


def _of_text(pipe: Any, noise_CFHW: Tensor, _: case.Texts, scale: float) -> Tensor:
    pipe.guider = pipe.guider.new(guidance_scale=scale)
    return made_by(pipe, noise_CFHW, prompt=QUOTED, negative_prompt=case.NEGATIVE)


GENERATIONS = {
    "hunyuan_video_15": case.Generation(
        pipeline=pipeline,
        made_by=_of_text,
        size=case.VIDEO,
        objective={"flow_shift": SHIFT, "sampling_levels": "even"},
        calls=[({"scale": scale}, {"guidance": scale}) for scale in (SCALE, 1.0)],
        prompt=QUOTED,
    )
}
