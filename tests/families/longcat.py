"""LongCat-Image in Diffusers: tiny random networks, folders of pipelines, what these make."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.transformers.transformer_longcat_image import LongCatImageTransformer2DModel
from diffusers.pipelines.longcat_image.pipeline_longcat_image import (
    LongCatImagePipeline,
    calculate_shift,
    prepare_pos_ids,
)
from diffusers.pipelines.longcat_image.pipeline_longcat_image_edit import LongCatImageEditPipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)
from torch import Tensor, nn
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from dit.batch import PackedBatch
from dit.config import ModelConfig
from tests.families import case, pipeline_parts, stand_ins
from tests.families.flux import SCHEDULERS, packed_by_pipeline
from tests.packs import random_pack

TINY = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 12,
    "num_attention_heads": 4,
    "joint_attention_dim": 16,
    "axes_dims_rope": (2, 4, 6),
}
"""Keys of a tiny config.json."""


def _configuration(number: int) -> dict[str, Any]:
    draw, axes = random.Random(number), case.AXES[(number + 1) % len(case.AXES)]
    return {
        "num_attention_heads": draw.choice([1, 2, 3, 5]),
        "attention_head_dim": sum(axes),
        "axes_dims_rope": axes,
        "in_channels": 4 * draw.choice([1, 3, 4]),
        "joint_attention_dim": draw.choice([8, 20]),
        "num_layers": draw.choice([1, 2]),
        "num_single_layers": draw.choice([1, 2, 3]),
    }


def _pack(model: ModelConfig, number: int) -> PackedBatch:
    """Pictures of unequal sides, texts of one row and of many, two samples with references."""
    draw, references = random.Random(number), (0, 1, 2)[number % 3]
    grids = [case.picture(draw) for _ in range(5)]
    texts = ([7, 1, 12, 3, 20], [9, 9, 9, 9, 9])[number // 2 % 2]
    packed: Any = replace(model, reference_latents=references)  # type: ignore[call-arg]
    batch = random_pack(grids, texts, model=packed)
    assert [len(r) for r in batch.references] == [0, references, 0, references, 0]
    return batch


def _theirs(network: nn.Module, batch: PackedBatch, index: int, level: float, model: Any) -> Tensor:
    """As the pipelines place a text, the picture behind it, and those that are edited."""
    text, start = case.text_of(batch, index), batch.starts[index]
    grids = [batch.grids[index], *(batch.references[index])]
    rows, ids = [], []
    for number, (_, height, width) in enumerate(grids, 1):
        shifted = replace(batch, starts=(start,), grids=((1, height, width),))
        rows.append(packed_by_pipeline(case.latent_of(shifted, 0, model)))
        at: Any = {"start": (text.shape[1],) * 2, "height": height, "width": width}
        ids.append(prepare_pos_ids(modality_id=number, type="image", **at))
        start += height * width
    made = network(
        torch.cat(rows, dim=1),
        encoder_hidden_states=text,
        timestep=torch.tensor([level / 1000]),
        img_ids=torch.cat(ids),
        txt_ids=prepare_pos_ids(num_token=text.shape[1]),
    ).sample
    return made[0, : rows[0].shape[1]]


def _arguments(model: Any) -> dict[str, Any]:
    frames, rows, columns = case.COUNTED
    tokens = frames * rows * columns
    return {
        "hidden_states": torch.zeros(1, tokens, model.patch_features),
        "encoder_hidden_states": torch.zeros(1, case.COUNTED_TEXT, model.crossattn_emb_size),
        "img_ids": torch.zeros(tokens, 3),
        "txt_ids": torch.zeros(case.COUNTED_TEXT, 3),
    }


def _levels(num_steps: int, tokens: int) -> Tensor:
    return case.even_levels(num_steps, use_dynamic_shifting=True, mu=calculate_shift(tokens))


CASE = case.Case(
    network=LongCatImageTransformer2DModel,
    tiny=TINY,
    parameters=dict.fromkeys(("longcat_image", "longcat_image_edit"), 6_270_668_864),
    configuration=_configuration,
    cases=12,
    pack=_pack,
    theirs=_theirs,
    published_levels={"longcat_image": _levels},
    page=case.Page(model="LongCat-Image", keys=("model.num_layers=2", "model.num_single_layers=2")),
    counted=[("longcat_image_edit", {})],
    arguments=_arguments,
    refused=[
        ({"rope_axes": (4, 4, 2)}, "must add up to 128, .* sum is 10"),
        ({"patch_temporal": 2}, "LongCat-Image is a network of images"),
        ({"reference_latents": -1}, "must not be negative"),
    ],
    adapted=("proj_mlp", "norm_out.linear"),
)
random_longcat = CASE.random


def pipeline(folder: Path, *, edits: bool = False) -> Any:
    """The pipeline with random weights, saved in `folder`/pipeline."""
    parts = case.parts_of(
        pipeline_parts.longcat(folder / "parts"),
        **{"tokenizer": AutoTokenizer, "text_encoder": Qwen2_5_VLForConditionalGeneration},
        vae=AutoencoderKL,
    )
    made: Any = {
        **parts,
        "transformer": random_longcat(in_channels=64),
        "scheduler": FlowMatchEulerDiscreteScheduler(**SCHEDULERS["dev"]),
        "text_processor": stand_ins.StandInPictures(parts["tokenizer"]),
    }
    opened = (LongCatImageEditPipeline if edits else LongCatImagePipeline)(**made)
    # Transformers' own processor needs torchvision, and generation reads no more of it.
    opened.register_modules(text_processor=parts["tokenizer"])
    return case.saved(opened, folder)


def made_by(pipe: Any, noise_CFHW: Tensor, texts: case.Texts, **call: Any) -> Tensor:
    """Latent [C, 1, H, W] of a pipeline from `noise_CFHW` and texts as our encoder has them.

    They stand in for what it makes of its prompts, for it takes no embeddings without prompts.
    """
    of_prompt = {case.PROMPT: texts["prompt"], case.NEGATIVE: texts["negative_prompt"]}

    def encoded(prompt: str, **_: Any) -> tuple[Tensor, Tensor]:
        rows = of_prompt[prompt]["text"].float()[None]
        return rows, prepare_pos_ids(num_token=rows.shape[1])

    stride = pipe.vae_scale_factor
    sides, kept, pipe.encode_prompt = case.sides_of(noise_CFHW, stride), pipe.encode_prompt, encoded
    own = {} if "image" in call else {**sides, "enable_prompt_rewrite": False}
    call |= {"prompt": case.PROMPT, "negative_prompt": case.NEGATIVE, **own}
    found = case.latents_made(pipe, packed_by_pipeline(noise_CFHW), **call)
    pipe.encode_prompt = kept
    return pipe._unpack_latents(found, **sides, vae_scale_factor=stride)[0][:, None]


def _encoded(pipe: Any, texts: case.Texts) -> list[tuple[Tensor, Tensor]]:
    prompts = {"prompt": case.PROMPT, "negative_prompt": case.NEGATIVE}
    return [(texts[name]["text"], pipe.encode_prompt(one)[0][0]) for name, one in prompts.items()]


GENERATIONS = {
    "longcat": case.Generation(
        pipeline=pipeline,
        made_by=made_by,
        size=(1, 6, 10),
        channels=16,
        objective={
            "name": "flow",
            "sampling_levels": "even",
            "time_shift_type": "exponential",
        },
        encoded=_encoded,
        calls=[
            *(({"guidance_scale": scale}, {"guidance": scale}) for scale in (4.5, 1.0, 2.5)),
            (
                {"guidance_scale": 40.0, "cfg_renorm_min": 0.8},
                {"guidance": 40.0, "guidance_least_norm": 0.8},
            ),
            (
                {"guidance_scale": 40.0, "enable_cfg_renorm": False},
                {"guidance": 40.0, "guidance_least_norm": 1.0},
            ),
        ],
        slow=False,
    )
}
