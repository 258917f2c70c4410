"""FLUX.2 in Diffusers: tiny random networks, and what they make of a noise."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers.models.transformers.transformer_flux2 import Flux2Transformer2DModel
from diffusers.pipelines.flux2.pipeline_flux2 import Flux2Pipeline
from diffusers.pipelines.flux2.pipeline_flux2_klein import Flux2KleinPipeline
from torch import Tensor, nn

from dit.batch import PackedBatch
from dit.config import ModelConfig
from tests.families import case
from tests.packs import random_pack

TINY = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 12,
    "num_attention_heads": 4,
    "joint_attention_dim": 16,
    "guidance_embeds": True,
    "axes_dims_rope": (2, 4, 4, 2),
}
"""Keys of a tiny config.json."""
AXES = [(4, 4, 4, 4), (2, 6, 4, 8), (2, 2, 4, 2), (8, 4, 2, 2), (16, 6, 8, 2)]


def _configuration(number: int) -> dict[str, Any]:
    """A random config.json for each `number`; every third one has no guidance embedding."""
    draw = random.Random(number)
    rope = AXES[number % len(AXES)]
    return {
        "num_attention_heads": draw.choice([1, 2, 3, 5]),
        "attention_head_dim": sum(rope),
        "axes_dims_rope": rope,
        "mlp_ratio": draw.choice([1.0, 2.0, 3.0]),
        "in_channels": draw.choice([3, 8, 16]),
        "joint_attention_dim": draw.choice([8, 20]),
        "guidance_embeds": number % 3 > 0,
        "num_layers": draw.choice([1, 2]),
        "num_single_layers": draw.choice([1, 2, 3]),
    }


def _pack(model: ModelConfig, number: int) -> PackedBatch:
    """Pictures of unequal odd sides, captions of no rows, two samples with references."""
    draw, references = random.Random(number), number % 3
    grids = [(1, draw.randint(1, 5), draw.randint(1, 5)) for _ in range(4)] + [(1, 5, 3)]
    texts = ([7, 0, 12, 3, 20], [0, 0, 5, 1, 0], [0] * 5)[number // 5 % 3]
    told = case.GUIDANCE if model.guidance_embed else None  # type: ignore[attr-defined]
    packed: Any = replace(model, reference_latents=references)  # type: ignore[call-arg]
    batch = random_pack(grids, texts, model=packed, guidance=told)
    assert [len(r) for r in batch.references] == [0, references, 0, references, 0]
    return batch


def _theirs(network: nn.Module, batch: PackedBatch, index: int, level: float, model: Any) -> Tensor:
    """Rows and positions of tokens are the pipeline's."""
    start, grids = batch.starts[index], [batch.grids[index]]
    grids += batch.references[index]
    pictures = []
    for _, height, width in grids:
        shifted = replace(batch, starts=(start,), grids=((1, height, width),))
        pictures.append(case.latent_of(shifted, 0, model)[:, 0][None])
        start += height * width
    ids = [Flux2Pipeline._prepare_latent_ids(pictures[0])]
    if pictures[1:]:
        ids.append(Flux2Pipeline._prepare_image_ids(pictures[1:]))
    text = case.text_of(batch, index)
    made = network(
        torch.cat([Flux2Pipeline._pack_latents(one) for one in pictures], dim=1),
        encoder_hidden_states=text,
        timestep=torch.tensor([level / 1000]),
        img_ids=torch.cat(ids, dim=1).float(),
        txt_ids=Flux2Pipeline._prepare_text_ids(text).float(),
        guidance=torch.tensor([case.GUIDANCE]) if model.guidance_embed else None,
    ).sample
    return made[0, : batch.latent_tokens[index]]


def _arguments(model: Any) -> dict[str, Any]:
    frames, rows, columns = case.COUNTED
    tokens = frames * rows * columns
    return {
        "hidden_states": torch.zeros(1, tokens, model.patch_features),
        "encoder_hidden_states": torch.zeros(1, case.COUNTED_TEXT, model.crossattn_emb_size),
        "img_ids": torch.zeros(tokens, 4),
        "txt_ids": torch.zeros(case.COUNTED_TEXT, 4),
        "guidance": torch.zeros(1) if model.guidance_embed else None,
    }


def _unread(model: Any, name: str, batch: PackedBatch) -> bool:
    """What sees text alone, where no sample has any."""
    of_text = "add" in name or "context" in name or "modulation_txt" in name
    return not batch.text_starts[-1] and of_text


CASE = case.Case(
    network=Flux2Transformer2DModel,
    tiny=TINY,
    parameters={
        "flux2_dev": 32_223_281_152,
        "flux2_klein_4b": 3_875_544_576,
        "flux2_klein_9b": 9_078_581_248,
    },
    configuration=_configuration,
    cases=12,
    quick=3,
    pack=_pack,
    theirs=_theirs,
    unread=_unread,
    adapted_by={
        "flux2": (Flux2Pipeline, {}),
        "klein": (Flux2KleinPipeline, {"guidance_embeds": False}),
    },
    page=case.Page(
        model="FLUX.2-klein-base-4B",
        keys=("model.num_layers=2", "model.num_single_layers=2"),
        inputs=("klein",),
        edits=True,
    ),
    counted=[("flux2_klein_4b", {}), ("flux2_dev", {})],
    arguments=_arguments,
    refused=[
        ({"rope_axes": (4, 4, 2, 2)}, "must add up to 128, .*hidden_size=6144 .* sum is 12"),
        ({"rope_axes": (3, 5, 4, 2)}, "must be even"),
        ({"reference_latents": -1}, "must not be negative"),
        ({"mlp_ratio": 2.999}, "MLP width .* must be a multiple of num_attention_heads=48"),
        ({"num_single_layers": 0}, "num_single_layers=0 must be at least 1"),
    ],
    adapted=(
        *("to_qkv_mlp_proj", "linear_in", "linear_out", "norm_out.linear"),
        "single_transformer_blocks.1.attn.to_out",
        "double_stream_modulation_img.linear",
    ),
)
random_flux2 = CASE.random

NETWORK = {"joint_attention_dim": 48, "patch_size": 1}
"""Of config.json; the tiny text encoders make so many numbers."""
KINDS = {"dev": "Mistral3ForConditionalGeneration", "klein": "Qwen3ForCausalLM"}


def pipeline(folder: Path, kind: str, *, is_distilled: bool = False) -> Any:
    """The pipeline of `dev` or `klein`, saved in `folder`."""
    import diffusers
    import transformers

    from tests.families import flux2_parts

    dev = kind == "dev"
    make = flux2_parts.flux2 if dev else flux2_parts.flux2_klein
    kinds = {"tokenizer": transformers.AutoTokenizer, "vae": diffusers.AutoencoderKLFlux2}
    kinds |= {"text_encoder": getattr(transformers, KINDS[kind])}
    made: dict[str, Any] = {
        **case.parts_of(make(folder / "parts"), **kinds),
        "transformer": random_flux2(**NETWORK, guidance_embeds=dev),
        # As published.
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(
            shift=3.0, use_dynamic_shifting=True
        ),
    }
    if dev:
        return case.saved(Flux2Pipeline(**made), folder)
    return case.saved(diffusers.Flux2KleinPipeline(**made, is_distilled=is_distilled), folder)


def made_by(pipe: Any, noise_CFHW: Tensor, texts: case.Texts, **call: Any) -> Tensor:
    """Latent [C, 1, H, W] of a pipeline from `noise_CFHW` and texts as our encoder has them."""
    dev, sides = (
        isinstance(pipe, Flux2Pipeline),
        case.sides_of(noise_CFHW, pipe.vae_scale_factor * 2),
    )
    names = ("prompt",) if dev else ("prompt", "negative_prompt")
    call |= {f"{name}_embeds": texts[name]["text"][None].float() for name in names}
    found = case.latents_made(pipe, noise_CFHW.transpose(0, 1), **sides, **call)
    if dev:
        return found[0].T.unflatten(1, noise_CFHW.shape[2:])[:, None]
    # klein's pipeline hands on what its VAE reads.
    std = (pipe.vae.bn.running_var + pipe.vae.config.batch_norm_eps).sqrt()
    cells = pipe._patchify_latents(found)[0] - pipe.vae.bn.running_mean[:, None, None]
    return (cells / std[:, None, None])[:, None]


def _encoded(pipe: Any, texts: case.Texts) -> list[tuple[Tensor, Tensor]]:
    rows, _ = pipe.encode_prompt(case.PROMPT)
    null, _ = pipe.encode_prompt("")
    return [(texts["prompt"]["text"], rows[0]), (texts["negative_prompt"]["text"], null[0])]


def _generation(kind: str) -> case.Generation:
    dev = kind == "dev"
    if dev:
        told = [({"guidance_scale": g}, {"distilled_guidance": g}) for g in (4.0, 1.0)]
    else:
        told = [({"guidance_scale": g}, {"guidance": g}) for g in (4.0, 1.0)]
    return case.Generation(
        pipeline=lambda folder: pipeline(folder, kind),
        made_by=made_by,
        size=(1, 5, 7),
        channels=16,
        objective={
            **{"name": "flow", "guidance": 1.0 if dev else None, "sampling_levels": "empirical"},
            "time_shift_type": "exponential",
        },
        encoded=_encoded,
        calls=told,
        negative="",  # klein's pipeline has no other
        slow=not dev,
    )


GENERATIONS = {"flux2_dev": _generation("dev"), "flux2_klein": _generation("klein")}
