"""Attention among cubes of tokens by the kernel of a GPU, forward and backward, and by a mask."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from dit.models.attention.cube_attention import attend_by_mask, chosen_cubes
from dit.models.attention.cube_kernel import attend_in_blocks
from dit.models.attention.cubes import Cubes
from dit.models.attention.spans import Spans

pytestmark = pytest.mark.gpu
GRIDS = [(5, 14, 18), (1, 3, 2), (4, 16, 16), (2, 9, 4)]
PADDING = 5


@pytest.mark.parametrize("width", [64, 128])
def test_chosen_blocks_are_those_of_the_mask(width: int) -> None:
    device = torch.device("cuda")
    for turn, grids in enumerate((GRIDS, GRIDS[2:], GRIDS[:1])):  # packs of other sizes
        sizes = [math.prod(grid) for grid in grids]
        starts = [sum(sizes[:i]) + i * PADDING for i in range(len(grids) + 1)]
        pairs = list(zip(starts, sizes, strict=False))
        spans = Spans.of(pairs, pairs, total=starts[-1], device=device)
        at = {"total": starts[-1], "device": device}
        cubes = Cubes.of(grids, starts, share=Fraction(1, 4), **at)
        spans = replace(spans, cubes=cubes)
        generator = torch.Generator(device).manual_seed(turn)
        shape = (starts[-1], 4, width)
        q, k, v, gradient = (
            torch.randn(shape, generator=generator, device=device).bfloat16() for _ in range(4)
        )
        leaves = [x.requires_grad_() for x in (q, k, v)]
        chosen = chosen_cubes(*(cubes.with_means(x)[1] for x in (q, k)), cubes)
        real_T11 = cubes.of_tokens.taken(q.new_ones(len(cubes.real_S), 1, 1))
        made = cubes.of_order(attend_in_blocks(tuple(map(cubes.placed, (q, k, v))), chosen, cubes))
        wanted = attend_by_mask((q, k, v), chosen, spans)
        results = []
        for out in (made, wanted):
            gradients = torch.autograd.grad((out * gradient * real_T11).sum(), leaves)
            results.append([out.detach(), *gradients])
        for fast, plain in zip(*results, strict=True):
            assert (fast - plain).float().norm() / plain.float().norm() < 1e-2
