"""Wan in Diffusers: tiny random networks, folders of pipelines, and what they make of a noise."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanTransformer3DModel,
)
from torch import Tensor, nn

from dit.batch import PackedBatch
from dit.config import ModelConfig
from dit.models.registry import family_named
from tests.families import case
from tests.packs import random_pack

TINY = {
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 16,
    "ffn_dim": 64,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}
"""Keys of a tiny config.json."""

KINDS = {
    "t2v": "wan2.1_t2v_1.3b",
    "i2v": "wan2.2_i2v_a14b",
    "i2v_image": "wan2.1_i2v_14b",
    "flf2v": "wan2.1_flf2v_14b",
    "ti2v": "wan2.2_ti2v_5b",
}


def _conditions() -> dict[str, dict[str, Any]]:
    family = family_named("wan")
    return {kind: {**family.sizes[size], **family.tiny[size]} for kind, size in KINDS.items()}


CONDITIONS = _conditions()
"""The family's own tiny networks, of each kind."""


def wan_model(kind: str = "t2v", **changes: Any) -> Any:
    """A float32 model of milliseconds, of one of `CONDITIONS`."""
    sizes = {"name": "custom", "num_layers": 2, "text_pad_to": None}
    return family_named("wan").config(**(CONDITIONS[kind] | sizes | changes))


def _configuration(number: int) -> dict[str, Any]:
    """Of config.json, of a variant and of sizes that differ."""
    draw, variant = random.Random(number), [*KINDS][number % len(KINDS)]
    heads, width = draw.choice([(4, 12), (2, 24), (3, 16), (1, 30), (2, 6), (5, 20)])
    channels = 48 if variant == "ti2v" else draw.choice([1, 3, 4])
    shown = variant in ("i2v", "i2v_image", "flf2v")
    patches = [(1, 2, 2), (1, 2, 2), (1, 1, 1), (2, 2, 2), (1, 3, 3)]
    sizes = {
        "num_attention_heads": heads,
        "attention_head_dim": width,
        "in_channels": 2 * channels + 4 if shown else channels,
        "out_channels": channels,
        "patch_size": draw.choice(patches),
        "text_dim": draw.choice([8, 20]),
        "freq_dim": draw.choice([16, 32]),
        "ffn_dim": draw.choice([64, 50, 77]),
        "num_layers": draw.choice([1, 2]),
        "rope_max_seq_len": 1024,  # as ours says, which has no such bound
    }
    if variant in ("i2v_image", "flf2v"):
        sizes |= {"image_dim": 10, "added_kv_proj_dim": heads * width}
    if variant == "flf2v":
        sizes["pos_embed_seq_len"] = draw.choice([6, 10])
    return sizes


def _options(number: int) -> dict[str, Any]:
    """Diffusers' network takes the last 512 rows for text where there are images."""
    shown = "image_dim" in _configuration(number)
    return {"text_pad_to": 512 if shown else (None, 24)[number // 5 % 2]}


def _pack(model: ModelConfig, number: int) -> PackedBatch:
    """Pictures and videos of unequal sides.

    Captions beside images are long: the gradients of keys cancel over rows of padding, which are
    equal, and with 500 of them float32 leaves 4e-4.
    """
    draw = random.Random(number)
    drawn = [(draw.randint(2, 4), draw.randint(1, 4), draw.randint(1, 4)) for _ in range(2)]
    grids = [(1, draw.randint(1, 5), 3), *drawn, (1, 4, 2), (3, 1, 2)]
    shown = model.image_rows  # type: ignore[attr-defined]
    return random_pack(
        grids, [512, 430, 500, 511, 300] if shown else [7, 1, 12, 3, 20], model=model
    )


def _pipelines_mask(latent: Tensor, model: Any) -> Tensor:
    """Mask channels, as `WanImageToVideoPipeline.prepare_latents` makes them of pixel frames."""
    frames, height, width = latent.shape[1:]
    mask = torch.ones(1, 1, 4 * frames - 3, height, width)
    last = model.image_condition == "first_and_last_frame"
    mask[:, :, range(1, mask.shape[2] - last)] = 0
    first = torch.repeat_interleave(mask[:, :, 0:1], dim=2, repeats=4)
    mask = torch.concat([first, mask[:, :, 1:, :]], dim=2).view(1, -1, 4, height, width)
    return mask.transpose(1, 2)[0]


def _theirs(network: nn.Module, batch: PackedBatch, index: int, level: float, model: Any) -> Tensor:
    """With levels of tokens where a frame is given, and masks as the pipelines make them."""
    text, latent, timestep = (
        case.text_of(batch, index),
        case.latent_of(batch, index, model),
        [level],
    )
    missing = (model.text_pad_to or text.shape[1]) - text.shape[1]
    told: Any = torch.tensor(timestep)
    if batch.clean_tokens[index]:
        told = torch.full((1, batch.num_tokens[index]), level)
        told[:, : batch.clean_tokens[index]] = 0
    if batch.condition_TC is not None:
        condition = case.latent_of(batch, index, model, "condition_TC")
        latent = torch.cat([latent, _pipelines_mask(latent, model), condition])
    image = None
    if model.image_embed_size is not None:
        image = case.text_of(batch, index, "image_embed")
        image = image[0].unflatten(0, (2, -1)) if model.image_embed_positions else image
    padded = nn.functional.pad(text, (0, 0, 0, missing))
    return case.rows_of(network(latent[None], told, padded, image).sample[0], model)


def _arguments(model: Any) -> dict[str, Any]:
    """Of 512 rows of text, as it takes them beside images."""
    frames, rows, columns = case.COUNTED
    channels, image = model.in_channels + model.condition_channels, model.image_rows or 0
    states = None
    if image:
        pictures = (2, image // 2) if model.image_embed_positions else (1, image)
        states = torch.zeros(*pictures, model.image_embed_size)
    return {
        "hidden_states": torch.zeros(1, channels, frames, 2 * rows, 2 * columns),
        "encoder_hidden_states": torch.zeros(1, 512, model.crossattn_emb_size),
        "encoder_hidden_states_image": states,
    }


CASE = case.Case(
    network=WanTransformer3DModel,
    tiny=TINY,
    parameters={
        "wan2.1_t2v_1.3b": 1_418_996_800,
        "wan2.1_t2v_14b": 14_288_491_584,
        "wan2.1_i2v_14b": 16_394_878_784,
        "wan2.1_flf2v_14b": 16_395_536_704,
        "wan2.2_t2v_a14b": 14_288_491_584,
        "wan2.2_i2v_a14b": 14_288_901_184,
        "wan2.2_ti2v_5b": 4_999_787_712,
    },
    configuration=_configuration,
    cases=25,
    quick=5,
    options=_options,
    pack=_pack,
    theirs=_theirs,
    exportable={"text_pad_to": 512},
    counted=[(size, {"text_pad_to": rows}) for size in KINDS.values() for rows in (512, None)],
    arguments=_arguments,
    refused=[
        ({"num_attention_heads": 512}, "an even width of at least 6"),
        ({"image_embed_positions": True}, "needs image_embed_size"),
        ({"freq_dim": 0}, "freq_dim=0 must be at least 1"),
    ],
    grids=case.VIDEOS,
    training=("model.text_pad_to=12",),
    second_attention="attn2",
    comfyui=True,
)
random_wan = CASE.random


def publish_wan(folder: Path, network: nn.Module) -> Path:
    """`save_pretrained`."""
    network.save_pretrained(folder)  # type: ignore[operator]
    return folder


SHIFT = 3.0
SCHEDULERS: dict[str, Any] = {
    # As Diffusers' scripts/convert_wan_to_diffusers.py makes them.
    "unipc": lambda: UniPCMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        num_train_timesteps=1000,
        flow_shift=SHIFT,
    ),
    "euler": lambda: FlowMatchEulerDiscreteScheduler(shift=SHIFT),
}
_IMAGE = {"image_dim": 16, "added_kv_proj_dim": 48}
_SHOWN = {"in_channels": 36, "out_channels": 16}
NETWORKS: dict[str, dict[str, Any]] = {
    "t2v": {"in_channels": 16, "out_channels": 16},
    "i2v_2.1": {**_SHOWN, **_IMAGE},
    "flf2v": {**_SHOWN, **_IMAGE, "pos_embed_seq_len": 10},
    "i2v_2.2": _SHOWN,
    "5b": {"in_channels": 48, "out_channels": 48},
}
"""Of config.json; the tiny image encoder makes 5 rows of a picture."""


def pipeline(folder: Path, kind: str, *, scheduler: str = "unipc", **more: Any) -> Any:
    """The pipeline of one of `NETWORKS`, saved in `folder`."""
    from diffusers import AutoencoderKLWan, WanImageToVideoPipeline, WanPipeline
    from transformers import AutoTokenizer, CLIPImageProcessor, CLIPVisionModel, UMT5EncoderModel

    from tests.families import pipeline_parts

    make = pipeline_parts.wan22 if kind == "5b" else pipeline_parts.wan
    kinds: dict[str, Any] = {"tokenizer": AutoTokenizer, "text_encoder": UMT5EncoderModel}
    kinds |= {"vae": AutoencoderKLWan}
    if "image_dim" in NETWORKS[kind]:
        kinds |= {"image_encoder": CLIPVisionModel, "image_processor": CLIPImageProcessor}
    made: dict[str, Any] = {
        **case.parts_of(make(folder / "parts"), **kinds),
        "transformer": random_wan(**NETWORKS[kind]),
        "scheduler": SCHEDULERS[scheduler](),
    }
    opened = (WanPipeline if kind == "t2v" else WanImageToVideoPipeline)(**made, **more)
    case.saved(opened, folder)
    if kind == "i2v_2.1":
        _tell_rows(folder / "pipeline" / "transformer" / "config.json")
    return opened


def _tell_rows(file: Path) -> None:
    """Published networks without positions of image rows read 257, which nothing tells."""
    ours = {"text_pad_to": 512, "image_condition": "first_frame", "image_embed_length": 5}
    content = json.loads(file.read_text()) | {"_megatron_dit": ours}
    file.write_text(json.dumps(content))


def made_by(pipe: Any, noise_CFHW: Tensor, **call: Any) -> Tensor:
    """Latents [C, F, H, W] of a pipeline from `noise_CFHW`, in four steps."""
    call |= case.sides_of(noise_CFHW, pipe.vae_scale_factor_spatial)
    call |= {"num_frames": 4 * noise_CFHW.shape[1] - 3}
    return case.latents_made(pipe, noise_CFHW[None], **call)[0]


def _generation(scheduler: str) -> case.Generation:
    words = {"prompt": "a  red fox &amp; a hen", "negative_prompt": case.NEGATIVE}
    return case.Generation(
        pipeline=lambda folder: pipeline(folder, "t2v", scheduler=scheduler),
        made_by=lambda pipe, noise, _, **call: made_by(pipe, noise, **words, **call),
        size=case.VIDEO,
        channels=16,
        objective={"name": "flow", "flow_shift": SHIFT},
        calls=[({"guidance_scale": scale}, {"guidance": scale}) for scale in (1.0, 3.5)],
        prompt=words["prompt"],
        options={"sampler": scheduler},
        slow=False,
    )


GENERATIONS = {f"wan {scheduler}": _generation(scheduler) for scheduler in SCHEDULERS}
