"""What a pipeline stage sends comes out as it went in, and is as large as the next expects."""

from __future__ import annotations

import pytest
import torch

from dit.models.dit.config import ExtraPosition
from dit.models.dit.layer import Steer
from dit.models.dit.model import _load, _rows, _unload
from tests.packs import random_pack, tiny_model

GRIDS, TEXTS = [(1, 4, 4), (2, 2, 2), (1, 1, 1)], [5, 2, 4]


@pytest.mark.parametrize("positions", list(ExtraPosition))
@pytest.mark.parametrize("projected", [None, 24, 100])
def test_hidden_states_and_conditions_survive_the_way_to_the_next_stage(positions, projected):
    model = tiny_model(
        extra_pos_embed=positions, crossattn_proj_size=projected, max_size=(4, 16, 16)
    )
    batch = random_pack(GRIDS, TEXTS, model=model)
    tokens, samples, text = len(batch.latent_TC), batch.num_samples, len(batch.text_LE)
    width = model.hidden_size
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    learnable = positions is ExtraPosition.LEARNABLE
    steer = Steer(
        wave_ND=drawn(samples, width),
        offset_NX=drawn(samples, 3 * width),
        position_TD=drawn(tokens, width) if learnable else None,
        text_LE=drawn(text, projected) if projected else None,
    )
    h_TD = drawn(tokens, width)
    sent = _load(h_TD, steer)
    assert len(sent) == sum(_rows(model, tokens=tokens, samples=samples, text=text))
    came_TD, came = _unload(sent, model, batch, tokens)
    assert torch.equal(came_TD, h_TD)
    for name in ("wave_ND", "offset_NX", "position_TD", "text_LE"):
        one, other = getattr(came, name), getattr(steer, name)
        assert (one is None and other is None) or torch.equal(one, other), name
