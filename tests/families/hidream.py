"""HiDream-I1 in Diffusers: tiny random networks, and what they make of a noise."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.transformers.transformer_hidream_image import HiDreamImageTransformer2DModel
from diffusers.pipelines.hidream_image.pipeline_hidream_image import HiDreamImagePipeline
from diffusers.schedulers import scheduling_flow_match_lcm
from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    CLIPTextModelWithProjection,
    LlamaForCausalLM,
    T5EncoderModel,
)

from dit.batch import PackedBatch
from dit.config import ModelConfig
from dit.models.hidream.diffusers import layer_states
from dit.models.positions import unpatchify
from dit.models.registry import family_named
from dit.sampling.conditions.tokens import step_noise
from tests.families import case, pipeline_parts
from tests.packs import random_pack

TINY = {
    "patch_size": 2,
    "in_channels": 4,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 12,
    "num_attention_heads": 4,
    "caption_channels": [16, 20],
    "text_emb_dim": 10,
    "axes_dims_rope": (4, 4, 4),
    "max_resolution": (8, 8),
    "llama_layers": [0, 1, 2, 2, 2],
}
"""Keys of a tiny config.json."""


def _configuration(number: int) -> dict[str, Any]:
    draw, axes = random.Random(number), case.AXES[(number + 1) % len(case.AXES)]
    double, single = draw.choice([1, 2]), draw.choice([1, 2, 3])
    states = draw.randint(1, double + single)
    if number == UNSEEN:
        states = double + single
    return {
        "in_channels": draw.choice([1, 3, 4]),
        "num_layers": double,
        "num_single_layers": single,
        "num_attention_heads": draw.choice([2, 3, 4, 5]),
        "attention_head_dim": sum(axes),
        "axes_dims_rope": axes,
        "caption_channels": [draw.choice([8, 20]), draw.choice([12, 24])],
        "num_routed_experts": (experts := draw.choice([2, 4])),
        "num_activated_experts": draw.choice([1, 2, experts]),
        "max_resolution": draw.choice([(12, 8), (10, 10)]),
        "llama_layers": [min(number, states - 1) for number in range(double + single)],
    }


UNSEEN = 1
"""Number of the configuration whose encoder has more layers than the network."""


def _kept(number: int) -> dict[str, Any]:
    states = max(_configuration(number)["llama_layers"]) + 1
    states += 2 if number == UNSEEN else 0
    return {"patch_temporal": 1, "text_length": 8, "llama_states": states}


def _pack(model: ModelConfig, number: int) -> PackedBatch:
    """Squares, and pictures that are filled up with zeros; texts of several lengths."""
    draw = random.Random(number)
    grids = [(1, draw.randint(1, 4), draw.randint(1, 4)) for _ in range(2)]
    texts = ([7, 1, 12, 3, 20], [1, 1, 5, 2, 1])
    return random_pack([(1, 3, 5), (1, 4, 4), (1, 5, 2), *grids], texts[number % 2], model=model)


def _inputs(batch: PackedBatch, index: int, model: Any) -> dict[str, Tensor]:
    return {
        "encoder_hidden_states_t5": case.text_of(batch, index),
        "encoder_hidden_states_llama3": layer_states(
            case.text_of(batch, index, "text_2")[0], model
        ),
        "pooled_embeds": batch.vectors["pooled_text"][index : index + 1],
    }


def _theirs(network: nn.Module, batch: PackedBatch, index: int, level: float, model: Any) -> Tensor:
    """As in training, where experts have gradients and the output is no picture: [1, C, T, 4]."""
    latent, told = case.latent_of(batch, index, model)[None, :, 0], torch.tensor([level])
    inputs: Any = _inputs(batch, index, model)
    (made,) = network.train()(latent, timesteps=told, **inputs, return_dict=False)
    return -made[0].transpose(0, 1).flatten(1)[: batch.latent_tokens[index]]


def _arguments(model: Any) -> dict[str, Any]:
    frames, rows, columns = case.COUNTED
    sides = frames * rows * model.patch_spatial, columns * model.patch_spatial
    length, states = model.text_length, model.llama_states
    return {
        "hidden_states": torch.zeros(1, model.in_channels, *sides),
        "encoder_hidden_states_t5": torch.zeros(1, length, model.crossattn_emb_size),
        "encoder_hidden_states_llama3": torch.zeros(states, 1, length, model.llama_size),
        "pooled_embeds": torch.zeros(1, model.pooled_size),
    }


def _levels(name: str) -> case.Levels:
    def levels(num_steps: int, _: int) -> Tensor:
        made = scheduler(name)
        made.set_timesteps(num_steps)
        return made.sigmas

    return levels


CASE = case.Case(
    network=HiDreamImageTransformer2DModel,
    tiny=TINY,
    parameters=dict.fromkeys(("hidream_i1_full", "hidream_i1_dev"), 17_105_733_184),
    configuration=_configuration,
    cases=6,
    kept=_kept,
    pack=_pack,
    theirs=_theirs,
    exportable={"mlp_ratio": 4.0},
    # All experts of all tokens are computed; Diffusers leaves out those that weigh nothing.
    adapted_by={"hidream": (HiDreamImagePipeline, {"max_resolution": (16, 16)})},
    published_levels={"hidream_i1_full": _levels("full"), "hidream_i1_dev": _levels("dev")},
    page=case.Page(model="HiDream-I1", keys=("model.num_layers=2", "model.num_single_layers=3")),
    counted=[("hidream_i1_full", {"num_activated_experts": 4, "max_resolution": (16, 16)})],
    arguments=_arguments,
    level="timesteps",
    text_rows=lambda arguments: 2 * arguments["encoder_hidden_states_t5"].shape[1],
    attended=64,
    # Also linears of experts, of the text, and outside of the layers.
    adapted=("to_q_t", "experts.1.w2", "shared_experts.w1", "x_embedder.proj"),
    comfyui=True,
    refused=[
        ({"tensor_model_parallel_size": 3}, "num_attention_heads=20 .* divisor of 20"),
        ({"rope_axes": (4, 4, 2)}, "must add up to 128, .* sum is 10"),
        ({"num_activated_experts": 5}, "must not be more than num_routed_experts=4"),
        ({"patch_temporal": 2}, "HiDream-I1 is a network of images"),
        ({"text_pad_to": 8}, "text_pad_to=8"),
    ],
)


def random_hidream(**changes: Any) -> Any:
    """A published network: its config.json does not tell how long texts are."""
    return replace(CASE, kept=lambda _: {}).random(**changes)


def scheduler(name: str) -> Any:
    """Of HiDream-I1 Full and of Dev."""
    if name == "dev":
        return scheduling_flow_match_lcm.FlowMatchLCMScheduler(shift=6.0)
    flow: Any = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
    return UniPCMultistepScheduler(**flow, flow_shift=3.0)


def pipeline(folder: Path, *, name: str = "full") -> HiDreamImagePipeline:
    """The pipeline with random weights, saved in `folder`/pipeline; pictures of about 8 x 8."""
    clip = CLIPTextModelWithProjection
    kinds = {"text_encoder": clip, "text_encoder_2": clip, "text_encoder_3": T5EncoderModel}
    kinds |= {"text_encoder_4": LlamaForCausalLM}
    words = {f"tokenizer{end}": AutoTokenizer for end in ("", "_2", "_3", "_4")}
    parts = case.parts_of(
        pipeline_parts.hidream(folder / "parts"), vae=AutoencoderKL, **kinds, **words
    )
    opened = HiDreamImagePipeline(transformer=random_hidream(), scheduler=scheduler(name), **parts)
    opened.default_sample_size = 8
    return case.saved(opened, folder)


def made_by(pipe: Any, noise_CFHW: Tensor, texts: case.Texts, **call: Any) -> Tensor:
    """Latent [C, 1, H, W] of the pipeline from `noise_CFHW` and texts as our encoder has them.

    Steps of LCM get the noise that ours has of seed 0.
    """
    model: Any = family_named("hidream").config(**MODEL)
    for name, text in texts.items():
        states = layer_states(text["text_2"].float(), model)
        call |= {f"{name}_embeds_t5": text["text"][None].float(), f"{name}_embeds_llama3": states}
        pooled = f"{name.removesuffix('prompt')}pooled_prompt_embeds"
        call[pooled] = text["pooled_text"][None].float()
    grid = (1, noise_CFHW.shape[2] // 2, noise_CFHW.shape[3] // 2)
    batch, steps = random_pack([grid], [1], model=model), iter(range(9))

    def drawn(*_: Any, **__: Any) -> Tensor:
        return unpatchify(step_noise(batch, [0], next(steps)), grid, 1, 2)[None, :, 0]

    with patch.object(scheduling_flow_match_lcm, "randn_tensor", drawn):
        sides = case.sides_of(noise_CFHW, pipe.vae_scale_factor)
        return case.latents_made(pipe, noise_CFHW[:, 0][None], **sides, **call)[0][:, None]


MODEL: Any = {"name": "custom", "in_channels": 4, "llama_size": 20, "llama_states": 3}
"""Of `TINY`, what packs and texts follow from."""


def _encoded(pipe: Any, texts: case.Texts) -> list[tuple[Tensor, Tensor]]:
    t5, of_t5, llama, of_llama, pooled, of_pooled = pipe.encode_prompt(
        case.PROMPT, negative_prompt=case.NEGATIVE
    )
    found = []
    rows = ((t5, llama, pooled), (of_t5, of_llama, of_pooled))
    for text, (first, states, vector) in zip(texts.values(), rows, strict=True):
        found += [(text["text"], first[0]), (text["pooled_text"], vector[0])]
        found.append((text["text_2"], states[:, 0].transpose(0, 1).flatten(1)))
    return found


def _generation(
    name: str, sampler: str, shift: float, scales: tuple[float, ...]
) -> case.Generation:
    return case.Generation(
        pipeline=partial(pipeline, name=name),
        made_by=made_by,
        size=(1, 6, 10),
        objective={"name": "flow", "sampling_levels": sampler, "flow_shift": shift},
        encoded=_encoded,
        calls=[({"guidance_scale": scale}, {"guidance": scale}) for scale in scales],
        options={"sampler": sampler},
        slow=name == "dev",
    )


GENERATIONS = {
    "hidream": _generation("full", "unipc", 3.0, (5.0, 1.0, 2.5)),
    "hidream dev": _generation("dev", "lcm", 6.0, (1.0, 2.5)),
}
