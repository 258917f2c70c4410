"""A folder of Stable Diffusion 3's pipeline with tiny random parts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    T5Config,
    T5EncoderModel,
)

from dit.batch import PackedBatch
from dit.config import ModelConfig
from tests.families import case, pipeline_parts

TINY = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
    "attention_head_dim": 12,
    "num_attention_heads": 4,
    "joint_attention_dim": 24,
    "caption_projection_dim": 48,
    "pooled_projection_dim": 12,
    "pos_embed_max_size": 8,
    "dual_attention_layers": (0,),
    "qk_norm": "rms_norm",
}
"""Keys of a tiny config.json."""


def _configuration(number: int) -> dict[str, Any]:
    """With and without norms of queries and keys, and a second attention of some layers."""
    draw = random.Random(number)
    shape = case.shape_of(number, draw) | {"num_attention_heads": draw.choice([2, 4])}
    channels, patch = draw.choice([1, 3, 4]), draw.choice([1, 2])
    dual = draw.randint(0, shape["num_layers"]) if number % 3 != 1 else 0
    return shape | {
        "in_channels": channels,
        "out_channels": channels,
        "patch_size": patch,
        "sample_size": 6 * patch,
        "joint_attention_dim": draw.choice([8, 20]),
        "caption_projection_dim": shape["num_attention_heads"] * shape["attention_head_dim"],
        "pooled_projection_dim": draw.choice([6, 10]),
        "pos_embed_max_size": draw.choice([5, 6, 9]),
        "qk_norm": "rms_norm" if number % 3 else None,
        "dual_attention_layers": (*range(dual),),
    }


def _pack(model: ModelConfig, number: int) -> PackedBatch:
    return case.mixed_pack(model, number, case.picture)


def _theirs(network: nn.Module, batch: PackedBatch, index: int, level: float, model: Any) -> Tensor:
    (made,) = network(
        case.latent_of(batch, index, model).transpose(0, 1),
        encoder_hidden_states=case.text_of(batch, index),
        pooled_projections=batch.vectors["pooled_text"][index : index + 1],
        timestep=torch.tensor([level]),
        return_dict=False,
    )
    return case.rows_of(made.transpose(0, 1), model)


def _arguments(model: Any) -> dict[str, Any]:
    frames, rows, columns = case.COUNTED
    return {
        "hidden_states": torch.zeros(1, model.in_channels, 2 * frames * rows, 2 * columns),
        "encoder_hidden_states": torch.zeros(1, case.COUNTED_TEXT, model.crossattn_emb_size),
        "pooled_projections": torch.zeros(1, model.pooled_size),
    }


CASE = case.Case(
    network=SD3Transformer2DModel,
    tiny=TINY,
    parameters={
        "sd3": 2_028_328_000,
        "sd3.5_medium": 2_243_171_520,
        "sd3.5_large": 8_056_627_520,
    },
    configuration=_configuration,
    pack=_pack,
    theirs=_theirs,
    unread=case.last_text("attn.add_q_proj", "attn.norm_added_q"),
    zero=("transformer_blocks.*.attn2.to_k.bias",),  # where keys are not normalised
    exportable={"mlp_ratio": 4.0},
    page=case.Page(model="stable-diffusion-3.5-medium", keys=("model.num_layers=3",)),
    counted=[("sd3", {}), ("sd3.5_medium", {})],
    still=("last_block.*.text_attention.q_layernorm.*",),
    second_attention="attn2",
    arguments=_arguments,
    refused=[
        ({"max_size": (1, 8, 6)}, r"max_size=\[1, 8, 6\] must be \[1, N, N\]"),
        ({"max_size": (1, 7, 7)}, "multiples of patch_spatial"),
        ({"dual_attention_layers": 25, "qk_norm": True}, r"must be between 0 and num_layers=24"),
        ({"patch_temporal": 2}, "SD3 is a network of images"),
    ],
)
random_sd3 = CASE.random


def text_parts(root: Path) -> Path:
    """Two CLIP encoders of widths 12 and 8, T5 of width 24, and their tokenizers."""
    sizes = {
        "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
        "vocab_size": 98, "max_position_embeddings": 77,
        "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": 2,
    }  # fmt: skip
    parts: dict[str, Any] = {}
    for end, width, pooled in (("", 12, 4), ("_2", 8, 8)):
        config = CLIPTextConfig(**sizes, hidden_size=width, projection_dim=pooled)
        parts[f"text_encoder{end}"] = pipeline_parts.randomized(CLIPTextModelWithProjection(config))
        parts[f"tokenizer{end}"] = pipeline_parts.tokenizer(77)
    t5 = T5Config(vocab_size=98, d_model=24, d_kv=8, d_ff=16, num_layers=2, num_heads=2)
    parts["text_encoder_3"] = pipeline_parts.randomized(T5EncoderModel(t5))
    parts["tokenizer_3"] = pipeline_parts.tokenizer()
    return pipeline_parts.save(root, parts)


def pipeline(folder: Path) -> StableDiffusion3Pipeline:
    """The pipeline with random weights, saved in `folder`/pipeline."""
    clip, words = CLIPTextModelWithProjection, AutoTokenizer
    encoders = {"text_encoder": clip, "text_encoder_2": clip, "text_encoder_3": T5EncoderModel}
    tokenizers = {"tokenizer": words, "tokenizer_2": words, "tokenizer_3": words}
    opened = StableDiffusion3Pipeline(
        transformer=random_sd3(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        **case.parts_of(pipeline_parts.flux(folder / "vae"), vae=AutoencoderKL),
        **case.parts_of(text_parts(folder / "parts"), **encoders, **tokenizers),
    )
    return case.saved(opened, folder)


def made_by(pipe: Any, noise_CFHW: Tensor, texts: case.Texts, **call: Any) -> Tensor:
    """Latent [C, 1, H, W] of the pipeline from `noise_CFHW` and texts as our encoder has them."""
    pipe.to(torch.float32)
    call |= case.embeds_of(texts) | case.sides_of(noise_CFHW, pipe.vae_scale_factor)
    return case.latents_made(pipe, noise_CFHW.transpose(0, 1), **call)[0][:, None]


def _encoded(pipe: Any, texts: case.Texts) -> list[tuple[Tensor, Tensor]]:
    states = pipe.encode_prompt(case.PROMPT, None, None, negative_prompt=case.NEGATIVE)
    found = []
    for text, rows, pooled in zip(texts.values(), states[:2], states[2:], strict=True):
        found += [(text["text"], rows[0]), (text["pooled_text"], pooled[0])]
    return found


GENERATIONS = {
    "sd3": case.Generation(
        pipeline=pipeline,
        made_by=made_by,
        objective={"flow_shift": 3.0},
        encoded=_encoded,
        calls=[({"guidance_scale": scale}, {"guidance": scale}) for scale in (1.0, 3.0)],
        slow=False,
    )
}
