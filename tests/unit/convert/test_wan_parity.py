"""What Diffusers' Wan computes, ours computes with the imported weights: forward and backward."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from dit.batch import PackedBatch
from dit.config import Precision
from dit.convert.export import ExportOptions, export_weights
from dit.convert.import_ import import_weights
from dit.models.diffusers_names import Pair, their_tensors
from dit.models.registry import pairs
from dit.models.wan.family import ImageCondition, WanConfig
from dit.models.wan.model import WanNetwork
from dit.train.checkpoint.state_dict import load_weights
from tests.packs import random_pack, single
from tests.quick import few_quick
from tests.toy_networks import level_rows
from tests.wan_networks import publish_wan, random_wan

LEVELS = (812.5, 0.0, 437.0, 999.0, 31.25)
"""One noise level, 1000 t, for each sample."""
TEXTS = [7, 1, 12, 3, 20]
LONG_TEXTS = [512, 430, 500, 511, 300]
"""Beside images. The gradients of keys cancel over rows of padding, which are equal: with 500 of
them and short captions, float32 leaves 4e-4."""
VARIANTS = ("t2v", "i2v", "i2v_image", "flf2v", "ti2v")


def _configuration(number: int) -> dict:
    """Of config.json, of a variant and of sizes that differ."""
    draw, variant = random.Random(number), VARIANTS[number % len(VARIANTS)]
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
    }
    if variant in ("i2v_image", "flf2v"):
        sizes |= {"image_dim": 10, "added_kv_proj_dim": heads * width}
    if variant == "flf2v":
        sizes["pos_embed_seq_len"] = draw.choice([6, 10])
    return sizes


def _grids(number: int) -> list[tuple[int, int, int]]:
    """Images and videos of unequal sides."""
    draw = random.Random(number)
    drawn = [(draw.randint(2, 4), draw.randint(1, 4), draw.randint(1, 4)) for _ in range(2)]
    return [(1, draw.randint(1, 5), 3), *drawn, (1, 4, 2), (3, 1, 2)]


def _latent(tokens: Tensor, grid: tuple[int, int, int], model: WanConfig) -> Tensor:
    """[C, F, H, W] of the first tokens."""
    (f, h, w), p, s = grid, model.patch_temporal, model.patch_spatial
    blocks = tokens[: f * h * w].reshape(f, h, w, -1, p, s, s)
    return blocks.permute(3, 0, 4, 1, 5, 2, 6).reshape(-1, f * p, h * s, w * s)


def _pipelines_mask(latent: Tensor, model: WanConfig) -> Tensor:
    """Mask channels, as `WanImageToVideoPipeline.prepare_latents` makes them of pixel frames."""
    frames, height, width = latent.shape[1:]
    mask = torch.ones(1, 1, 4 * frames - 3, height, width)
    last = model.image_condition is ImageCondition.FIRST_AND_LAST_FRAME
    mask[:, :, range(1, mask.shape[2] - last)] = 0
    first = torch.repeat_interleave(mask[:, :, 0:1], dim=2, repeats=4)
    mask = torch.concat([first, mask[:, :, 1:, :]], dim=2).view(1, -1, 4, height, width)
    return mask.transpose(1, 2)[0]


def _theirs(
    network: WanTransformer3DModel, batch: PackedBatch, index: int, model: WanConfig
) -> Tensor:
    """Diffusers' output for one sample [C, F, H, W]."""
    first, grid = batch.starts[index], batch.grids[index]
    start, stop = batch.text_starts[index : index + 2]
    missing = (model.text_pad_to or stop - start) - (stop - start)
    text = torch.nn.functional.pad(batch.text_LE[start:stop], (0, 0, 0, missing))
    latent, level = _latent(batch.latent_TC[first:], grid, model), LEVELS[index]
    timestep = torch.tensor([level])
    if batch.clean_tokens and batch.clean_tokens[index]:
        timestep = torch.full((1, batch.num_tokens[index]), level)
        timestep[:, : batch.clean_tokens[index]] = 0
    if batch.condition_TC is not None:
        condition = _latent(batch.condition_TC[first:], grid, model)
        latent = torch.cat([latent, _pipelines_mask(latent, model), condition])
    image = None
    if model.image_embed_size is not None:
        a, b = batch.text_offsets["image_embed"][index : index + 2]
        image = batch.texts["image_embed"][a:b]
        image = image.unflatten(0, (2, -1)) if model.image_embed_positions else image[None]
    return network(latent[None], timestep, text[None], image).sample[0]


@pytest.fixture(params=few_quick(range(25), 6))
def both(
    request, groups, tmp_path: Path
) -> Iterator[tuple[WanTransformer3DModel, WanNetwork, Path]]:
    """Diffusers' network, ours with its weights, and where the checkpoint lies."""
    theirs = random_wan(seed=request.param, **_configuration(request.param))
    publish_wan(tmp_path / "hf", theirs)
    # Diffusers' network takes the last 512 rows for text where there are images.
    tall = 512 if theirs.config.image_dim else (None, 24)[request.param // 5 % 2]
    done = import_weights(tmp_path / "hf", tmp_path / "ours", text_pad_to=tall)
    model = done.config.model
    assert isinstance(model, WanConfig) and model.precision is Precision.FP32
    assert done.config.objective.name == "flow"
    ours = WanNetwork(model, groups)
    load_weights(done.path, [ours], groups, averaged=False)
    yield theirs, ours, tmp_path


def _worst(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.square().mean().sqrt())


def test_forward_gradients_and_the_way_back(both) -> None:
    """Of five mixed samples in one pack, against each alone."""
    theirs, ours, folder = both
    model = ours.model
    texts = LONG_TEXTS if model.image_rows else TEXTS
    batch = random_pack(_grids(theirs.config.ffn_dim), texts, model=model)
    clean = model.image_condition is ImageCondition.CLEAN_FIRST_FRAME
    given = [clean and grid[0] > 1 for grid in batch.grids]
    assert [n > 0 for n in batch.clean_tokens or (0,) * 5] == given
    levels_M = level_rows(torch.tensor(LEVELS), batch)
    weight_TC = torch.randn(batch.latent_TC.shape, generator=torch.Generator().manual_seed(1))
    weight_TC *= batch.is_target_T[:, None]
    out_TC = ours(batch.latent_TC, levels_M, batch)
    (out_TC * weight_TC).sum().backward()
    for index, grid in enumerate(batch.grids):
        expected = _theirs(theirs, batch, index, model)
        first, mine = batch.starts[index], single(batch, index)
        level = torch.tensor(LEVELS[index : index + 1])
        alone_TC = ours(mine.latent_TC, level_rows(level, mine), mine)
        for tokens in (out_TC[first:], alone_TC):
            assert _worst(_latent(tokens, grid, model).detach(), expected.detach()) <= 1e-5
        (expected * _latent(weight_TC[first:], grid, model)).sum().backward()

    gradients = {name: weight.grad for name, weight in ours.named_parameters()}
    assert None not in gradients.values()
    _check_gradients(theirs, gradients, model)
    done = export_weights(folder / "ours", folder / "back", ExportOptions(scheduler=False))
    again = WanTransformer3DModel.from_pretrained(done.path).state_dict()
    assert all(torch.equal(again[name], value) for name, value in theirs.state_dict().items())


def _check_gradients(
    theirs: WanTransformer3DModel, gradients: dict[str, Tensor], model: WanConfig
) -> None:
    """Every tensor has one: with a norm of keys not even a bias of keys is without."""

    def of_ours(pair: Pair) -> Tensor:
        name = pair.ours.replace("layers.", f"layers.{pair.layer}.", 1)
        return gradients[name]

    found, weights = their_tensors(pairs(model), of_ours), dict(theirs.named_parameters())
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        assert weight.grad is not None and weight.grad.any(), name
        assert _worst(found[name], weight.grad) <= 1e-4, name
