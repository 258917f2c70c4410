"""Descriptions of layers against Diffusers' blocks on the meta device: numbers and operations."""

from __future__ import annotations

from typing import Any

import pytest

from dit.models.cost import kept_by_layer
from dit.models.layer_spec import AttentionSpec, DoubleLayerSpec, FeedForwardSpec, SingleLayerSpec
from tests.packs import tiny_model

D, H, F, N, M = 64, 4, 256, 20, 6


def parts(**attention: Any) -> dict[str, Any]:
    return {
        "attention": AttentionSpec(**{"width": D, "heads": H, "bias": True} | attention),
        "feed_forward": FeedForwardSpec(width=D, hidden=F, bias=attention.get("bias", True)),
    }


def test_published_blocks_weigh_36_and_15_squares() -> None:
    """FLUX: matrices of 36 D^2 in a double block and 15 D^2 in a single one, with MLPs of 4 D."""
    for kind, squares in ((DoubleLayerSpec, 36), (SingleLayerSpec, 15)):
        linears = kind(**parts(bias=False)).cost.linears
        assert sum(one.inputs * one.outputs for one in linears) == squares * D * D


def test_tensor_ranks_share_modulation_of_each_block_and_no_more_than_they_hold() -> None:
    cost = DoubleLayerSpec(**parts()).cost
    whole, half = cost.parameters(), cost.parameters(tensor=2)
    # What every rank has whole: biases after matrices split by inputs, and norms per head.
    shared = 2 * (2 * D + 2 * (D // H))
    assert half == (whole - shared) // 2 + shared


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
    """In float32 numbers."""
    assert kept_by_layer(tiny_model(**changes)) == 4 * kept
