"""What Diffusers' FLUX computes, ours computes with the imported weights: forward and backward."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from diffusers.pipelines.flux.pipeline_flux_kontext import FluxKontextPipeline
from torch import Tensor

from dit.batch import PackedBatch
from dit.config import Precision
from dit.convert.export import ExportOptions, export_weights
from dit.convert.import_ import import_weights
from dit.models.diffusers_names import Pair, their_tensors
from dit.models.flux.family import FluxConfig
from dit.models.flux.model import FluxNetwork
from dit.models.registry import pairs
from dit.train.checkpoint.state_dict import load_weights
from tests.flux_networks import GUIDANCE, random_flux
from tests.packs import random_pack, single
from tests.quick import few_quick

LEVELS = (812.5, 0.0, 437.0, 999.0, 31.25)
"""One noise level, 1000 t, for each sample."""
TEXTS = ([7, 0, 12, 3, 20], [0, 0, 5, 1, 0], [0] * 5)


def _configuration(number: int) -> dict:
    """Of config.json; every third one has no guidance embedding."""
    draw = random.Random(number)
    axes = [(4, 4, 4), (2, 6, 6), (2, 2, 4), (8, 4, 2), (16, 6, 10)]
    rope = axes[number % len(axes)]
    return {
        "num_attention_heads": draw.choice([1, 2, 3, 5]),
        "attention_head_dim": sum(rope),
        "axes_dims_rope": rope,
        "in_channels": 4 * draw.choice([1, 3, 4]),
        "joint_attention_dim": draw.choice([8, 20]),
        "pooled_projection_dim": draw.choice([6, 15]),
        "guidance_embeds": number % 3 > 0,
        "num_layers": draw.choice([1, 2]),
        "num_single_layers": draw.choice([1, 2, 3]),
    }


def _grids(number: int) -> list[tuple[int, int, int]]:
    """Images of unequal sides."""
    draw = random.Random(number)
    return [(1, draw.randint(1, 5), draw.randint(1, 5)) for _ in range(4)] + [(1, 4, 2)]


def _latent(tokens: Tensor, grid: tuple[int, int, int], model: FluxConfig) -> Tensor:
    """[1, C, H, W] of the first tokens, as `FluxPipeline` has it."""
    (_, h, w), channels = grid, model.in_channels
    blocks = tokens[: h * w].view(h, w, channels, 2, 2).permute(2, 0, 3, 1, 4)
    return blocks.reshape(1, channels, 2 * h, 2 * w)


def _theirs(
    network: FluxTransformer2DModel, batch: PackedBatch, index: int, model: FluxConfig
) -> Tensor:
    """Diffusers' output for the target of one sample, packed by its own pipelines."""
    first, last = batch.text_starts[index : index + 2]
    start, grids = batch.starts[index], [batch.grids[index]]
    grids += batch.references[index] if batch.references else ()
    rows, ids = [], []
    for number, grid in enumerate(grids):
        latent = _latent(batch.latent_TC[start:], grid, model)
        rows.append(FluxPipeline._pack_latents(latent, *latent.shape))
        own = FluxKontextPipeline._prepare_latent_image_ids(1, *grid[1:], "cpu", torch.float32)
        own[..., 0] = number  # as the pipeline marks its reference with 1
        ids.append(own)
        start += grid[1] * grid[2]
    made = network(
        torch.cat(rows, dim=1),
        encoder_hidden_states=batch.text_LE[None, first:last],
        pooled_projections=batch.vectors["pooled_text"][index : index + 1],
        timestep=torch.tensor([LEVELS[index] / 1000]),
        img_ids=torch.cat(ids),
        txt_ids=torch.zeros(last - first, 3),
        guidance=torch.tensor([GUIDANCE]) if model.guidance_embed else None,
    ).sample
    return made[0, : rows[0].shape[1]]


@pytest.fixture(params=few_quick(range(15), 4))
def both(
    request, groups, tmp_path: Path
) -> Iterator[tuple[FluxTransformer2DModel, FluxNetwork, Path, int]]:
    """Diffusers' network, ours with its weights, and where the checkpoint lies."""
    theirs = random_flux(seed=request.param, **_configuration(request.param))
    theirs.save_pretrained(tmp_path / "hf")
    done = import_weights(tmp_path / "hf", tmp_path / "ours")
    model = done.config.model
    assert isinstance(model, FluxConfig) and model.precision is Precision.FP32
    told = done.config.objective
    assert (told.name, told.guidance) == ("flow", 1.0 if model.guidance_embed else None)
    ours = FluxNetwork(model, groups)
    load_weights(done.path, [ours], groups, averaged=False)
    yield theirs, ours, tmp_path, request.param


def _worst(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.square().mean().sqrt())


def test_forward_gradients_and_the_way_back(both) -> None:
    """Of five mixed samples in one pack, against each alone; two of them have references."""
    theirs, ours, folder, number = both
    model = ours.model
    guidance = GUIDANCE if model.guidance_embed else None
    with_references = FluxConfig(
        **{name: getattr(model, name) for name in model.field_order() if name != "name"}
        | {"name": "custom", "reference_latents": number % 3}
    )
    batch = random_pack(
        _grids(number), TEXTS[number // 5], model=with_references, guidance=guidance
    )
    assert [len(r) for r in batch.references or [()] * 5] == [0, number % 3, 0, number % 3, 0]
    weight_TC = torch.randn(batch.latent_TC.shape, generator=torch.Generator().manual_seed(1))
    weight_TC *= batch.is_target_T[:, None]
    out_TC = ours(batch.latent_TC, torch.tensor(LEVELS), batch)
    (out_TC * weight_TC).sum().backward()
    for index, tokens in enumerate(batch.latent_tokens):
        expected = _theirs(theirs, batch, index, model)
        rows, mine = slice(batch.starts[index], batch.starts[index] + tokens), single(batch, index)
        alone_TC = ours(mine.latent_TC, torch.tensor(LEVELS[index : index + 1]), mine)
        for found in (out_TC[rows], alone_TC[:tokens]):
            assert _worst(found.detach(), expected.detach()) <= 1e-5
        (expected * weight_TC[rows]).sum().backward()

    gradients = {name: weight.grad for name, weight in ours.named_parameters()}
    assert None not in gradients.values()
    _check_gradients(theirs, gradients, model, any_text=batch.text_starts[-1] > 0)
    done = export_weights(folder / "ours", folder / "back", ExportOptions(scheduler=False))
    again = FluxTransformer2DModel.from_pretrained(done.path).state_dict()
    assert all(torch.equal(again[name], value) for name, value in theirs.state_dict().items())


def _check_gradients(
    theirs: FluxTransformer2DModel,
    gradients: dict[str, Tensor],
    model: FluxConfig,
    *,
    any_text: bool,
) -> None:
    """Every tensor has one, but what sees text alone where no sample has any."""

    def of_ours(pair: Pair) -> Tensor:
        name = pair.ours.replace("layers.", f"layers.{pair.layer}.", 1)
        return gradients[name]

    found, weights = their_tensors(pairs(model), of_ours), dict(theirs.named_parameters())
    assert found.keys() == weights.keys()
    of_text = ("add", "context")
    for name, weight in weights.items():
        assert weight.grad is not None, name
        if not any_text and any(word in name for word in of_text):
            assert not weight.grad.any() and not found[name].any(), name
            continue
        assert weight.grad.any(), name
        assert _worst(found[name], weight.grad) <= 1e-4, name
