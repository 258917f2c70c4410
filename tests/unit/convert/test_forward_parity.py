"""What Diffusers computes, our DiT computes with the imported weights: alone, and in a pack."""

from __future__ import annotations

import math
import random

import pytest
import torch

from dit.convert.import_ import import_weights
from dit.models.dit.model import DiT
from dit.train.checkpoint.state_dict import load_weights
from tests.packs import random_pack, single
from tests.published import PROJECTED, publish, random_model
from tests.quick import few_quick

TALL, LEVELS = 12, (-2.1, 0.3, 1.7, 437.5)
"""Tokens that captions are filled up to where zeros are attended; one noise level for each."""


def _configurations() -> list[dict]:
    """36 models; among any four neighbours are learnable positions, a padding mask, both, none."""
    draw = random.Random(1)
    found = []
    for number in range(36):
        heads, width = draw.choice([(4, 24), (2, 16), (3, 32), (6, 12), (2, 26), (1, 64)])
        patch = draw.choice([(1, 2, 2), (1, 1, 1), (2, 2, 2), (2, 1, 1), (1, 3, 3)])
        projected = number % 3 == 2
        text = draw.choice([8, 20, 33])
        found.append(
            {
                "num_attention_heads": heads,
                "attention_head_dim": width,
                "num_layers": draw.choice([1, 2, 3]),
                "in_channels": (channels := draw.choice([1, 3, 4, 16])),
                "out_channels": channels,
                "patch_size": patch,
                "mlp_ratio": draw.choice([4.0, 2.0, 2.5]),
                "adaln_lora_dim": draw.choice([4, 16, 24]),
                "text_embed_dim": text,
                "rope_scale": draw.choice([(1.0, 1.0, 1.0), (2.0, 1.0, 1.0), (1.0, 4.0, 3.0)]),
                "max_size": tuple(side * p for side, p in zip((7, 9, 9), patch, strict=True)),
                "extra_pos_embed_type": "learnable" if number % 2 else None,
                "concat_padding_mask": bool(number // 2 % 2),
                **(PROJECTED | {"encoder_hidden_states_channels": text} if projected else {}),
            }
        )
    return found


def _grids(number: int) -> list[tuple[int, int, int]]:
    """One frame and several, oblong, seldom a multiple of anything."""
    draw = random.Random(number)
    shapes = [(1, draw.randint(1, 9), draw.randint(1, 9)), (1, 9, 2), (7, 1, 3)]
    return [*shapes, (draw.randint(2, 5), draw.randint(1, 5), draw.randint(1, 5))]


def _unpack(tokens, grid, model):
    (f, h, w), p, s = grid, model.patch_temporal, model.patch_spatial
    blocks = tokens[: f * h * w].view(f, h, w, model.in_channels, p, s, s)
    return blocks.permute(3, 0, 4, 1, 5, 2, 6).reshape(model.in_channels, f * p, h * s, w * s)


def _theirs(network, batch, index, *, model, level):
    """Diffusers' output for one sample, in tokens' numbers as a latent [C, F, H, W]."""
    start, stop = batch.text_starts[index : index + 2]
    text = torch.nn.functional.pad(batch.text_LE[start:stop], (0, 0, 0, TALL - stop + start))
    if model.text_pad_to is None:
        text = batch.text_LE[start:stop]
    latent = _unpack(batch.latent_TC[batch.starts[index] :], batch.grids[index], model)
    fps = float(batch.fps_N[index])
    return network(
        latent[None],
        torch.tensor([level]),
        text[None],
        fps=None if math.isnan(fps) or model.base_fps is None else fps,
        padding_mask=torch.zeros(1, 1, 8, 8),
    ).sample[0]


@pytest.mark.parametrize("number", few_quick(range(36), 12))
def test_imported_forward_equals_diffusers(groups, resize, tmp_path, number):
    theirs = random_model(seed=number, **_configurations()[number])
    pad_to = (None, TALL)[number // 4 % 2]
    publish(tmp_path / "hf", theirs)
    done = import_weights(tmp_path / "hf", tmp_path / "ours", text_pad_to=pad_to)
    model = done.config.model
    ours = DiT(model, groups)
    load_weights(done.path, [ours], groups, averaged=False)

    rates = [math.nan, 16.0, 30.0, math.nan]
    batch = random_pack(_grids(number), [7, 1, TALL, 3], model=model, fps=rates)
    worst = 0.0
    with torch.no_grad():
        packed_TC = ours(batch.latent_TC, torch.tensor(LEVELS), batch)
        for index, level in enumerate(LEVELS):
            expected = _theirs(theirs, batch, index, model=model, level=level)
            alone = single(batch, index)
            alone_TC = ours(alone.latent_TC, torch.tensor([level]), alone)
            for tokens in (packed_TC[batch.starts[index] :], alone_TC):
                got = _unpack(tokens, batch.grids[index], model)
                worst = max(worst, float((got - expected).abs().max()))
    assert worst <= 1e-5
