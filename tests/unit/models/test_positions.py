"""Any grid has positions: none alias, none end at the edge of a table."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from diffusers.models.transformers.transformer_ernie_image import ErnieImageEmbedND3
from diffusers.models.transformers.transformer_ideogram4 import Ideogram4MRoPE
from diffusers.modular_pipelines.flux3.before_denoise import _prepare_image_ids
from diffusers.pipelines.ideogram4.pipeline_ideogram4 import Ideogram4Pipeline

from dit.models.dit.family import ExtraPosition
from dit.models.dit.model import LearnablePositions, Rotary
from dit.models.layers.parallel_linear import transformer_config
from dit.models.layers.per_sample import look_up
from dit.models.layers.queries_and_keys import InterleavedRotary, RotaryTable, rotate
from dit.models.positions import CentredPositions, FarPicturePositions, HalfStepPositions
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


def test_a_twisted_rotation_and_its_gradient_are_those_of_its_formula():
    """ERNIE-Image: neighbours have one angle, and the two numbers of a pair different ones.

    So it keeps no lengths, and its way back is no turn by the opposite angles.
    """
    generator = torch.Generator().manual_seed(0)
    widths, position_TA = (4, 2, 6), torch.randint(0, 40, (7, 3), generator=generator).float()
    angles = ErnieImageEmbedND3(12, 256, widths)(position_TA[None])[0].double()
    found = RotaryTable(widths, (256.0,) * 3, twisted=True)(position_TA)
    for ours, theirs in zip(found, (angles.cos(), angles.sin()), strict=True):
        torch.testing.assert_close(ours, theirs[:, 0].float(), rtol=0, atol=4e-6)
    x_THK, g_THK = torch.randn(2, 7, 2, 12, generator=generator)
    x_THK.requires_grad_()
    cos_T1K, sin_T1K = (one[:, None] for one in found)
    first, second = x_THK.chunk(2, dim=-1)
    plain_THK = x_THK * cos_T1K + torch.cat((-second, first), dim=-1) * sin_T1K
    found_THK = rotate(x_THK, *found)
    torch.testing.assert_close(found_THK, plain_THK, rtol=1e-5, atol=1e-5)
    assert (found_THK.norm(dim=-1) / x_THK.norm(dim=-1) - 1).abs().max() > 0.1
    to_plain, to_found = (
        torch.autograd.grad((one * g_THK).sum(), x_THK)[0] for one in (plain_THK, found_THK)
    )
    torch.testing.assert_close(to_found, to_plain, rtol=1e-5, atol=1e-5)


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


def test_half_steps_are_those_of_the_pipeline_of_flux3():
    """Of a picture of 3 x 40 and references of 2 x 2 and 1 x 1000."""
    sizes = ((3, 40), (2, 2), (1, 1000))
    wanted = [_prepare_image_ids(*size, 0.5, l_coord=-number) for number, size in enumerate(sizes)]
    found = HalfStepPositions()(tuple((1, *size) for size in sizes), fps=float("nan"))
    assert torch.equal(found, torch.cat(wanted))


@pytest.mark.parametrize(
    ("width", "sections"), [(256, (24, 20, 20)), (16, (4, 2, 2)), (14, (9, 1, 2)), (10, (1, 1, 1))]
)
def test_interleaved_axes_turn_the_frequencies_of_ideogram4(width: int, sections: tuple[int, ...]):
    """Of texts of 3 and 2 tokens and a picture of 3 x 5: every number of the angles, in float32."""
    places_LA = FarPicturePositions.of_text([3, 2])
    picture_TA = FarPicturePositions()(((1, 3, 5),), fps=float("nan"))
    for text_LA in places_LA.split([3, 2]):
        lengths = [len(text_LA)], 3, 5, len(text_LA)
        wanted_1TA, *_ = Ideogram4Pipeline._prepare_ids(*lengths, torch.device("cpu"))
        position_TA = torch.cat((text_LA, picture_TA))
        assert torch.equal(position_TA, wanted_1TA[0].float())
        found = InterleavedRotary(width, sections, 5e6)(position_TA)
        theirs_1TK = Ideogram4MRoPE(width, 5_000_000, sections)(wanted_1TA)
        for ours, theirs in zip(found, theirs_1TK, strict=True):
            assert torch.equal(ours, theirs[0])


def test_pictures_are_numbered_with_or_without_their_frames() -> None:
    grids = ((2, 3, 2), (1, 2, 2))
    for counts, numbers in ((True, [0] * 6 + [1] * 10), (False, [0] * 12 + [1] * 4)):
        found = CentredPositions(counts_frames=counts)(grids, fps=float("nan"))
        assert found[:, 0].tolist() == numbers
        assert found[:6, 1].tolist() == [-2, -2, -1, -1, 0, 0]
        assert found[-4:, 2].tolist() == [-1, 0, -1, 0]
