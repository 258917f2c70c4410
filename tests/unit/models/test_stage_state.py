"""What a pipeline stage sends comes out as it went in, and is as large as the next expects."""

from __future__ import annotations

import pytest
import torch

from dit.models.dit.family import ExtraPosition
from dit.models.dit.model import DiT
from dit.models.stacks.stacked_transformer import pack_stage_state, stage_rows, unpack_stage_state
from tests.packs import random_pack, tiny_model

GRIDS, TEXTS = [(1, 4, 4), (2, 2, 2), (1, 1, 1)], [5, 2, 4]


@pytest.mark.parametrize("padded", [None, 16])
@pytest.mark.parametrize("positions", list(ExtraPosition))
@pytest.mark.parametrize("projected", [None, 24, 100])
def test_hidden_states_and_conditions_survive_the_way_to_the_next_stage(
    groups, positions, projected, padded
):
    model = tiny_model(
        extra_pos_embed=positions,
        crossattn_proj_size=projected,
        max_size=(4, 16, 16),
        text_pad_to=padded,
    )
    network, width = DiT(model, groups), model.hidden_size
    batch = random_pack(GRIDS, TEXTS, model=model)
    prepared = network.prepared(batch)
    blocks = network.embed(batch.latent_TC, torch.zeros(3), prepared, network.layout(prepared))
    generator = torch.Generator().manual_seed(0)
    blocks = {name: torch.randn(x.shape, generator=generator) for name, x in blocks.items()}
    shapes = network.stage_shapes(batch, after=0)
    assert shapes.keys() == blocks.keys()
    sent = pack_stage_state(blocks, shapes, width)
    assert list(sent.shape) == network.hidden_shape(batch)
    assert len(sent) == stage_rows(shapes, width)
    came = unpack_stage_state(sent, network.stage_shapes(prepared, after=0), width)
    assert came.keys() == blocks.keys()
    assert all(torch.equal(came[name], x) for name, x in blocks.items())


def test_rows_of_another_width_travel_as_so_many_numbers(groups, monkeypatch):
    """A stream of another modality is as wide as it is; stages hand on rows of the model width."""
    model = tiny_model()
    network, width = DiT(model, groups), model.hidden_size
    monkeypatch.setattr(network, "hidden_width", lambda name: {"hidden": 40}[name])
    batch = random_pack(GRIDS, TEXTS, model=model)
    shapes = network.stage_shapes(batch, after=0)
    tokens = len(batch.segment_T)
    assert shapes["hidden"] == (tokens, 40)
    others = {name: shape for name, shape in shapes.items() if name != "hidden"}
    wanted = -(-tokens * 40 // width) + stage_rows(others, width)
    assert network.hidden_shape(batch) == [wanted, 1, width]
    blocks = {name: torch.randn(shape) for name, shape in shapes.items()}
    came = unpack_stage_state(pack_stage_state(blocks, shapes, width), shapes, width)
    assert all(torch.equal(came[name], x) for name, x in blocks.items())


def test_a_block_that_a_stage_does_not_read_has_a_gradient_of_zeros():
    shapes = {"hidden": (5, 8), "t_emb": (2, 8), "text": (3, 5)}
    blocks = {name: torch.randn(shape) for name, shape in shapes.items()}
    sent = pack_stage_state(blocks, shapes, 8).requires_grad_()
    unpack_stage_state(sent, shapes, 8)["t_emb"].sum().backward()
    assert sent.grad is not None
    gradient = unpack_stage_state(sent.grad, shapes, 8)
    assert [bool((gradient[name] == 1).all()) for name in shapes] == [False, True, False]
    assert not gradient["hidden"].any() and not gradient["text"].any()


def test_what_stages_send_each_other_lies_in_one_piece():
    """Gloo refuses a tensor with other strides, and NCCL sends the memory behind its first number.

    So do gradients, which are expanded where what is received is summed.
    """
    blocks = {
        "hidden": torch.arange(48.0).view(8, 6).T,
        "t_emb": torch.full((1, 1), 2.0).expand(3, 5),
    }
    shapes = {name: tuple(block.shape) for name, block in blocks.items()}
    for names in (("hidden",), ("t_emb",), ("hidden", "t_emb")):
        some = {name: shapes[name] for name in names}
        sent = pack_stage_state(blocks, some, 8)
        assert sent.is_contiguous()
        for name, came in unpack_stage_state(sent, some, 8).items():
            assert torch.equal(came, blocks[name])
        received = sent.clone().requires_grad_()
        received.transpose(0, 2).sum().backward()
        assert received.grad is not None and received.grad.is_contiguous()
