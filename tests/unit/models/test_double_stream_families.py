"""What single families with joint attention have of their own: positions, a shown frame."""

from __future__ import annotations

from typing import Any

import torch

from dit.models.positions import CentredPositions
from dit.models.qwen_image.model import text_positions
from dit.models.registry import diffusers_form, family_of
from dit.train.model_and_optimizer import initialise_weights
from tests.contract.test_description import tiny
from tests.families.table import CASES
from tests.packs import random_pack, run_config

GRIDS, TEXTS = [(3, 2, 3), (1, 4, 2), (2, 3, 1), (4, 1, 2), (1, 1, 1)], [9, 2, 4, 30, 1]


def test_positions_are_counted_from_the_middle_of_each_picture() -> None:
    found = CentredPositions()(((1, 3, 2), (1, 1, 4)), fps=24.0)
    assert found[:, 0].tolist() == [0.0] * 6 + [1.0] * 4
    assert found[:6, 1].tolist() == [-2, -2, -1, -1, 0, 0]
    assert found[:6, 2].tolist() == [-1, 0] * 3
    assert found[6:, 1].tolist() == [-1] * 4 and found[6:, 2].tolist() == [-2, -1, 0, 1]
    text = text_positions([2, 0, 1], [[(1, 3, 2), (1, 1, 4)], [(1, 1, 1)], [(1, 9, 2)]])
    assert text.tolist() == [[2] * 3, [3] * 3, [4] * 3]  # half of the longest side of all pictures


def test_a_first_frame_is_shown_as_channels_with_a_mask(groups) -> None:
    """The second and the fourth sample have one; the second has no frame beyond it."""
    model: Any = tiny("hunyuanvideo_15")
    batch = random_pack(GRIDS, TEXTS, model=model)
    assert batch.condition_TC is not None
    mask_T = batch.condition_TC[:, -1]
    first = batch.starts[3]
    assert mask_T.nonzero().flatten().tolist() == [first, first + 1]  # of a frame of two tokens
    assert batch.condition_TC[:first].abs().sum() == 0
    assert batch.condition_TC[first : first + 2, :-1].abs().min() > 0
    assert batch.is_target_T[first] and not any(batch.clean_tokens)


def test_a_new_table_of_positions_is_that_of_diffusers(groups) -> None:
    """Published weights bring theirs along; initial values leave it as it is made."""
    model: Any = tiny("sd3")
    network = family_of(model).network()(model, groups)
    initialise_weights(network, run_config(model=model))
    content = diffusers_form(model).keys.content(model)
    expected = CASES["sd3"].network(**content).pos_embed.pos_embed[0]
    assert torch.equal(network.positions.table, expected)
