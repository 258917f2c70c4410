"""Folders of Wan's pipelines with tiny random parts, and what they make of a noise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
)
from torch import Tensor
from transformers import AutoTokenizer, CLIPImageProcessor, CLIPVisionModel, UMT5EncoderModel

from tests import tiny_pipelines
from tests.wan_networks import random_wan

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
    parts = (tiny_pipelines.wan22 if kind == "5b" else tiny_pipelines.wan)(folder / "parts")
    made: dict[str, Any] = {
        "tokenizer": AutoTokenizer.from_pretrained(parts / "tokenizer"),
        # In the precision in which shards hold its rows.
        "text_encoder": UMT5EncoderModel.from_pretrained(
            parts / "text_encoder", torch_dtype=torch.bfloat16
        ),
        "vae": AutoencoderKLWan.from_pretrained(parts / "vae"),
        "transformer": random_wan(**NETWORKS[kind]),
        "scheduler": SCHEDULERS[scheduler](),
    }
    if "image_dim" in NETWORKS[kind]:
        encoder = CLIPVisionModel.from_pretrained(parts / "image_encoder")
        processor = CLIPImageProcessor.from_pretrained(parts / "image_processor")
        made |= {"image_encoder": encoder, "image_processor": processor}
    opened = (WanPipeline if kind == "t2v" else WanImageToVideoPipeline)(**made, **more)
    opened.set_progress_bar_config(disable=True)
    opened.save_pretrained(folder / "pipeline")
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
    frames, rows, columns = noise_CFHW.shape[1:]
    stride = pipe.vae_scale_factor_spatial
    (found,) = pipe(
        height=rows * stride,
        width=columns * stride,
        num_frames=4 * frames - 3,
        num_inference_steps=4,
        latents=noise_CFHW[None],
        output_type="latent",
        return_dict=False,
        **call,
    )
    return found[0]
