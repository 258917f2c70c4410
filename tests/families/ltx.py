"""LTX-Video in Diffusers: tiny random networks, folders of pipelines, and what they make."""

# T tokens of a latent, C channels of a token

from __future__ import annotations

import random
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import diffusers
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    LTXConditionPipeline,
    LTXVideoTransformer3DModel,
)
from diffusers.pipelines.ltx import pipeline_ltx_condition, pipeline_ltx_image2video
from torch import Tensor, nn

from dit.batch import Grid, PackedBatch
from dit.config import ModelConfig
from dit.models.ltx.family import TRAINED_SHIFT
from tests.families import case, pipeline_parts

TINY = {
    "num_attention_heads": 4,
    "attention_head_dim": 10,
    "cross_attention_dim": 40,
    "in_channels": 4,
    "out_channels": 4,
    "caption_channels": 16,
    "num_layers": 2,
}
"""Of config.json: two pairs in front that are not turned."""
RATES = (25.0, 24.0, 30.0, 12.5, 16.0)
"""Frames per second of the samples of a pack."""


def _kept(number: int) -> dict[str, Any]:
    """Both rules of positions, with and without reference videos."""
    positions = ("causal", "even")[number % 2]
    return {"frame_positions": positions, "reference_latents": (0, 1, 2)[number // 2 % 3]}


def _configuration(number: int) -> dict[str, Any]:
    """Of config.json: heads among which the turned pairs do not divide, all rests of D by 6."""
    draw = random.Random(number)
    shapes = [(4, 10), (5, 4), (3, 6), (2, 16), (7, 2), (1, 8), (5, 10), (3, 4), (4, 8)]
    heads, width = shapes[number % len(shapes)]
    frames, side = draw.choice([(1, 1), (1, 1), (1, 2), (2, 1)])
    features = draw.choice([1, 3, 4]) * frames * side**2
    return {
        "num_attention_heads": heads,
        "attention_head_dim": width,
        "cross_attention_dim": heads * width,
        "in_channels": features,
        "out_channels": features,
        "patch_size": side,
        "patch_size_t": frames,
        "caption_channels": draw.choice([8, 20]),
        "num_layers": draw.choice([1, 2, 3]),
    }


def _grid(draw: random.Random) -> Grid:
    return (draw.randint(1, 4), draw.randint(1, 4), draw.randint(1, 5))


def _pack(model: ModelConfig, number: int) -> PackedBatch:
    """Pictures and videos, given first frames, references in every second sample."""
    return case.mixed_pack(model, number, _grid, fps=RATES)


def coordinates(grid: Grid, model: Any, fps: float) -> Tensor:
    """`video_coords` [3, T] of a latent, by the functions of `LTXConditionPipeline`."""
    side, step = model.patch_spatial, model.patch_temporal
    frames, height, width = grid[0] * step, grid[1] * side, grid[2] * side
    axes = (torch.arange(0, n, p) for n, p in ((frames, step), (height, side), (width, side)))
    ids = torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1)[None]
    scaled = LTXConditionPipeline._scale_video_ids(ids, scale_factor=32, scale_factor_t=8).float()
    scaled[:, 0] = scaled[:, 0] * (1.0 / fps)
    return scaled[0]


def _theirs(network: nn.Module, batch: PackedBatch, index: int, level: float, model: Any) -> Tensor:
    """With levels of tokens, and the positions that its pipelines compute."""
    start, tokens = batch.starts[index], batch.num_tokens[index]
    own, fps = batch.latent_tokens[index], float(batch.fps_N[index])
    told_T = torch.full((tokens,), level)
    told_T[: batch.clean_tokens[index]] = 0
    told_T[own:] = 0
    references = batch.references[index]
    grids = [batch.grids[index], *references]
    if model.frame_positions == "causal":
        places: Any = torch.cat([coordinates(grid, model, fps) for grid in grids], dim=1)[None]
        where: dict[str, Any] = {"video_coords": places}
    elif references:
        where = {
            "video_coords": torch.cat([_even(grid, model, fps) for grid in grids], dim=1)[None]
        }
    else:
        names = ("num_frames", "height", "width")
        where = dict(zip(names, grids[0], strict=True))
        where["rope_interpolation_scale"] = (8 / fps, 32, 32)
    made = network(
        batch.latent_TC[None, start : start + tokens],
        case.text_of(batch, index),
        told_T[None],
        torch.ones(1, case.text_of(batch, index).shape[1]),
        **where,
    )
    return made.sample[0, :own]


def _even(grid: Grid, model: Any, fps: float) -> Tensor:
    """The positions of `LTXPipeline` as `video_coords` [3, T], which the network divides again."""
    axes = [torch.arange(n, dtype=torch.float32) for n in grid]
    frames, rows, columns = torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1)
    side = 32 * model.patch_spatial
    return torch.stack([frames * (8 / fps) * model.patch_temporal, rows * side, columns * side])


def _arguments(model: Any) -> dict[str, Any]:
    frames, rows, columns = case.COUNTED
    return {
        "hidden_states": torch.zeros(1, frames * rows * columns, model.patch_features),
        "encoder_hidden_states": torch.zeros(1, 12, model.crossattn_emb_size),
        "encoder_attention_mask": torch.ones(1, 12),
        "num_frames": frames,
        "height": rows,
        "width": columns,
    }


CASE = case.Case(
    network=LTXVideoTransformer3DModel,
    tiny=TINY,
    parameters={
        "ltxv_2b_0.9": 1_923_385_472,
        "ltxv_2b": 1_923_385_472,
        "ltxv_13b": 13_042_569_344,
    },
    configuration=_configuration,
    cases=12,
    kept=_kept,
    pack=_pack,
    theirs=_theirs,
    counted=[("ltxv_2b_0.9", {}), ("ltxv_2b", {})],
    arguments=_arguments,
    refused=[
        ({"num_attention_heads": 2048}, "need heads of an even width"),
        ({"hidden_size": 4, "num_attention_heads": 1}, "a hidden_size of at least 6"),
        ({"text_pad_to": 128}, "must be null: LTX-Video does not attend"),
        ({"reference_latents": -1}, "reference_latents=-1 must not be negative"),
    ],
    grids=case.VIDEOS,
    second_attention="attn2",
    comfyui=True,
)

EVEN, CAUSAL = "LTXPipeline", "LTXConditionPipeline"
FIRST_FRAME = "LTXImageToVideoPipeline"
SCHEDULERS: dict[str, dict[str, Any]] = {
    # As of 0.9.0.
    EVEN: {
        "use_dynamic_shifting": True,
        "base_shift": 0.95,
        "max_shift": 2.05,
        "base_image_seq_len": 1024,
        "max_image_seq_len": 4096,
        "shift_terminal": 0.1,
    },
    CAUSAL: {},
}
SCHEDULERS[FIRST_FRAME] = SCHEDULERS[EVEN]


def pipeline(folder: Path, kind: str) -> Any:
    """A pipeline of tiny random parts, saved in `folder`/pipeline."""
    from transformers import AutoTokenizer, T5EncoderModel

    kinds: dict[str, Any] = {"tokenizer": AutoTokenizer, "text_encoder": T5EncoderModel}
    parts = case.parts_of(
        pipeline_parts.ltx(folder / "parts"), vae=diffusers.AutoencoderKLLTXVideo, **kinds
    )
    opened = getattr(diffusers, kind)(
        transformer=random_ltx(in_channels=8, out_channels=8),
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULERS[kind]),
        **parts,
    )
    return case.saved(opened, folder)


def random_ltx(**changes: Any) -> Any:
    """A published network: its config.json does not tell the positions."""
    return replace(CASE, kept=lambda _: {}).random(**changes)


def noise_given(noise_CFHW: Tensor) -> AbstractContextManager[object]:
    """`noise_CFHW` in the place of what pipelines draw."""
    stack = ExitStack()
    for module in (pipeline_ltx_condition, pipeline_ltx_image2video):
        drawn = patch.object(module, "randn_tensor", lambda *_, **__: noise_CFHW[None].clone())
        stack.enter_context(drawn)
    return stack


def made_by(pipe: Any, noise_CFHW: Tensor, **call: Any) -> Tensor:
    """Latents [C, F, H, W] of a pipeline from `noise_CFHW`, in a few steps."""
    frames, rows, columns = noise_CFHW.shape[1:]
    is_packed = not isinstance(pipe, LTXConditionPipeline)
    if is_packed and "image" not in call:
        call["latents"] = pipe._pack_latents(noise_CFHW[None])
    with noise_given(noise_CFHW):
        (found,) = pipe(
            height=32 * rows,
            width=32 * columns,
            num_frames=8 * frames - 7,
            frame_rate=25,
            num_inference_steps=case.STEPS,
            output_type="latent",
            return_dict=False,
            **call,
        )
    return (pipe._unpack_latents(found, frames, rows, columns) if is_packed else found)[0]


def texts_for(texts: case.Texts) -> dict[str, Tensor]:
    """Our rows of prompt and negative prompt as a pipeline takes them, padded and with a mask.

    In float32, in which it then computes.
    """
    rows = {name: found["text"].float() for name, found in texts.items()}
    most, given = max(map(len, rows.values())), {}
    for name, text_LE in rows.items():
        given[f"{name}_embeds"] = nn.functional.pad(text_LE, (0, 0, 0, most - len(text_LE)))[None]
        given[f"{name}_attention_mask"] = (torch.arange(most) < len(text_LE))[None]
    return given


def encoded(pipe: Any, texts: case.Texts) -> list[tuple[Tensor, Tensor]]:
    """Our rows of both prompts, and those of the pipeline."""
    states, mask, negative, negative_mask = pipe.encode_prompt(case.PROMPT, case.NEGATIVE)
    theirs = states[0, mask[0].bool()], negative[0, negative_mask[0].bool()]
    own = (texts[name]["text"] for name in ("prompt", "negative_prompt"))
    return [*zip(own, theirs, strict=True)]


def _generation(kind: str, objective: dict[str, Any]) -> case.Generation:
    return case.Generation(
        pipeline=lambda folder: pipeline(folder, kind),
        made_by=lambda pipe, noise, texts, **call: made_by(pipe, noise, **texts_for(texts), **call),
        encoded=encoded,
        size=case.VIDEO,
        channels=8,
        objective={"name": "flow", **TRAINED_SHIFT, **objective},
        calls=[
            ({"guidance_scale": 1.0}, {"guidance": 1.0}),
            ({"guidance_scale": 3.0}, {"guidance": 3.0}),
            (
                {"guidance_scale": 3.0, "guidance_rescale": 0.7},
                {"guidance": 3.0, "guidance_rescale": 0.7},
            ),
        ],
        options={"fps": 25.0},
        slow=False,
    )


GENERATIONS = {
    "ltx even": _generation(EVEN, {"sampling_levels": "even", "shift_terminal": 0.1}),
    "ltx causal": _generation(CAUSAL, {"sampling_levels": "linear_quadratic"}),
}
