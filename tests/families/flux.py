"""FLUX in Diffusers: tiny random networks, folders of pipelines, and what they make of a noise."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor, nn

from dit.batch import PackedBatch
from dit.config import ModelConfig
from dit.models.registry import family_named
from tests.families import case
from tests.packs import random_pack

TINY = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 12,
    "num_attention_heads": 4,
    "joint_attention_dim": 16,
    "pooled_projection_dim": 10,
    "guidance_embeds": True,
    "axes_dims_rope": (4, 4, 4),
}
"""Keys of a tiny config.json."""


def flux_model(kind: str = "flux1_kontext", **changes: Any) -> Any:
    """A float32 model of milliseconds, of one of the tiny sizes."""
    family = family_named("flux")
    sizes = {"name": "custom", "num_layers": 2, "num_single_layers": 2}
    return family.config(**{**family.sizes[kind], **family.tiny[kind], **sizes, **changes})


def _configuration(number: int) -> dict[str, Any]:
    """A random config.json for each `number`; every third one has no guidance embedding."""
    draw = random.Random(number)
    rope = case.AXES[number % len(case.AXES)]
    return {
        "num_attention_heads": draw.choice([1, 2, 3, 5]),
        "attention_head_dim": sum(rope),
        "axes_dims_rope": rope,
        "in_channels": 4 * draw.choice([1, 3, 4]),
        "joint_attention_dim": draw.choice([8, 20]),
        "pooled_projection_dim": draw.choice([6, 15]),
        "guidance_embeds": number % 3 > 0,
        "num_layers": draw.choice([1, 2]),
        "num_single_layers": draw.choice([1, 2, 3]),
    }


def _pack(model: ModelConfig, number: int) -> PackedBatch:
    """Pictures of unequal sides, captions of no rows, two samples with references."""
    draw, references = random.Random(number), number % 3
    grids = [(1, draw.randint(1, 5), draw.randint(1, 5)) for _ in range(4)] + [(1, 4, 2)]
    texts = ([7, 0, 12, 3, 20], [0, 0, 5, 1, 0], [0] * 5)[number // 5]
    told = case.GUIDANCE if model.guidance_embed else None  # type: ignore[attr-defined]
    packed: Any = replace(model, reference_latents=references)  # type: ignore[call-arg]
    batch = random_pack(grids, texts, model=packed, guidance=told)
    assert [len(r) for r in batch.references] == [0, references, 0, references, 0]
    return batch


def packed_by_pipeline(latent_CFHW: Tensor) -> Tensor:
    """Rows of the tokens of a picture."""
    from diffusers import FluxPipeline

    picture = latent_CFHW.transpose(0, 1)
    return FluxPipeline._pack_latents(picture, *picture.shape)


def _theirs(network: nn.Module, batch: PackedBatch, index: int, level: float, model: Any) -> Tensor:
    """With references behind the target, as the pipeline marks its one with 1."""
    from diffusers import FluxKontextPipeline

    start, grids = batch.starts[index], [batch.grids[index]]
    grids += batch.references[index]
    rows, ids = [], []
    for number, (_, height, width) in enumerate(grids):
        shifted = replace(batch, starts=(start,), grids=((1, height, width),))
        rows.append(packed_by_pipeline(case.latent_of(shifted, 0, model)))
        own = FluxKontextPipeline._prepare_latent_image_ids(1, height, width, "cpu", torch.float32)
        own[..., 0] = number
        ids.append(own)
        start += height * width
    text = case.text_of(batch, index)
    made = network(
        torch.cat(rows, dim=1),
        encoder_hidden_states=text,
        pooled_projections=batch.vectors["pooled_text"][index : index + 1],
        timestep=torch.tensor([level / 1000]),
        img_ids=torch.cat(ids),
        txt_ids=torch.zeros(text.shape[1], 3),
        guidance=torch.tensor([case.GUIDANCE]) if model.guidance_embed else None,
    ).sample
    return made[0, : rows[0].shape[1]]


def _arguments(model: Any) -> dict[str, Any]:
    frames, rows, columns = case.COUNTED
    tokens = frames * rows * columns
    return {
        "hidden_states": torch.zeros(1, tokens, model.patch_features),
        "encoder_hidden_states": torch.zeros(1, case.COUNTED_TEXT, model.crossattn_emb_size),
        "pooled_projections": torch.zeros(1, model.pooled_size),
        "img_ids": torch.zeros(tokens, 3),
        "txt_ids": torch.zeros(case.COUNTED_TEXT, 3),
        "guidance": torch.zeros(1) if model.guidance_embed else None,
    }


def _unread(model: Any, name: str, batch: PackedBatch) -> bool:
    """What sees text alone, where no sample has any."""
    return not batch.text_starts[-1] and ("add" in name or "context" in name)


CASE = case.Case(
    network=FluxTransformer2DModel,
    tiny=TINY,
    parameters={
        "flux1_dev": 11_901_408_320,
        "flux1_schnell": 11_891_178_560,
        "flux1_kontext": 11_901_408_320,
    },
    configuration=_configuration,
    cases=15,
    quick=3,
    pack=_pack,
    theirs=_theirs,
    unread=_unread,
    counted=[("flux1_schnell", {}), ("flux1_kontext", {})],
    arguments=_arguments,
    refused=[
        ({"rope_axes": (4, 4, 2)}, "must add up to 128, .*hidden_size=3072 .* sum is 10"),
        ({"rope_axes": (3, 5, 4)}, "must be even"),
        ({"reference_latents": -1}, "must not be negative"),
        ({"mlp_ratio": 1.999}, "MLP width 6140 .* must be a multiple of num_attention_heads=24"),
        ({"num_single_layers": 0}, "num_single_layers=0 must be at least 1"),
        (
            {"num_layers": 2, "num_single_layers": 2, "pipeline_model_parallel_size": 5},
            "4 layers do not fill",
        ),
    ],
    adapted=("proj_mlp", "norm_out.linear"),
)
random_flux = CASE.random

NETWORK = {"joint_attention_dim": 16, "pooled_projection_dim": 16}
"""Of config.json; the tiny text encoders make so many numbers."""
SCHEDULERS: dict[str, dict[str, Any]] = {
    # scheduler_config.json of FLUX.1 dev and Kontext, and of schnell.
    "dev": {"shift": 3.0, "use_dynamic_shifting": True},
    "schnell": {"shift": 1.0, "use_dynamic_shifting": False},
}


def pipeline(folder: Path, kind: str) -> Any:
    """The pipeline of `dev`, `schnell` or `kontext`, saved in `folder`."""
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        FluxKontextPipeline,
        FluxPipeline,
    )
    from transformers import AutoTokenizer, CLIPTextModel, T5EncoderModel

    from tests.families import pipeline_parts

    kinds = {"tokenizer": AutoTokenizer, "tokenizer_2": AutoTokenizer, "vae": AutoencoderKL}
    kinds |= {"text_encoder": CLIPTextModel, "text_encoder_2": T5EncoderModel}
    scheduler = SCHEDULERS["schnell" if kind == "schnell" else "dev"]
    made: dict[str, Any] = {
        **case.parts_of(pipeline_parts.flux(folder / "parts"), **kinds),
        "transformer": random_flux(**NETWORK, guidance_embeds=kind != "schnell"),
        "scheduler": FlowMatchEulerDiscreteScheduler(**scheduler),
    }
    opened = (FluxKontextPipeline if kind == "kontext" else FluxPipeline)(**made)
    return case.saved(opened, folder)


def made_by(pipe: Any, noise_CFHW: Tensor, texts: case.Texts, **call: Any) -> Tensor:
    """Latent [C, 1, H, W] of a pipeline from `noise_CFHW` and texts as our encoder has them."""
    from diffusers import FluxPipeline

    pipe.text_encoder.float()  # positions of text have its type
    stride = pipe.vae_scale_factor
    sides = case.sides_of(noise_CFHW, stride)
    call |= case.embeds_of(texts)
    found = case.latents_made(pipe, packed_by_pipeline(noise_CFHW), **sides, **call)
    pipe.text_encoder.bfloat16()
    return FluxPipeline._unpack_latents(found, **sides, vae_scale_factor=stride)[0][:, None]


def _encoded(pipe: Any, texts: case.Texts) -> list[tuple[Tensor, Tensor]]:
    states, pooled, _ = pipe.encode_prompt(prompt=case.PROMPT, prompt_2=None)
    assert torch.equal(texts["prompt"]["pooled_text"], pooled[0])
    return [(texts["prompt"]["text"], states[0])]


def _generation(kind: str) -> case.Generation:
    dev = kind == "dev"
    told = {"sampling_levels": "even", "time_shift_type": "exponential" if dev else None}
    scales = ((3.5, 1.0), (1.0, 1.0), (3.5, 2.5)) if dev else ((3.5, 1.0), (1.0, 2.5))
    return case.Generation(
        pipeline=lambda folder: pipeline(folder, kind),
        made_by=made_by,
        objective={"name": "flow", "guidance": 1.0 if dev else None, **told},
        encoded=_encoded,
        calls=[
            (
                {"guidance_scale": told, "true_cfg_scale": scale},
                {"guidance": scale, **({"distilled_guidance": told} if dev else {})},
            )
            for told, scale in scales
        ],
        slow=False,
    )


GENERATIONS = {"dev": _generation("dev"), "schnell": _generation("schnell")}
