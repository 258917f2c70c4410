"""Folders of HunyuanImage 2.1's pipeline with tiny random parts, and what they make of a noise."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLHunyuanImage,
    FlowMatchEulerDiscreteScheduler,
    HunyuanImagePipeline,
    HunyuanImageTransformer2DModel,
)
from diffusers.guiders import AdaptiveProjectedMixGuidance
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    ByT5Tokenizer,
    Qwen2_5_VLForConditionalGeneration,
    T5EncoderModel,
)

from dit.batch import PackedBatch, StepEnd
from dit.config import ModelConfig
from tests.families import case, pipeline_parts

SHIFT = 5.0
TINY = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "num_refiner_layers": 1,
    "mlp_ratio": 2.0,
    "text_embed_dim": 16,
    "text_embed_2_dim": 16,
    "rope_axes_dim": (8, 8),
}
"""Of config.json; the tiny encoders make so many numbers."""
DISTILLED = {"guidance_embeds": True, "use_meanflow": True}
GUIDER = {"guidance_scale": 3.0, "adaptive_projected_guidance_start_step": 1}
OF_QUOTED = {"guidance_scale": 5.0, "adaptive_projected_guidance_start_step": 0}


def _configuration(number: int) -> dict[str, Any]:
    """As published, guidance-distilled, and told where a step ends, too."""
    draw, rope = random.Random(number), case.AXES[number % len(case.AXES)][1:]
    channels, patch = draw.choice([1, 3, 4]), draw.choice([1, 1, 2])
    return case.shape_of(number, draw) | {
        "attention_head_dim": sum(rope),
        "num_single_layers": draw.choice([1, 2]),
        "in_channels": channels,
        "out_channels": channels,
        "patch_size": (patch, patch),
        "num_refiner_layers": draw.choice([1, 2]),
        "mlp_ratio": draw.choice([2.0, 4.0]),
        "text_embed_dim": draw.choice([8, 20]),
        "text_embed_2_dim": draw.choice([6, 10]),
        "rope_axes_dim": rope,
        "guidance_embeds": number % 3 > 0,
        "use_meanflow": number % 3 == 2,
    }


def _pack(model: ModelConfig, number: int) -> PackedBatch:
    return case.mixed_pack(model, number, case.picture)


def _theirs(network: nn.Module, batch: PackedBatch, index: int, level: float, model: Any) -> Tensor:
    """As the pipeline calls it, with masks without gaps."""
    text, glyphs = case.text_of(batch, index), case.text_of(batch, index, "text_2")
    ends, told = batch.method(StepEnd), batch.guidance
    (made,) = network(
        case.latent_of(batch, index, model).transpose(0, 1),
        timestep=torch.tensor([level]),
        encoder_hidden_states=text,
        encoder_attention_mask=torch.ones(text.shape[:2]),
        encoder_hidden_states_2=glyphs,
        encoder_attention_mask_2=torch.ones(glyphs.shape[:2]),
        timestep_r=None if ends is None else ends.level_N[index : index + 1],
        guidance=None if told is None else torch.tensor([1000 * told]),
        return_dict=False,
    )
    return case.rows_of(made.transpose(0, 1), model)


def _arguments(model: Any) -> dict[str, Any]:
    frames, rows, columns = case.COUNTED
    return {
        "hidden_states": torch.zeros(1, model.in_channels, 2 * frames * rows, 2 * columns),
        "encoder_hidden_states": torch.zeros(1, case.COUNTED_TEXT, model.crossattn_emb_size),
        "encoder_attention_mask": torch.ones(1, case.COUNTED_TEXT),
    }


CASE = case.Case(
    network=HunyuanImageTransformer2DModel,
    tiny=TINY,
    parameters={
        "hunyuanimage_21": 17_425_795_520,
        "hunyuanimage_21_distilled": 17_453_334_976,
    },
    configuration=_configuration,
    pack=_pack,
    theirs=_theirs,
    zero=case.ONES_OF_REFINER,
    exportable={"glyph_hidden_size": 2048},
    counted=[("hunyuanimage_21", {})],
    trained={"guidance_embeds": True},
    adapted=("proj_mlp",),
    arguments=_arguments,
    refused=[
        ({"rope_axes": (4, 4)}, r"rope_axes=\[4, 4\] must add up to .* sum is 8"),
        ({"text_pad_to": 8}, "must be null: HunyuanImage does not attend"),
        ({"patch_temporal": 2}, "HunyuanImage is a network of images"),
        ({"mlp_ratio": 3.999}, "MLP width 14332 .* must be a multiple of"),
    ],
)
random_hunyuan_image = CASE.random


def pipeline(folder: Path, *, distilled: bool = False) -> Any:
    """The pipeline, saved in `folder`; the distilled one has no guiders."""
    guiders: dict[str, Any] = {
        "guider": AdaptiveProjectedMixGuidance(**GUIDER),
        "ocr_guider": AdaptiveProjectedMixGuidance(**OF_QUOTED),
    }
    opened = HunyuanImagePipeline(
        **case.parts_of(
            pipeline_parts.hunyuanimage(folder / "parts"),
            tokenizer=AutoTokenizer,
            tokenizer_2=ByT5Tokenizer,
            text_encoder=Qwen2_5_VLForConditionalGeneration,
            text_encoder_2=T5EncoderModel,
            vae=AutoencoderKLHunyuanImage,
        ),
        transformer=random_hunyuan_image(**(DISTILLED if distilled else {})),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        **({} if distilled else guiders),
    )
    return case.saved(opened, folder)


def made_by(pipe: Any, noise_CFHW: Tensor, **call: Any) -> Tensor:
    """Latent [C, 1, H, W] of a pipeline from `noise_CFHW`."""
    call |= case.sides_of(noise_CFHW, pipe.vae_scale_factor)
    return case.latents_made(pipe, noise_CFHW.transpose(0, 1), **call)[0][:, None]


QUOTED = 'a sign says "open" and “shut”'


def _of_text(pipe: Any, noise_CFHW: Tensor, _: case.Texts, *, guided: bool) -> Tensor:
    if guided:
        return made_by(pipe, noise_CFHW, prompt=QUOTED, negative_prompt=case.NEGATIVE)
    pipe.guider, pipe.ocr_guider = (pipe.guider.new(guidance_scale=1.0) for _ in range(2))
    return made_by(pipe, noise_CFHW, prompt=QUOTED)


def _encoded(pipe: Any, texts: case.Texts) -> list[tuple[Tensor, Tensor]]:
    states, mask, glyphs, glyph_mask = pipe.encode_prompt(QUOTED)
    kept = (("text", states[mask.bool()]), ("text_2", glyphs[glyph_mask.bool()]))
    return [(texts["prompt"][name], rows) for name, rows in kept]


GENERATIONS = {
    "hunyuan_image": case.Generation(
        pipeline=pipeline,
        made_by=_of_text,
        objective={"flow_shift": SHIFT, "sampling_levels": "even", "timestep_scale": 1000},
        encoded=_encoded,
        calls=[({"guided": True}, {"guider": "pipeline"}), ({"guided": False}, {"guidance": 1.0})],
        prompt=QUOTED,
    )
}
