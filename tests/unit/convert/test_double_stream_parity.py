"""What Diffusers' networks with joint attention compute, ours compute, and the gradients."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    ChromaTransformer2DModel,
    FluxPipeline,
    HunyuanImageTransformer2DModel,
    HunyuanVideo15Transformer3DModel,
    HunyuanVideoTransformer3DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
)
from diffusers.pipelines.qwenimage.pipeline_qwenimage import QwenImagePipeline
from torch import Tensor, nn
from torch.func import functional_call

from dit.batch import Grid, PackedBatch
from dit.config import Precision
from dit.convert.export import ExportOptions, export_weights
from dit.convert.import_ import import_weights
from dit.models.diffusers_names import Pair, their_tensors
from dit.models.hunyuan_video.diffusers import without_first_frame
from dit.models.patches import unpatchify
from dit.models.registry import family_of, pairs
from dit.train.checkpoint.state_dict import load_weights
from tests.packs import random_pack, single
from tests.quick import few_quick
from tests.toy_networks import level_rows
from tests.wan_networks import fill_random

LEVELS = (0.8125, 0.0, 0.437, 0.999, 0.03125)
"""t of flow matching, one for each sample."""
SCALE = 1000
"""What the level is told as, over t."""
GUIDANCE = 3.5
TEXTS = ([7, 1, 12, 3, 20], [1, 1, 5, 2, 1])
AXES = [(4, 4, 4), (2, 6, 6), (2, 2, 4), (8, 4, 2), (16, 6, 10)]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A family's network in Diffusers."""

    network: Any  # its class
    configuration: Callable[[int], dict[str, Any]]  # of config.json, of a number
    grids: Callable[[random.Random], Grid]
    theirs: Callable[[nn.Module, PackedBatch, int, Any], Tensor]  # rows of its output
    without_gradient: tuple[str, ...]
    """Patterns of tensors without one: nothing reads the text of the last block."""
    zero: tuple[str, ...] = ()
    """Of those whose gradient is zero by mathematics."""


def _shape(number: int, draw: random.Random) -> dict[str, Any]:
    """Heads and layers."""
    rope = AXES[number % len(AXES)]
    return {
        "num_attention_heads": draw.choice([1, 2, 3, 5]),
        "attention_head_dim": sum(rope),
        "num_layers": draw.choice([1, 2, 3]),
    }


def _qwen_image(number: int) -> dict[str, Any]:
    draw = random.Random(number)
    channels = draw.choice([1, 3, 4])
    return _shape(number, draw) | {
        "in_channels": 4 * channels,
        "out_channels": channels,
        "joint_attention_dim": draw.choice([8, 20]),
        "axes_dims_rope": AXES[number % len(AXES)],
        "zero_cond_t": number % 3 == 2,
    }


def _qwen_image_theirs(network: nn.Module, batch: PackedBatch, index: int, model: Any) -> Tensor:
    """Packed by the pipeline's own function."""
    first, last = batch.text_starts[index : index + 2]
    start, grids = batch.starts[index], [batch.grids[index]]
    grids += batch.references[index] if batch.references else ()
    rows = []
    for grid in grids:
        latent = unpatchify(batch.latent_TC[start:], grid, 1, 2).transpose(0, 1)
        rows.append(QwenImagePipeline._pack_latents(latent[None], 1, *latent.shape[1:]))
        start += grid[1] * grid[2]
    (made,) = network(
        torch.cat(rows, dim=1),
        encoder_hidden_states=batch.text_LE[None, first:last],
        timestep=torch.tensor([LEVELS[index]]),
        img_shapes=[grids],
        return_dict=False,
    )
    return made[0, : rows[0].shape[1]]


def _hunyuan(number: int) -> dict[str, Any]:
    draw = random.Random(number)
    channels = draw.choice([1, 3, 4])
    return _shape(number, draw) | {
        "in_channels": 2 * channels + 1,
        "out_channels": channels,
        "patch_size": draw.choice([1, 1, 2]),
        "patch_size_t": draw.choice([1, 1, 2]),
        "num_refiner_layers": draw.choice([1, 2]),
        "mlp_ratio": draw.choice([2.0, 4.0]),
        "text_embed_dim": draw.choice([8, 20]),
        "text_embed_2_dim": draw.choice([6, 10]),
        "image_embed_dim": draw.choice([6, 12]),
        "rope_axes_dim": AXES[number % len(AXES)],
    }


def _hunyuan_theirs(network: nn.Module, batch: PackedBatch, index: int, model: Any) -> Tensor:
    """As the pipelines call it: rows of zeros where there is no picture, masks without gaps."""
    grid, start = batch.grids[index], batch.starts[index]
    patch = (model.patch_temporal, model.patch_spatial)
    assert batch.condition_TC is not None
    parts = [unpatchify(x[start:], grid, *patch) for x in (batch.latent_TC, batch.condition_TC)]

    def rows(name: str) -> Tensor:
        first, last = batch.text_offsets[name][index : index + 2]
        return batch.texts[name][None, first:last]

    text, glyphs, image = (rows(name) for name in ("text", "text_2", "image_embed"))
    if not image.shape[1]:
        image = image.new_zeros(1, 2, image.shape[-1])
    (made,) = network(
        torch.cat(parts)[None],
        timestep=torch.tensor([1000 * LEVELS[index]]),
        encoder_hidden_states=text,
        encoder_attention_mask=torch.ones(text.shape[:2]),
        encoder_hidden_states_2=glyphs,
        encoder_attention_mask_2=torch.ones(glyphs.shape[:2]),
        image_embeds=image,
        return_dict=False,
    )
    return _rows_of(made[0], grid, patch)


def _rows_of(latent_CFHW: Tensor, grid: Grid, patch: tuple[int, int]) -> Tensor:
    """A video as the rows of its tokens."""
    (f, h, w), (pt, p) = grid, patch
    split = latent_CFHW.reshape(-1, f, pt, h, p, w, p).permute(1, 3, 5, 0, 2, 4, 6)
    return split.reshape(f * h * w, -1)


def _hunyuan_video(number: int) -> dict[str, Any]:
    """Of text, with a first frame in channels of its own, or in the place of the noisy one."""
    draw = random.Random(number)
    channels = draw.choice([1, 3, 4])
    shown = (None, "latent_concat", "token_replace")[number % 3]
    return _shape(number, draw) | {
        "in_channels": 2 * channels + 1 if shown == "latent_concat" else channels,
        "out_channels": channels,
        "num_single_layers": draw.choice([1, 2]),
        "patch_size": draw.choice([1, 2]),
        "patch_size_t": draw.choice([1, 1, 2]),
        "num_refiner_layers": draw.choice([1, 2]),
        "mlp_ratio": draw.choice([2.0, 4.0]),
        "guidance_embeds": number % 4 > 0,
        "text_embed_dim": draw.choice([8, 20]),
        "pooled_projection_dim": draw.choice([6, 10]),
        "rope_axes_dim": AXES[number % len(AXES)],
        "image_condition_type": shown,
    }


def _hunyuan_video_theirs(network: nn.Module, batch: PackedBatch, index: int, model: Any) -> Tensor:
    """Where no frame is given, as the network of the same weights that knows of none."""
    grid, start = batch.grids[index], batch.starts[index]
    patch = (model.patch_temporal, model.patch_spatial)
    rows = [x for x in (batch.latent_TC, batch.condition_TC) if x is not None]
    first, last = batch.text_starts[index : index + 2]
    told: dict[str, Any] = {
        "hidden_states": torch.cat([unpatchify(x[start:], grid, *patch) for x in rows])[None],
        "timestep": torch.tensor([SCALE * LEVELS[index]]),
        "encoder_hidden_states": batch.text_LE[None, first:last],
        "encoder_attention_mask": torch.ones(1, last - first),
        "pooled_projections": batch.vectors["pooled_text"][index : index + 1],
        "guidance": torch.tensor([1000 * GUIDANCE]),
        "return_dict": False,
    }
    replaces = model.image_condition == "token_replace"
    if replaces and not (batch.clean_tokens and batch.clean_tokens[index]):
        plain, weights = without_first_frame(network), dict(network.named_parameters())
        (made,) = functional_call(plain, weights, (), told)
    else:
        (made,) = network(**told)
    return _rows_of(made[0], grid, patch)


def _hunyuan_image(number: int) -> dict[str, Any]:
    """As published, guidance-distilled, and told where a step ends, too."""
    draw, rope = random.Random(number), AXES[number % len(AXES)][1:]
    channels, patch = draw.choice([1, 3, 4]), draw.choice([1, 1, 2])
    return _shape(number, draw) | {
        "attention_head_dim": sum(rope),
        "num_single_layers": draw.choice([1, 2]),
        "in_channels": channels,
        "out_channels": channels,
        "patch_size": (patch, patch),
        "num_refiner_layers": draw.choice([1, 2]),
        "mlp_ratio": draw.choice([2.0, 4.0]),
        "text_embed_dim": draw.choice([8, 20]),
        "text_embed_2_dim": draw.choice([6, 10]),
        "rope_axes_dim": rope,
        "guidance_embeds": number % 3 > 0,
        "use_meanflow": number % 3 == 2,
    }


def _hunyuan_image_theirs(network: nn.Module, batch: PackedBatch, index: int, model: Any) -> Tensor:
    """As the pipeline calls it, with masks without gaps."""
    (_, h, w), p = batch.grids[index], model.patch_spatial
    latent = unpatchify(batch.latent_TC[batch.starts[index] :], (1, h, w), 1, p)

    def rows(name: str) -> Tensor:
        first, last = batch.text_offsets[name][index : index + 2]
        return batch.texts[name][None, first:last]

    text, glyphs = rows("text"), rows("text_2")
    ends, told = batch.step_end_N, batch.guidance
    (made,) = network(
        latent.transpose(0, 1),
        timestep=torch.tensor([SCALE * LEVELS[index]]),
        encoder_hidden_states=text,
        encoder_attention_mask=torch.ones(text.shape[:2]),
        encoder_hidden_states_2=glyphs,
        encoder_attention_mask_2=torch.ones(glyphs.shape[:2]),
        timestep_r=None if ends is None else ends[index : index + 1],
        guidance=None if told is None else torch.tensor([1000 * told]),
        return_dict=False,
    )
    split = made[0].reshape(-1, h, p, w, p).permute(1, 3, 0, 2, 4)
    return split.reshape(h * w, -1)


def _sd3(number: int) -> dict[str, Any]:
    """With and without norms of queries and keys, and a second attention of some layers."""
    draw = random.Random(number)
    shape = _shape(number, draw) | {"num_attention_heads": draw.choice([2, 4])}
    channels, patch = draw.choice([1, 3, 4]), draw.choice([1, 2])
    dual = draw.randint(0, shape["num_layers"]) if number % 3 != 1 else 0
    return shape | {
        "in_channels": channels,
        "out_channels": channels,
        "patch_size": patch,
        "sample_size": 6 * patch,
        "joint_attention_dim": draw.choice([8, 20]),
        "caption_projection_dim": shape["num_attention_heads"] * shape["attention_head_dim"],
        "pooled_projection_dim": draw.choice([6, 10]),
        "pos_embed_max_size": draw.choice([5, 6, 9]),
        "qk_norm": "rms_norm" if number % 3 else None,
        "dual_attention_layers": (*range(dual),),
    }


def _sd3_theirs(network: nn.Module, batch: PackedBatch, index: int, model: Any) -> Tensor:
    grid, (first, last) = batch.grids[index], batch.text_starts[index : index + 2]
    latent = unpatchify(batch.latent_TC[batch.starts[index] :], grid, 1, model.patch_spatial)
    (made,) = network(
        latent.transpose(0, 1),
        encoder_hidden_states=batch.text_LE[None, first:last],
        pooled_projections=batch.vectors["pooled_text"][index : index + 1],
        timestep=torch.tensor([SCALE * LEVELS[index]]),
        return_dict=False,
    )
    (_, h, w), p = grid, model.patch_spatial
    split = made[0].reshape(-1, h, p, w, p).permute(1, 3, 0, 2, 4)
    return split.reshape(h * w, -1)


def _chroma(number: int) -> dict[str, Any]:
    draw = random.Random(number)
    return _shape(number, draw) | {
        "in_channels": 4 * draw.choice([1, 3, 4]),
        "num_single_layers": draw.choice([1, 2, 3]),
        "joint_attention_dim": draw.choice([8, 20]),
        "axes_dims_rope": AXES[number % len(AXES)],
        "approximator_num_channels": draw.choice([4, 8, 16]),
        "approximator_hidden_dim": draw.choice([10, 16]),
        "approximator_layers": draw.choice([1, 2, 5]),
    }


def _chroma_theirs(network: nn.Module, batch: PackedBatch, index: int, model: Any) -> Tensor:
    """Rows of padding follow those that a shard stores; the mask hides them."""
    grid, (first, last) = batch.grids[index], batch.text_starts[index : index + 2]
    latent = unpatchify(batch.latent_TC[batch.starts[index] :], grid, 1, 2).transpose(0, 1)
    text_LE, padding = batch.text_LE[None, first:last], 3
    hidden = FluxPipeline._pack_latents(latent, *latent.shape)
    rows = text_LE.shape[1] + padding
    mask = torch.ones(1, rows + hidden.shape[1], dtype=torch.bool)
    mask[:, last - first : rows] = False
    hidden_LE = torch.ones(1, padding, text_LE.shape[-1])
    (made,) = network(
        hidden,
        encoder_hidden_states=torch.cat((text_LE, hidden_LE), dim=1),
        timestep=torch.tensor([LEVELS[index]]),
        img_ids=FluxPipeline._prepare_latent_image_ids(1, *grid[1:], "cpu", torch.float32),
        txt_ids=torch.zeros(rows, 3),
        attention_mask=mask,
        return_dict=False,
    )
    return made[0]


_TEXT = ("attn.add_q_proj", "attn.to_add_out", "attn.norm_added_q")
CASES = {
    "qwen_image": Case(
        network=QwenImageTransformer2DModel,
        configuration=_qwen_image,
        grids=lambda draw: (1, draw.randint(1, 5), draw.randint(1, 5)),
        theirs=_qwen_image_theirs,
        without_gradient=(*_TEXT, "txt_mlp"),
    ),
    "hunyuan_video_15": Case(
        network=HunyuanVideo15Transformer3DModel,
        configuration=_hunyuan,
        grids=lambda draw: (draw.randint(1, 4), draw.randint(1, 3), draw.randint(1, 4)),
        theirs=_hunyuan_theirs,
        without_gradient=(*_TEXT, "ff_context"),
        zero=("context_embedder.token_refiner.*.attn.to_k.bias",),
    ),
    "hunyuan_video": Case(
        network=HunyuanVideoTransformer3DModel,
        configuration=_hunyuan_video,
        grids=lambda draw: (draw.randint(1, 3), draw.randint(1, 3), draw.randint(1, 4)),
        theirs=_hunyuan_video_theirs,
        without_gradient=(),
        zero=("context_embedder.token_refiner.*.attn.to_k.bias",),
    ),
    "hunyuan_image": Case(
        network=HunyuanImageTransformer2DModel,
        configuration=_hunyuan_image,
        grids=lambda draw: (1, draw.randint(1, 5), draw.randint(1, 5)),
        theirs=_hunyuan_image_theirs,
        without_gradient=(),
        zero=("context_embedder.token_refiner.*.attn.to_k.bias",),
    ),
    "sd3": Case(
        network=SD3Transformer2DModel,
        configuration=_sd3,
        grids=lambda draw: (1, draw.randint(1, 5), draw.randint(1, 5)),
        theirs=_sd3_theirs,
        without_gradient=("attn.add_q_proj", "attn.norm_added_q"),
        zero=("transformer_blocks.*.attn2.to_k.bias",),  # where keys are not normalised
    ),
    "chroma": Case(
        network=ChromaTransformer2DModel,
        configuration=_chroma,
        grids=lambda draw: (1, draw.randint(1, 5), draw.randint(1, 5)),
        theirs=_chroma_theirs,
        without_gradient=(),
    ),
}


def _worst(found: Tensor, expected: Tensor) -> float:
    """Largest difference, by the rms of all; an element that is larger is measured by itself.

    The gradient of a matrix of 4 million elements has some that are 26 times the rms.
    """
    scale = expected.abs().clamp(min=float(expected.square().mean().sqrt()))
    return float(((found - expected).abs() / scale).max())


@pytest.mark.parametrize("number", few_quick(range(12), 3))
@pytest.mark.parametrize("name", CASES)
def test_forward_gradients_and_the_way_back(groups, tmp_path: Path, name: str, number: int) -> None:
    """Of five mixed samples in one pack, against each alone."""
    case = CASES[name]
    theirs = case.network(**case.configuration(number)).eval()
    fill_random(theirs, seed=number)
    theirs.save_pretrained(tmp_path / "hf")
    done = import_weights(tmp_path / "hf", tmp_path / "ours")
    model: Any = done.config.model
    assert model.precision is Precision.FP32 and done.config.objective.name == "flow"
    assert done.config.objective.flow.timestep_scale == SCALE
    family = family_of(model)
    ours = family.network()(model, groups)
    load_weights(done.path, [ours], groups, averaged=False)

    packed = model
    if name == "qwen_image":
        packed = replace(model, reference_latents=number % 3)
    draw = random.Random(number)
    grids = [case.grids(draw) for _ in range(5)]
    told = GUIDANCE if getattr(model, "guidance_embed", False) else None
    batch = random_pack(grids, TEXTS[number % 2], model=packed, guidance=told)
    levels_N = torch.tensor(LEVELS) * SCALE
    if family.tells_step_end(model):
        batch = replace(batch, step_end_N=0.75 * levels_N)
    weight_TC = torch.randn(batch.latent_TC.shape, generator=torch.Generator().manual_seed(1))
    weight_TC *= batch.is_target_T[:, None]
    out_TC = ours(batch.latent_TC, level_rows(levels_N, batch), batch)
    (out_TC * weight_TC).sum().backward()
    for index, tokens in enumerate(batch.latent_tokens):
        expected = case.theirs(theirs, batch, index, model)
        rows, mine = slice(batch.starts[index], batch.starts[index] + tokens), single(batch, index)
        own_N, noisy = levels_N[index : index + 1], batch.is_target_T[rows]
        alone_TC = ours(mine.latent_TC, level_rows(own_N, mine), mine)
        for found in (out_TC[rows], alone_TC[:tokens]):
            assert _worst(found.detach()[noisy], expected.detach()[noisy]) <= 1e-5
        (expected * weight_TC[rows]).sum().backward()

    gradients = {name: weight.grad for name, weight in ours.named_parameters()}
    assert None not in gradients.values()
    _check_gradients(theirs, gradients, model, case)
    done = export_weights(tmp_path / "ours", tmp_path / "back", ExportOptions(scheduler=False))
    again = case.network.from_pretrained(done.path)
    assert all(
        torch.equal(again.state_dict()[key], value) for key, value in theirs.state_dict().items()
    )


def _check_gradients(
    theirs: nn.Module, gradients: dict[str, Tensor], model: Any, case: Case
) -> None:
    """Each tensor has one, but those of the last block that nothing reads, and of no picture."""

    fixed = family_of(model).weights.fixed
    trained = [pair for pair in pairs(model) if pair.ours not in fixed]

    def of_ours(pair: Pair) -> Tensor:
        if pair.layer is None:
            return gradients[pair.ours]
        return gradients[pair.ours.replace("layers.", f"layers.{pair.layer}.", 1)]

    found, weights = their_tensors(trained, of_ours), dict(theirs.named_parameters())
    assert found.keys() == weights.keys()
    last = f"transformer_blocks.{model.num_layers - 1}."
    for name, weight in weights.items():
        unread = name.startswith(last) and any(part in name for part in case.without_gradient)
        grad = weight.grad
        if unread:
            assert not found[name].any() and (grad is None or not grad.any()), name
            continue
        assert grad is not None, name
        is_zero = any(fnmatchcase(name, pattern) for pattern in case.zero)
        if is_zero and not getattr(model, "qk_norm", False):
            assert not found[name].any() and grad.abs().max() <= 1e-5, name
        else:
            assert grad.any(), name
            assert _worst(found[name], grad) <= 1e-4, name
