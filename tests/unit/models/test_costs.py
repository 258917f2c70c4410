"""Descriptions of layers against Diffusers' blocks on the meta device: numbers and operations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from diffusers.models.transformers.transformer_flux import (
    FluxSingleTransformerBlock,
    FluxTransformerBlock,
)
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dit.config import Recompute
from dit.models.cost import Cost, WeightShape
from dit.models.layer_costs import (
    QkNormCost,
    cross_attention,
    cross_layer,
    double_layer,
    feed_forward,
    self_attention,
    single_layer,
    table_modulation,
)
from dit.models.memory import kept_by_layer
from tests.packs import tiny_model

D, H, F, N, M = 64, 4, 256, 20, 6


def double() -> nn.Module:
    return FluxTransformerBlock(D, H, D // H)


def single() -> nn.Module:
    return FluxSingleTransformerBlock(D, H, D // H)


def cross() -> nn.Module:
    return WanTransformerBlock(D, F, H, "rms_norm_across_heads", True)


def run_joint(block: nn.Module) -> None:
    x, text, level = torch.empty(1, N, D), torch.empty(1, M, D), torch.empty(1, D)
    block(hidden_states=x, encoder_hidden_states=text, temb=level)


def run_cross(block: nn.Module) -> None:
    angles = torch.empty(1, N, 1, D // H)
    block(torch.empty(1, N, D), torch.empty(1, M, D), torch.empty(1, 6, D), (angles, angles))


def wan() -> Cost:
    shape = {"width": D, "heads": H, "bias": True, "norm": QkNormCost.ACROSS_HEADS}
    affine = Cost(weights=(WeightShape(numbers=2 * D),))
    return cross_layer(
        width=D,
        hidden=F,
        attention=self_attention(**shape),
        text_attention=cross_attention(**shape, text_width=D),
        mlp=feed_forward(width=D, hidden=F, bias=True),
        modulation=table_modulation(width=D, vectors=6) + affine,
    )


@pytest.mark.parametrize(
    ("block", "run", "cost"),
    [
        (double, run_joint, double_layer(width=D, heads=H, hidden=F)),
        (single, run_joint, single_layer(width=D, heads=H, hidden=F)),
        (cross, run_cross, wan()),
    ],
    ids=["double", "single", "cross"],
)
def test_a_layer_has_the_numbers_and_operations_of_diffusers_block(
    block: Callable[[], nn.Module], run: Callable[[nn.Module], None], cost: Cost
) -> None:
    with torch.device("meta"), torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        network = block()
        with FlopCounterMode(display=False) as counter:
            run(network)
    assert cost.parameters() == sum(weight.numel() for weight in network.parameters())
    assert 2 * cost.multiplications.of([N], [M]) == counter.get_total_flops()


def test_published_blocks_weigh_36_and_15_squares() -> None:
    """FLUX: matrices of 36 D^2 in a double block and 15 D^2 in a single one, with MLPs of 4 D."""
    width = {"width": D, "heads": H, "hidden": 4 * D, "bias": False}
    for cost, squares in ((double_layer(**width), 36), (single_layer(**width), 15)):
        assert sum(one.inputs * one.outputs for one in cost.linears) == squares * D * D


def test_tensor_ranks_share_modulation_of_each_block_and_no_more_than_they_hold() -> None:
    cost = double_layer(width=D, heads=H, hidden=F)
    whole, half = cost.parameters(), cost.parameters(tensor=2)
    # What every rank has whole: biases after matrices split by inputs, and norms per head.
    shared = 2 * (2 * D + 2 * (D // H))
    assert half == (whole - shared) // 2 + shared


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, 27 + 2 * 4),
        ({"mlp_ratio": 2.5}, 27 + 2 * 2.5),
        ({"recompute_granularity": Recompute.SELECTIVE}, 25 + 2 * 4),
        ({"tensor_model_parallel_size": 2}, 12 + (15 + 8) / 2),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, (12 + 15 + 8) / 2),
    ],
)
def test_what_a_layer_keeps_follows_from_its_parts(changes: dict, kept: float) -> None:
    assert kept_by_layer(tiny_model(**changes)) == kept
