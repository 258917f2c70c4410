"""ERNIE-Image in Diffusers: tiny random networks, and what they make of a noise."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2
from diffusers.models.transformers.transformer_ernie_image import ErnieImageTransformer2DModel
from diffusers.pipelines.ernie_image.pipeline_ernie_image import ErnieImagePipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AutoTokenizer, Mistral3Config, Mistral3Model

from dit.batch import PackedBatch
from dit.config import ModelConfig
from tests.families import case
from tests.families.flux2_parts import MISTRAL_CHAT, chat_tokenizer, flux2_vae
from tests.families.pipeline_parts import randomized, save

TINY = {
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_layers": 2,
    "ffn_hidden_size": 40,
    "in_channels": 16,
    "out_channels": 16,
    "text_in_dim": 16,
    "rope_axes_dim": (2, 4, 6),
}
"""Keys of a tiny config.json."""


def _configuration(number: int) -> dict[str, Any]:
    """Keys of config.json number `number`; every fifth network has no linear for its texts."""
    draw, axes = random.Random(number), case.AXES[(number + 1) % len(case.AXES)]
    heads, channels = draw.choice([1, 2, 3, 5]), draw.choice([1, 3, 16])
    width = heads * sum(axes)
    return {
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_layers": draw.choice([1, 2, 3]),
        "ffn_hidden_size": draw.choice([17, 24, 40]),
        "in_channels": channels,
        "out_channels": channels,
        "patch_size": 1 + (number % 4 == 1),
        "text_in_dim": width if number % 5 == 2 else draw.choice([7, 20]),
        "rope_axes_dim": axes,
    }


def _pack(model: ModelConfig, number: int) -> PackedBatch:
    return case.mixed_pack(model, number, case.picture)


def _theirs(network: nn.Module, batch: PackedBatch, index: int, level: float, model: Any) -> Tensor:
    """With padding behind the text, as the pipeline has of two prompts."""
    text = case.text_of(batch, index)
    (made,) = network(
        hidden_states=case.latent_of(batch, index, model)[:, 0][None],
        timestep=torch.tensor([level]),
        text_bth=pad(text, (0, 0, 0, 3), value=1.0),
        text_lens=torch.tensor([text.shape[1]]),
        return_dict=False,
    )
    return case.rows_of(made[0][:, None], model)


def _arguments(model: Any) -> dict[str, Any]:
    frames, rows, columns = case.COUNTED
    sides = frames * rows * model.patch_spatial, columns * model.patch_spatial
    return {
        "hidden_states": torch.zeros(1, model.in_channels, *sides),
        "text_bth": torch.zeros(1, case.COUNTED_TEXT, model.crossattn_emb_size),
        "text_lens": torch.tensor([case.COUNTED_TEXT]),
    }


CASE = case.Case(
    network=ErnieImageTransformer2DModel,
    tiny=TINY,
    parameters=dict.fromkeys(("ernie_image", "ernie_image_turbo"), 8_033_490_048),
    configuration=_configuration,
    cases=12,
    quick=3,
    pack=_pack,
    theirs=_theirs,
    adapted_by={"ernie_image": (ErnieImagePipeline, {})},
    published_levels=dict.fromkeys(("ernie_image", "ernie_image_turbo"), case.levels_of(shift=4.0)),
    page=case.Page(model="ERNIE-Image"),
    their_operations=case.head_of_text,
    counted=[("ernie_image", {}), ("ernie_image", {"crossattn_emb_size": 64, "patch_spatial": 1})],
    arguments=_arguments,
    text_rows=lambda arguments: arguments["text_bth"].shape[1],
    refused=[
        ({"rope_axes": (4, 4, 2)}, "must add up to 128, .* sum is 10"),
        ({"rope_axes": (3, 5, 4)}, "must be even"),
        ({"tensor_model_parallel_size": 3}, "num_attention_heads=32 .* divisor of 32"),
        ({"patch_temporal": 2}, "ERNIE-Image is a network of images"),
        ({"text_pad_to": 8}, "must be null: ERNIE-Image does not attend"),
    ],
    adapted=(
        *("gate_proj", "up_proj", "linear_fc2", "final_norm.linear", "text_proj"),
        *("adaLN_modulation.1", "time_embedding.linear_1"),
    ),
    comfyui=True,
)
random_ernie_image = CASE.random


def encoders(root: Path) -> Path:
    """Encoders of ERNIE-Image: FLUX.2's VAE, and the network of Mistral3 with three layers."""
    text = {
        "model_type": "mistral", "vocab_size": 99, "hidden_size": 16, "intermediate_size": 16,
        "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    }  # fmt: skip
    tower = {
        "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "image_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4,
    }  # fmt: skip
    config = Mistral3Config(text_config=text, vision_config=tower, image_token_index=3)
    parts = {"text_encoder": randomized(Mistral3Model(config)), "vae": flux2_vae()}
    return save(root, parts | {"tokenizer": chat_tokenizer(MISTRAL_CHAT, "left")})


def pipeline(folder: Path) -> ErnieImagePipeline:
    """The pipeline with random weights, saved in `folder`/pipeline."""
    kinds = {
        "text_encoder": Mistral3Model,
        "tokenizer": AutoTokenizer,
        "vae": AutoencoderKLFlux2,
    }
    opened = ErnieImagePipeline(
        transformer=random_ernie_image(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=4.0),
        **case.parts_of(encoders(folder / "parts"), **kinds),
    )
    return case.saved(opened, folder)


def made_by(pipe: Any, noise_CFHW: Tensor, texts: case.Texts, **call: Any) -> Tensor:
    """Latent [C, 1, H, W] of the pipeline from `noise_CFHW` and texts as our encoder has them."""
    call |= {f"{name}_embeds": [text["text"].float()] for name, text in texts.items()}
    sides = case.sides_of(noise_CFHW, pipe.vae_scale_factor)
    return case.latents_made(pipe, noise_CFHW[:, 0][None], **sides, **call)[0][:, None]


def _encoded(pipe: Any, texts: case.Texts) -> list[tuple[Tensor, Tensor]]:
    prompts = {"prompt": case.PROMPT, "negative_prompt": case.NEGATIVE}
    device = torch.device("cpu")
    return [
        (texts[name]["text"], pipe.encode_prompt(one, device)[0]) for name, one in prompts.items()
    ]


GENERATIONS = {
    "ernie_image": case.Generation(
        pipeline=pipeline,
        made_by=made_by,
        size=(1, 5, 7),
        channels=16,
        objective={"name": "flow", "sampling_levels": "even", "flow_shift": 4.0},
        encoded=_encoded,
        calls=[({"guidance_scale": scale}, {"guidance": scale}) for scale in (4.0, 1.0, 2.5)],
        slow=False,
    )
}
