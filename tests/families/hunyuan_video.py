"""Folders of HunyuanVideo's pipelines with tiny random parts, and what they make of a noise."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideoImageToVideoPipeline,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
)
from torch import Tensor, nn
from torch.func import functional_call
from transformers import (
    AutoTokenizer,
    CLIPImageProcessor,
    CLIPTextModel,
    LlamaModel,
    LlavaForConditionalGeneration,
)

from dit.batch import PackedBatch
from dit.config import ModelConfig
from dit.models.registry import family_named
from tests.families import case, pipeline_parts

SHIFT = 7.0
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
    "pooled_projection_dim": 16,
    "rope_axes_dim": (4, 4, 8),
}
"""Of config.json; the tiny encoders make so many numbers."""
SHOWN: dict[str, dict[str, Any]] = {
    "latent_concat": {"in_channels": 9, "guidance_embeds": False},
    "token_replace": {},
}


def _configuration(number: int) -> dict[str, Any]:
    """Of text, with a first frame in channels of its own, or in the place of the noisy one."""
    draw = random.Random(number)
    channels = draw.choice([1, 3, 4])
    shown = (None, "latent_concat", "token_replace")[number % 3]
    return case.shape_of(number, draw) | {
        "in_channels": 2 * channels + 1 if shown == "latent_concat" else channels,
        "out_channels": channels,
        "num_single_layers": draw.choice([1, 2]),
        "patch_size": draw.choice([1, 2]),
        "patch_size_t": draw.choice([1, 1, 2]),
        "num_refiner_layers": draw.choice([1, 2]),
        "mlp_ratio": draw.choice([2.0, 4.0]),
        "guidance_embeds": number % 4 > 0,
        "text_embed_dim": draw.choice([8, 20]),
        "pooled_projection_dim": draw.choice([6, 10]),
        "rope_axes_dim": case.AXES[number % len(case.AXES)],
        "image_condition_type": shown,
    }


def _pack(model: ModelConfig, number: int) -> PackedBatch:
    return case.mixed_pack(
        model, number, lambda draw: (draw.randint(1, 3), draw.randint(1, 3), draw.randint(1, 4))
    )


def _theirs(network: nn.Module, batch: PackedBatch, index: int, level: float, model: Any) -> Tensor:
    """Where no frame is given, as the network of the same weights that knows of none."""
    text, latent = case.text_of(batch, index), case.latent_of(batch, index, model)
    if batch.condition_TC is not None:
        latent = torch.cat([latent, case.latent_of(batch, index, model, "condition_TC")])
    told: dict[str, Any] = {
        "hidden_states": latent[None],
        "timestep": torch.tensor([level]),
        "encoder_hidden_states": text,
        "encoder_attention_mask": torch.ones(text.shape[:2]),
        "pooled_projections": batch.vectors["pooled_text"][index : index + 1],
        "guidance": torch.tensor([1000 * case.GUIDANCE]),
        "return_dict": False,
    }
    replaces = model.image_condition == "token_replace"
    if replaces and not batch.clean_tokens[index]:
        plain = HunyuanVideoTransformer3DModel(
            **{**network.config, "image_condition_type": None}  # type: ignore[arg-type]
        )
        (made,) = functional_call(plain, dict(network.named_parameters()), (), told)
    else:
        (made,) = network(**told)
    return case.rows_of(made[0], model)


def _arguments(model: Any) -> dict[str, Any]:
    frames, rows, columns = case.COUNTED
    return {
        "hidden_states": torch.zeros(1, model.in_channels, frames, 2 * rows, 2 * columns),
        "encoder_hidden_states": torch.zeros(1, case.COUNTED_TEXT, model.crossattn_emb_size),
        "encoder_attention_mask": torch.ones(1, case.COUNTED_TEXT),
        "pooled_projections": torch.zeros(1, model.pooled_size),
        "guidance": torch.zeros(1),
    }


WITHOUT_FRAME = family_named("hunyuan_video").default().image_condition  # type: ignore[attr-defined]

CASE = case.Case(
    network=HunyuanVideoTransformer3DModel,
    tiny=TINY,
    parameters={
        "hunyuanvideo": 12_821_012_544,
        "hunyuanvideo_i2v": 12_821_012_544,
        "hunyuanvideo_i2v_33ch": 12_810_991_680,
    },
    configuration=_configuration,
    pack=_pack,
    theirs=_theirs,
    zero=case.ONES_OF_REFINER,
    compares_given=False,
    # Diffusers computes modulations of level 0 beside the others.
    counted=[("hunyuanvideo_i2v", {"image_condition": WITHOUT_FRAME, "mlp_ratio": 4.0})],
    grids=case.VIDEOS,
    trained={"in_channels": 9, "image_condition_type": "latent_concat"},
    adapted=("proj_mlp",),
    arguments=_arguments,
    refused=[
        ({"num_single_layers": 0}, "num_single_layers=0 must be at least 1"),
        ({"text_pad_to": 8}, "must be null: HunyuanVideo does not attend"),
    ],
)
random_hunyuan_video = CASE.random


def pipeline(folder: Path, shown: str | None = None) -> Any:
    """The pipeline for text, or for a first frame, saved in `folder`/pipeline.

    The text encoders for a first frame are in bfloat16, as we open them for generation.
    """
    make = pipeline_parts.hunyuan_video_i2v if shown else pipeline_parts.hunyuan_video
    parts = make(folder / "parts")
    sizes = {"image_condition_type": shown, **SHOWN[shown]} if shown else {}
    made: dict[str, Any] = {
        "vae": AutoencoderKLHunyuanVideo.from_pretrained(parts / "vae"),
        "transformer": random_hunyuan_video(**sizes),
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=SHIFT),
    }
    kinds: dict[str, Any] = {"tokenizer": AutoTokenizer, "tokenizer_2": AutoTokenizer}
    kinds |= {"text_encoder": LlamaModel, "text_encoder_2": CLIPTextModel}
    if shown:
        kinds |= {"text_encoder": LlavaForConditionalGeneration}
        kinds |= {"image_processor": CLIPImageProcessor}
    made |= case.parts_of(parts, **kinds)
    if shown:
        opened: Any = HunyuanVideoImageToVideoPipeline(**made)
    else:
        opened = HunyuanVideoPipeline(**made)
        opened.text_encoder.float()
        opened.text_encoder_2.float()
    return case.saved(opened, folder)


def made_by(pipe: Any, noise_CFHW: Tensor, texts: case.Texts, **call: Any) -> Tensor:
    """Latents [C, F, H, W] of a pipeline from `noise_CFHW`, of texts as our encoder has them."""
    for name, text in texts.items():
        call[f"{name}_attention_mask"] = torch.ones(1, len(text["text"]))
    return latents_of(pipe, noise_CFHW, **case.embeds_of(texts), **call)


def latents_of(pipe: Any, noise_CFHW: Tensor, **call: Any) -> Tensor:
    """Latents [C, F, H, W] of a pipeline from `noise_CFHW`; it encodes the prompts of `call`."""
    call |= {"num_frames": 4 * noise_CFHW.shape[1] - 3} | case.sides_of(noise_CFHW, 8)
    return case.latents_made(pipe, noise_CFHW[None], **call)[0]


GENERATIONS = {
    "hunyuan_video": case.Generation(
        pipeline=pipeline,
        made_by=made_by,
        size=case.VIDEO,
        objective={
            **{"name": "flow", "guidance": 1.0, "flow_shift": SHIFT, "sampling_levels": "even"},
        },
        calls=[
            (
                {"guidance_scale": told, "true_cfg_scale": scale},
                {"guidance": scale, "distilled_guidance": told},
            )
            for told, scale in ((6.0, 1.0), (1.0, 1.0), (6.0, 2.5))
        ],
    )
}
