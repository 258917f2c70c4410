"""Any grid has positions: none alias, none end at the edge of a table."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dit.models.dit.family import ExtraPosition
from dit.models.dit.model import LearnablePositions, Rotary
from dit.models.layers.parallel_linear import transformer_config
from dit.models.layers.per_sample import look_up
from dit.models.layers.queries_and_keys import rotate
from tests.packs import tiny_model

MODEL = tiny_model(
    num_layers=1,
    num_attention_heads=2,
    crossattn_emb_size=8,
    extra_pos_embed=ExtraPosition.LEARNABLE,
    max_size=(4, 8, 8),
)


def _grid(frames: int, rows: int, columns: int) -> torch.Tensor:
    axes = [torch.arange(n, dtype=torch.float32) for n in (frames, rows, columns)]
    return torch.cartesian_prod(*axes)


def test_no_two_tokens_of_a_large_grid_share_a_position():
    cos_TK, sin_TK = Rotary(MODEL)(_grid(40, 50, 60))
    assert torch.unique(torch.cat((cos_TK, sin_TK), dim=-1), dim=0).shape[0] == 40 * 50 * 60


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_each_axis_turns_its_own_part_of_a_head(axis: int):
    """A head of width 48 has 24 angles: 8 of frames, then 8 of rows, then 8 of columns."""
    scales, reach = (2.0, 1.0, 3.0), 5.0
    position_TA = torch.zeros(1, 3)
    position_TA[0, axis] = reach
    cos_TK, sin_TK = Rotary(replace(MODEL, rope_scale=scales))(position_TA)
    theta = 10_000.0 * scales[axis] ** (16 / 14)
    angle_8 = reach * theta ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    wanted_24 = torch.zeros(24, dtype=torch.float64)
    wanted_24[8 * axis : 8 * axis + 8] = angle_8
    wanted_TK = torch.cat([wanted_24, wanted_24])[None].float()  # pairs (i, i + K/2)
    torch.testing.assert_close(cos_TK, wanted_TK.cos())
    torch.testing.assert_close(sin_TK, wanted_TK.sin())


@pytest.mark.parametrize(("axis", "table"), list(enumerate("thw")))
def test_each_axis_has_its_own_table(axis: int, table: str):
    module = LearnablePositions(MODEL, transformer_config(MODEL))
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    position_TA = torch.zeros(2, 3)
    position_TA[1, axis] = 2.0
    before = module(position_TA, torch.full((2,), float("nan")))
    with torch.no_grad():
        getattr(module, f"pos_emb_{table}")[2] += 1
    after = module(position_TA, torch.full((2,), float("nan")))
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])


def test_attention_score_depends_on_the_distance_alone():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 48, generator=generator)
    rotary = Rotary(replace(MODEL, rope_scale=(2.0, 1.0, 3.0)))
    step = torch.tensor([[3.0, -5.0, 7.0]])
    scores = []
    for start in ([0.0, 0.0, 0.0], [17.0, 30.0, 200.0]):
        here = torch.tensor([start])
        turned = rotate(q, *rotary(here)), rotate(k, *rotary(here + step))
        scores.append((turned[0] * turned[1]).sum())
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-4, atol=1e-4)


def test_rotation_and_its_gradient_are_those_of_complex_numbers():
    generator = torch.Generator().manual_seed(0)
    cos_TK, sin_TK = Rotary(MODEL)(_grid(3, 4, 5))
    shape = (60, 2, cos_TK.shape[-1])
    x_THK = torch.randn(shape, generator=generator, requires_grad=True)
    weight_THK = torch.randn(shape, generator=generator)
    first, second = x_THK.chunk(2, dim=-1)
    turn_T1K = torch.complex(cos_TK, sin_TK)[:, None, : first.shape[-1]]
    turned = torch.complex(first, second) * turn_T1K
    plain_THK = torch.cat((turned.real, turned.imag), dim=-1)
    found_THK = rotate(x_THK, cos_TK, sin_TK)
    torch.testing.assert_close(found_THK, plain_THK)
    (plain,) = torch.autograd.grad((plain_THK * weight_THK).sum(), x_THK)
    (found,) = torch.autograd.grad((found_THK * weight_THK).sum(), x_THK)
    torch.testing.assert_close(found, plain)
    assert rotate(x_THK.bfloat16(), cos_TK, sin_TK).dtype is torch.bfloat16


def test_frames_follow_seconds():
    """A clip at half the rate has twice the distance between its frames."""
    rotary = Rotary(MODEL)
    slow, fast = _grid(4, 1, 1), _grid(8, 1, 1)
    slow[:, 0] *= MODEL.base_fps / 12
    fast[:, 0] *= MODEL.base_fps / 24
    for a, b in zip(rotary(slow), rotary(fast), strict=True):
        torch.testing.assert_close(a, b[::2])


def test_learnable_positions_undo_the_time_scale():
    table = LearnablePositions(MODEL, transformer_config(MODEL))
    for parameter in table.parameters():
        torch.nn.init.normal_(parameter)
    plain, scaled = _grid(4, 3, 2), _grid(4, 3, 2)
    scaled[:, 0] *= MODEL.base_fps / 7
    images = table(plain, torch.full((24,), float("nan")))
    torch.testing.assert_close(table(scaled, torch.full((24,), 7.0)), images)
    # Unit root mean square, whatever the size of the tables.
    torch.testing.assert_close(images.square().mean(-1).sqrt(), torch.ones(24))


@pytest.mark.parametrize("index", [[0, 0, 3, 0, 1], [2]])
def test_looking_rows_up_has_the_gradients_of_plain_indexing(index):
    table, index_T = torch.randn(5, 3, requires_grad=True), torch.tensor(index)
    weight = torch.randn(len(index), 3)
    rows = look_up(table, index_T)
    assert torch.equal(rows, table[index_T])
    found, plain = (torch.autograd.grad((x * weight).sum(), table) for x in (rows, table[index_T]))
    torch.testing.assert_close(found, plain)
