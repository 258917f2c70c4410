"""Tiny networks of Chroma in Diffusers, and a folder of its pipeline with random parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    ChromaPipeline,
    ChromaTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
)
from transformers import AutoTokenizer, T5EncoderModel

from tests import tiny_pipelines
from tests.wan_networks import fill_random

TINY = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 12,
    "num_attention_heads": 4,
    "joint_attention_dim": 16,
    "axes_dims_rope": (4, 4, 4),
    "approximator_num_channels": 8,
    "approximator_hidden_dim": 20,
    "approximator_layers": 2,
}
"""Of config.json."""


def random_chroma(*, seed: int = 0, **changes: Any) -> ChromaTransformer2DModel:
    """Diffusers' network with random weights everywhere."""
    network = ChromaTransformer2DModel(**(TINY | changes)).eval()
    fill_random(network, seed=seed)
    return network


def pipeline(folder: Path) -> ChromaPipeline:
    """The pipeline with random weights, saved in `folder`/pipeline; its parts are FLUX's."""
    parts: Any = tiny_pipelines.flux(folder / "parts")
    opened = ChromaPipeline(
        transformer=random_chroma(),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=AutoencoderKL.from_pretrained(parts / "vae"),
        # In the precision in which shards hold what it makes.
        text_encoder=T5EncoderModel.from_pretrained(
            parts / "text_encoder_2", torch_dtype=torch.bfloat16
        ),
        tokenizer=AutoTokenizer.from_pretrained(parts / "tokenizer_2"),
    )
    opened.set_progress_bar_config(disable=True)
    opened.save_pretrained(folder / "pipeline")
    return opened
