"""Descriptions of layers against Diffusers' blocks on the meta device: numbers and operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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

from dit.models.cost import kept_by_layer
from dit.models.layer_spec import (
    AttentionSpec,
    CrossLayerSpec,
    DoubleLayerSpec,
    FeedForwardSpec,
    LayerSpec,
    QkNorm,
    SingleLayerSpec,
    TableModulation,
)
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


def parts(**attention: Any) -> dict[str, Any]:
    return {
        "attention": AttentionSpec(**{"width": D, "heads": H, "bias": True} | attention),
        "feed_forward": FeedForwardSpec(width=D, hidden=F, bias=attention.get("bias", True)),
    }


def wan() -> CrossLayerSpec:
    own = parts(norm=QkNorm.ACROSS_HEADS)
    return CrossLayerSpec(
        **own,
        cross_attention=own["attention"],
        text_width=D,
        modulation=TableModulation(),
        gated_cross=False,
    )


@pytest.mark.parametrize(
    ("block", "run", "layer"),
    [
        (double, run_joint, DoubleLayerSpec(**parts())),
        (single, run_joint, SingleLayerSpec(**parts())),
        (cross, run_cross, wan()),
    ],
    ids=["double", "single", "cross"],
)
def test_a_layer_has_the_numbers_and_operations_of_diffusers_block(
    block: Callable[[], nn.Module], run: Callable[[nn.Module], None], layer: LayerSpec
) -> None:
    with torch.device("meta"), torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        network = block()
        with FlopCounterMode(display=False) as counter:
            run(network)
    assert layer.cost.parameters() == sum(weight.numel() for weight in network.parameters())
    assert 2 * layer.cost.multiplications.of([N], [M]) == counter.get_total_flops()


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
