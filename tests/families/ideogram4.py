"""Ideogram 4 in Diffusers: tiny random networks, and what they make of a noise."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2
from diffusers.models.transformers.transformer_ideogram4 import Ideogram4Transformer2DModel
from diffusers.pipelines.ideogram4 import pipeline_ideogram4
from diffusers.pipelines.ideogram4.pipeline_ideogram4 import Ideogram4Pipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
    FlowMatchEulerDiscreteScheduler,
)
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AutoTokenizer, Qwen3VLModel

from dit.batch import PackedBatch
from dit.config import ModelConfig
from dit.models.ideogram4.diffusers import network_inputs
from dit.models.positions import FarPicturePositions
from tests.families import case
from tests.families.flux2_parts import MISTRAL_CHAT, chat_tokenizer, flux2_vae, qwen3_vl
from tests.families.pipeline_parts import randomized, save

TINY = {
    "in_channels": 16,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "adaln_dim": 12,
    "llm_features_dim": 20,
    "mrope_section": (4, 2, 2),
}
"""Keys of a tiny config.json."""


def _configuration(number: int) -> dict[str, Any]:
    """Of config.json; heads have frequencies behind those of rows and columns, and seldom none."""
    draw = random.Random(number)
    head = (14, 16, 22, 10)[number % 4]
    most = head // 6  # each third frequency, of half as many as a head is wide
    return {
        "in_channels": draw.choice([4, 12]),
        "num_layers": draw.choice([1, 2, 3]),
        "attention_head_dim": head,
        "num_attention_heads": draw.choice([1, 2, 3, 5]),
        "intermediate_size": draw.choice([17, 24, 40]),
        "adaln_dim": draw.choice([6, 12]),
        "llm_features_dim": draw.choice([7, 20]),
        "mrope_section": (draw.choice([1, 4]), draw.randint(1, most), draw.randint(1, most)),
    }


def _pack(model: ModelConfig, number: int) -> PackedBatch:
    """Five samples of unequal sides, in every second pack one without a caption."""
    draw, texts = random.Random(number), ([7, 1, 12, 0, 20], [1, 1, 5, 2, 1])
    grids = [case.picture(draw) for _ in range(5)]
    return case.random_pack(grids, texts[number % 2], model=model)


def _theirs(network: nn.Module, batch: PackedBatch, index: int, level: float, model: Any) -> Tensor:
    """As the pipeline turns it round."""
    start, grid = batch.starts[index], batch.grids[index]
    rows_TC = batch.latent_TC[start : start + grid[1] * grid[2]]
    (text_LE,), places = case.text_of(batch, index), FarPicturePositions()((grid,), fps=0.0)
    given = network_inputs(rows_TC, places, text_LE, level)
    (made,) = network(**given, return_dict=False)
    return -made[0, len(text_LE) :]


def _arguments(model: Any) -> dict[str, Any]:
    frames, rows, columns = case.COUNTED
    rows_TC = torch.zeros(frames * rows * columns, model.patch_features)
    text_LE = torch.zeros(case.COUNTED_TEXT, model.crossattn_emb_size)
    given = network_inputs(rows_TC, torch.zeros(len(rows_TC), 3), text_LE, 500.0)
    del given["timestep"]
    return given


def _repeated(model: Any) -> int:
    """Of zeros: pictures go through the linear of texts, texts through that of pictures.

    The head computes texts, too, and angles are a product of matrices.
    """
    tokens, text = math.prod(case.COUNTED), case.COUNTED_TEXT
    head = model.hidden_size // model.num_attention_heads
    rows = tokens * model.crossattn_emb_size + 2 * text * model.patch_features
    return 2 * rows * model.hidden_size + 3 * (tokens + text) * head


def _levels(num_steps: int, tokens: int) -> Tensor:
    """The mean goes by pixels, 16 x 16 of which are a token."""
    mu = pipeline_ideogram4._resolution_aware_mu(16, 16 * tokens, 0.0)
    made = pipeline_ideogram4._logit_normal_sigmas(num_steps, mu, 1.5).tolist()
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(sigmas=made)
    return scheduler.sigmas


CASE = case.Case(
    network=Ideogram4Transformer2DModel,
    tiny=TINY,
    parameters={"ideogram4": 9_279_288_448},
    configuration=_configuration,
    cases=12,
    quick=3,
    pack=_pack,
    theirs=_theirs,
    adapted_by={"ideogram4": (Ideogram4Pipeline, {})},
    unread_comfyui=True,
    published_levels={"ideogram4": _levels},
    page=case.Page(model="Ideogram-4"),
    counted=[("ideogram4", {}), ("ideogram4", {"adaln_width": 20, "patch_spatial": 1})],
    arguments=_arguments,
    text_rows=lambda _: case.COUNTED_TEXT,
    repeated=_repeated,
    refused=[
        ({"tensor_model_parallel_size": 4}, "num_attention_heads=18 .* divisor of 18"),
        ({"mrope_section": (24, 20, 44)}, "needs 132 frequencies; .* width 256 have 128"),
        ({"num_attention_heads": 512}, "heads of an even width"),
        ({"patch_temporal": 2}, "Ideogram 4 is a network of images"),
        ({"text_pad_to": 8}, "must be null: Ideogram 4 does not attend"),
    ],
    adapted=(
        *("feed_forward.w1", "feed_forward.w2", "feed_forward.w3", "input_proj", "adaln_proj"),
        *("adaln_modulation", "llm_cond_proj", "t_embedding.mlp_in", "final_layer.linear"),
    ),
)
random_ideogram4 = CASE.random


def encoders(root: Path) -> Path:
    """Encoders of Ideogram 4: FLUX.2's VAE, and the network of Qwen3-VL with 36 layers."""
    parts = {"text_encoder": randomized(Qwen3VLModel(qwen3_vl(layers=36))), "vae": flux2_vae()}
    return save(root, parts | {"tokenizer": chat_tokenizer(MISTRAL_CHAT, "right")})


def pipeline(folder: Path) -> Ideogram4Pipeline:
    """The pipeline with random weights, saved in `folder`/pipeline."""
    kinds = {"text_encoder": Qwen3VLModel, "tokenizer": AutoTokenizer, "vae": AutoencoderKLFlux2}
    networks = [random_ideogram4(seed=seed, llm_features_dim=13 * 16) for seed in (0, 1)]
    opened = Ideogram4Pipeline(
        transformer=networks[0],
        unconditional_transformer=networks[1],
        scheduler=FlowMatchEulerDiscreteScheduler(),
        **case.parts_of(encoders(folder / "parts"), **kinds),
    )
    return case.saved(opened, folder)


def made_by(pipe: Any, noise_CFHW: Tensor, texts: case.Texts, **call: Any) -> Tensor:
    """Latent [C, 1, H, W] of the pipeline from `noise_CFHW` and the text as our encoder has it."""
    text_LE = texts["prompt"]["text"].float()
    rows, columns = noise_CFHW.shape[2:]
    ids = pipe._prepare_ids([len(text_LE)], rows, columns, len(text_LE), "cpu")
    encoded = (pad(text_LE, (0, 0, 0, rows * columns))[None], *ids)
    call |= case.sides_of(noise_CFHW, 2 * pipe.vae_scale_factor)
    told: Any = {"max_sequence_length": len(text_LE), "guidance_schedule": None, **call}
    # It counts pixels, of which a token of the published VAE has 16 x 16, and one of this 4 x 4.
    told["mu"] = math.log(16 / 4)
    with patch.object(pipe, "encode_prompt", lambda **_: encoded):
        noise_1TC = noise_CFHW.flatten(1).T[None]
        made_1TC = case.latents_made(pipe, noise_1TC, prompt=case.PROMPT, **told)
    return made_1TC[0].T.view(noise_CFHW.shape)


def _encoded(pipe: Any, texts: case.Texts) -> list[tuple[Tensor, Tensor]]:
    text_LE = texts["prompt"]["text"]
    told: Any = {"max_sequence_length": len(text_LE), "device": "cpu"}
    rows_1LE, *_ = pipe.encode_prompt(case.PROMPT, grid_h=0, grid_w=0, **told)
    return [(text_LE, rows_1LE[0])]


GENERATIONS = {
    "ideogram4": case.Generation(
        pipeline=pipeline,
        made_by=made_by,
        size=(1, 5, 7),
        channels=16,
        objective={
            **{"name": "flow", "sampling_levels": "quantiles", "logit_std": 1.5},
            **{"shift_base_tokens": 1024, "text_dropout": 0.0},
        },
        encoded=_encoded,
        calls=[
            *(({"guidance_scale": scale}, {"guidance": scale}) for scale in (7.0, 1.0, 3.0)),
            (
                {"guidance_schedule": (7.0, 7.0, 7.0, 3.0)},
                {"guidance": 7.0, "guidance_steps": 0.75, "guidance_after": 3.0},
            ),
        ],
        negative="",
        away="unconditional_transformer",
        slow=False,
    )
}
