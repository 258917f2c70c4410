"""Z-Image in Diffusers: tiny random networks, and what they make of a noise."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.transformers.transformer_z_image import ZImageTransformer2DModel
from diffusers.pipelines.z_image.pipeline_z_image import ZImagePipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)
from torch import Tensor, nn
from transformers import AutoTokenizer, Qwen3Model

from dit.batch import PackedBatch
from dit.config import ModelConfig
from tests.families import case, pipeline_parts
from tests.packs import random_pack

TINY = {
    "in_channels": 4,
    "dim": 48,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 6,
    "n_kv_heads": 6,
    "axes_dims": (2, 2, 4),
    "axes_lens": (1536, 512, 512),
    "cap_feat_dim": 16,
}
"""Keys of a tiny config.json."""


def _configuration(number: int) -> dict[str, Any]:
    """Of config.json; the last are wider than the embedding of the level."""
    draw, axes = random.Random(number), case.AXES[(number + 1) % len(case.AXES)]
    heads = draw.choice([3, 4, 5, 6]) if number < 10 else 320 // sum(axes)
    return {
        "in_channels": draw.choice([1, 3, 16]),
        "dim": heads * sum(axes),
        "n_heads": heads,
        "n_kv_heads": heads,
        "n_layers": draw.choice([1, 2, 3]),
        "n_refiner_layers": draw.choice([1, 2]),
        "axes_dims": axes,
        "cap_feat_dim": draw.choice([8, 20]),
    }


def _pack(model: ModelConfig, number: int) -> PackedBatch:
    """Latents and captions of a little less, exactly and a little more than 32 tokens."""
    draw = random.Random(number)
    grids = [(1, draw.randint(1, 9), draw.randint(1, 9)) for _ in range(3)]
    lengths = draw.sample([7, 1, 31, 32, 33, 65], 5)
    return random_pack([(1, 4, 8), (1, 3, 11), *grids], lengths, model=model)


def _theirs(network: nn.Module, batch: PackedBatch, index: int, level: float, model: Any) -> Tensor:
    """As the pipeline calls it and turns it round."""
    told = torch.tensor([1 - level / 1000])
    latent_CFHW = case.latent_of(batch, index, model)
    (made,) = network([latent_CFHW], told, [case.text_of(batch, index)[0]], return_dict=False)
    return -case.rows_of(made[0], model)


def _arguments(model: Any) -> dict[str, Any]:
    frames, rows, columns = case.COUNTED
    sides = frames * rows * model.patch_spatial, columns * model.patch_spatial
    return {
        "x": [torch.zeros(model.in_channels, 1, *sides)],
        "cap_feats": [torch.zeros(case.COUNTED_TEXT, model.crossattn_emb_size)],
    }


CASE = case.Case(
    network=ZImageTransformer2DModel,
    tiny=TINY,
    parameters=dict.fromkeys(("zimage", "zimage_turbo"), 6_154_908_736),
    configuration=_configuration,
    cases=12,
    pack=_pack,
    theirs=_theirs,
    exportable={"mlp_ratio": 8 / 3},
    adapted_by={"zimage": (ZImagePipeline, {})},
    unread_comfyui=True,
    published_levels={
        "zimage": case.levels_of(shift=6.0),
        "zimage_turbo": case.levels_of(shift=3.0),
    },
    page=case.Page(model="Z-Image", keys=("model.num_layers=2", "model.num_refiner_layers=1")),
    their_operations=case.head_of_text,
    counted=[("zimage", {}), ("zimage", {"num_refiner_layers": 2})],
    arguments=_arguments,
    level="t",
    text_rows=lambda arguments: len(arguments["cap_feats"][0]),
    refused=[
        ({"tensor_model_parallel_size": 4}, "num_attention_heads=30 .* divisor of 30"),
        ({"tensor_model_parallel_size": 3}, "MLP width 10240 .* tensor_model_parallel_size=3"),
        ({"rope_axes": (4, 4, 2)}, "must add up to 128, .* sum is 10"),
        ({"num_refiner_layers": 0}, "num_refiner_layers=0 must be at least 1"),
        ({"patch_temporal": 2}, "Z-Image is a network of images"),
        ({"text_pad_to": 8}, "Z-Image pads captions with learned tokens"),
    ],
    # With their folders: the last layer has an activation of the name of a linear of the others.
    adapted=("w1", "w3", "layers.0.adaLN_modulation.0", "2-1.adaLN_modulation.1"),
)
random_zimage = CASE.random


def pipeline(folder: Path) -> ZImagePipeline:
    """The pipeline with random weights, saved in `folder`/pipeline."""
    kinds = {"text_encoder": Qwen3Model, "tokenizer": AutoTokenizer, "vae": AutoencoderKL}
    opened = ZImagePipeline(
        transformer=random_zimage(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
        **case.parts_of(pipeline_parts.zimage(folder / "parts"), **kinds),
    )
    return case.saved(opened, folder)


def made_by(pipe: Any, noise_CFHW: Tensor, texts: case.Texts, **call: Any) -> Tensor:
    """Latent [C, 1, H, W] of the pipeline from `noise_CFHW` and texts as our encoder has them."""
    call |= {f"{name}_embeds": [text["text"].float()] for name, text in texts.items()}
    sides = case.sides_of(noise_CFHW, pipe.vae_scale_factor)
    return case.latents_made(pipe, noise_CFHW[:, 0][None], **sides, **call)[0][:, None]


def _encoded(pipe: Any, texts: case.Texts) -> list[tuple[Tensor, Tensor]]:
    made = pipe.encode_prompt(case.PROMPT, negative_prompt=case.NEGATIVE)
    pairs = zip(("prompt", "negative_prompt"), made, strict=True)
    return [(texts[name]["text"], rows) for name, (rows,) in pairs]


GENERATIONS = {
    "zimage": case.Generation(
        pipeline=pipeline,
        made_by=made_by,
        size=(1, 6, 10),
        objective={"name": "flow", "sampling_levels": "even", "flow_shift": 6.0},
        encoded=_encoded,
        # The pipeline's scale is one less.
        calls=[
            *(({"guidance_scale": scale - 1}, {"guidance": scale}) for scale in (5.0, 1.0, 2.5)),
            (
                {"guidance_scale": 4.0, "cfg_truncation": 0.1},
                {"guidance": 5.0, "guidance_interval": (0.9, 1.0)},
            ),
        ],
        slow=False,
    )
}
