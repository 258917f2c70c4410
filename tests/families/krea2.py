"""Krea 2 in Diffusers: tiny random networks, and what they make of a noise."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import AutoencoderKLQwenImage
from diffusers.models.transformers.transformer_krea2 import Krea2Transformer2DModel
from diffusers.pipelines.krea2.pipeline_krea2 import Krea2Pipeline, calculate_shift
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AutoTokenizer, Qwen3VLConfig, Qwen3VLModel

from dit.batch import PackedBatch
from dit.config import ModelConfig
from dit.models.positions import GridPositions
from tests.families import case
from tests.families.pipeline_parts import qwen_image_vae, qwen_vl_text, randomized, save, tokenizer

TINY = {
    "in_channels": 16,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "text_hidden_dim": 12,
    "num_text_layers": 3,
    "text_num_attention_heads": 4,
    "text_num_key_value_heads": 2,
    "text_intermediate_size": 20,
    "num_layerwise_text_blocks": 1,
    "num_refiner_text_blocks": 1,
    "axes_dims_rope": (2, 2, 4),
}
"""Keys of a tiny config.json."""


def _configuration(number: int) -> dict[str, Any]:
    """Of config.json; most have three heads of queries for one of keys."""
    draw, axes = random.Random(number), case.AXES[(number + 1) % len(case.AXES)]
    keys, readers = draw.choice([1, 2]), (3, 1, 2)[number // 4 % 3]
    text_keys, text_readers = draw.choice([1, 2]), draw.choice([1, 2])
    return {
        "in_channels": draw.choice([4, 12]),
        "num_layers": draw.choice([1, 2, 3]),
        "attention_head_dim": sum(axes),
        "num_attention_heads": keys * readers,
        "num_key_value_heads": keys,
        "intermediate_size": draw.choice([17, 24, 40]),
        "text_hidden_dim": text_keys * text_readers * draw.choice([3, 4]),
        "num_text_layers": draw.choice([2, 3, 5]),
        "text_num_attention_heads": text_keys * text_readers,
        "text_num_key_value_heads": text_keys,
        "text_intermediate_size": draw.choice([7, 20]),
        "num_layerwise_text_blocks": draw.choice([1, 2]),
        "num_refiner_text_blocks": draw.choice([1, 2]),
        "axes_dims_rope": axes,
    }


def _pack(model: ModelConfig, number: int) -> PackedBatch:
    return case.mixed_pack(model, number, case.picture)


def _theirs(network: nn.Module, batch: PackedBatch, index: int, level: float, model: Any) -> Tensor:
    """With padding inside of the text, which the pipeline's mask hides."""
    rows = case.text_of(batch, index).unflatten(-1, (model.num_text_layers, model.text_width))
    cut = rows.shape[1] // 2
    padded = torch.cat((rows[:, :cut], torch.ones_like(rows[:, :1]), rows[:, cut:]), dim=1)
    start, grid = batch.starts[index], batch.grids[index]
    (made,) = network(
        batch.latent_TC[None, start : start + grid[1] * grid[2]],
        padded,
        torch.tensor([level / 1000]),
        pad(GridPositions()((grid,), fps=float("nan")), (0, 0, padded.shape[1], 0)),
        (torch.arange(padded.shape[1]) != cut)[None],
        return_dict=False,
    )
    return made[0]


def _arguments(model: Any) -> dict[str, Any]:
    frames, rows, columns = case.COUNTED
    tokens = frames * rows * columns
    states = (1, case.COUNTED_TEXT, model.num_text_layers, model.text_width)
    return {
        "hidden_states": torch.zeros(1, tokens, model.patch_features),
        "encoder_hidden_states": torch.zeros(states),
        "position_ids": torch.zeros(case.COUNTED_TEXT + tokens, 3),
    }


def _levels(num_steps: int, tokens: int) -> Tensor:
    mu = calculate_shift(tokens, max_seq_len=6400)
    return case.even_levels(num_steps, use_dynamic_shifting=True, mu=mu)


CASE = case.Case(
    network=Krea2Transformer2DModel,
    tiny=TINY,
    parameters=dict.fromkeys(("krea2_raw", "krea2_turbo"), 12_820_073_036),
    configuration=_configuration,
    cases=12,
    quick=3,
    pack=_pack,
    theirs=_theirs,
    adapted_by={"krea2": (Krea2Pipeline, {})},
    published_levels={
        "krea2_raw": _levels,
        "krea2_turbo": case.levels_of(use_dynamic_shifting=True, mu=1.15),
    },
    page=case.Page(model="Krea-2-Raw"),
    counted=[("krea2_raw", {}), ("krea2_raw", {"num_fusion_layers": 2, "num_text_layers": 4})],
    arguments=_arguments,
    refused=[
        ({"num_kv_heads": 5}, "num_kv_heads=5 must divide num_attention_heads=48"),
        (
            {"tensor_model_parallel_size": 3},
            "text_kv_heads=20 .* distributed over tensor ranks",
        ),
        ({"text_kv_heads": 3}, "text_kv_heads=3 must divide text_heads=20"),
        ({"num_text_layers": 7}, "must be a multiple of num_text_layers=7"),
        ({"rope_axes": (4, 4, 2)}, "must add up to 128, .* sum is 10"),
        ({"num_fusion_layers": 0}, "num_fusion_layers=0 must be at least 1"),
        ({"patch_temporal": 2}, "Krea 2 is a network of images"),
        ({"text_pad_to": 8}, "must be null: Krea 2 does not attend"),
        (
            {"tensor_model_parallel_size": 2, "context_parallel_size": 4},
            "distributes text_heads=20 .* cp_comm_type=all_gather",
        ),
    ],
    adapted=(
        *("to_gate", "ff.gate", "ff.up", "ff.down", "img_in", "time_mod_proj", "projector"),
        *("txt_in.linear_1", "final_layer.linear"),
    ),
    comfyui=True,
)
random_krea2 = CASE.random


def encoders(root: Path) -> Path:
    """Qwen3-VL, of the depth that the pipeline reads, and the VAE of Qwen-Image."""
    text = qwen_vl_text(98) | {"num_hidden_layers": 36, "head_dim": 8}
    tower = {
        "depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 16,
        "intermediate_size": 16, "patch_size": 4, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    network = Qwen3VLModel(Qwen3VLConfig(text_config=text, vision_config=tower))
    parts = {"vae": qwen_image_vae(4), "tokenizer": tokenizer(2048)}
    return save(root, parts | {"text_encoder": randomized(network)})


def pipeline(folder: Path) -> Krea2Pipeline:
    """The pipeline with random weights, saved in `folder`/pipeline."""
    kinds = {
        "text_encoder": Qwen3VLModel,
        "tokenizer": AutoTokenizer,
        "vae": AutoencoderKLQwenImage,
    }
    opened = Krea2Pipeline(
        transformer=random_krea2(text_hidden_dim=16, num_text_layers=12),
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, max_image_seq_len=6400
        ),
        **case.parts_of(encoders(folder / "parts"), **kinds),
    )
    return case.saved(opened, folder)


def made_by(pipe: Any, noise_CFHW: Tensor, texts: case.Texts, **call: Any) -> Tensor:
    """Latent [C, 1, H, W] of the pipeline from `noise_CFHW` and texts as our encoder has them."""
    most = max(len(text["text"]) for text in texts.values())  # its positions are those of both
    for name, text in texts.items():
        states = text["text"].float().unflatten(-1, (12, -1))
        padding = most - len(states)
        call[f"{name}_embeds"] = pad(states, (0, 0, 0, 0, 0, padding), value=1.0)[None]
        call[f"{name}_embeds_mask"] = (torch.arange(most) < len(states))[None]
    channels, _, *sides = noise_CFHW.shape
    packed = pipe._pack_latents(noise_CFHW[:, 0][None], 1, channels, *sides)
    call |= case.sides_of(noise_CFHW, pipe.vae_scale_factor)
    found = case.latents_made(pipe, packed, **call)
    rows, columns = (side // 2 for side in sides)
    cells = found[0].unflatten(1, (channels, 2, 2)).unflatten(0, (rows, columns))
    return cells.permute(2, 0, 3, 1, 4).reshape(noise_CFHW.shape)


def _encoded(pipe: Any, texts: case.Texts) -> list[tuple[Tensor, Tensor]]:
    prompts = {"prompt": case.PROMPT, "negative_prompt": case.NEGATIVE}
    pairs = []
    for name, one in prompts.items():
        states, mask = pipe.get_text_hidden_states(one, 512)
        pairs.append((texts[name]["text"], states[mask].flatten(1)))
    return pairs


GENERATIONS = {
    "krea2": case.Generation(
        pipeline=pipeline,
        made_by=made_by,
        size=(1, 6, 10),
        objective={
            **{"name": "flow", "sampling_levels": "even", "time_shift_type": "exponential"},
            "max_image_seq_len": 6400,
        },
        encoded=_encoded,
        # The pipeline's scale is one less.
        calls=[({"guidance_scale": scale - 1}, {"guidance": scale}) for scale in (5.5, 1.0, 2.5)],
        slow=False,
    )
}
