"""What a layer keeps for the backward pass, by its parts."""

from __future__ import annotations

import pytest

from dit.sizing.kept import kept_by_layer
from tests.packs import tiny_model


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, 18 + 2 * 4),
        ({"fused_kernels": False}, 29 + 2 * 4),
        ({"compile": True}, 29 + 2 * 4),
        ({"mlp_ratio": 2.5}, 18 + 2 * 2.5),
        ({"tensor_model_parallel_size": 2}, 9 + (9 + 8) / 2),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, (18 + 8) / 2),
    ],
)
def test_what_a_layer_keeps_follows_from_its_parts(changes: dict, kept: float) -> None:
    """In float32 numbers for each token and unit of width; few for each token come on top."""
    model = tiny_model(**changes)
    found = kept_by_layer(model).token / model.hidden_size
    assert 4 * kept < found < 4.1 * kept
