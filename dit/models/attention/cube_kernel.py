"""The fine part of attention among cubes, by torch's FlexAttention: each block is a cube.

FlexAttention skips blocks only when compiled: without compilation it attends to all keys that the
mask of tokens allows, and gives no warning. On CPUs it has a compiled forward pass, which is
correct, but no backward pass.
"""

# C cubes of a pack, B positions of a cube, S = C * B, H heads, K head width
# J largest number of cubes that a cube attends to

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dit.config.sparsity import CUBE_TOKENS
from dit.models.attention.cubes import Cubes
from dit.models.compilation import compile_here

# Triton's tiles must divide a cube. Torch's default tiles for the backward pass on Hopper do not,
# being 128 wide (get_flex_attn_bwd_configs); `max_autotune` also tries smaller ones.
_TILES = {"BLOCK_M": CUBE_TOKENS, "BLOCK_N": CUBE_TOKENS}


@cache
def _compiled(device: str) -> Callable[..., Any]:
    options: Any = {"max_autotune": True} if device == "cuda" else None
    # `fullgraph`: otherwise torch would fall back to uncompiled calls without a warning.
    # `dynamic`: otherwise a kernel for the first pack's number of cubes alone would be tuned, too.
    return compile_here(flex_attention, fullgraph=True, dynamic=True, options=options)


def attend_in_blocks(
    placed_CBHK: tuple[Tensor, Tensor, Tensor], chosen_HCJ: Tensor, cubes: Cubes
) -> Tensor:
    """The output [C, B, H, K] of attention of each cube to its chosen cubes, by FlexAttention.

    `placed_CBHK` are queries, keys and values by cube and by position in the cube. Outputs at
    positions without a token are undefined.
    """
    q, k, v = (x.flatten(0, 1).transpose(0, 1)[None] for x in placed_CBHK)  # takes any strides
    for x in (q, k, v):  # heads and their width are the network's
        torch._dynamo.mark_static(x, 1)
        torch._dynamo.mark_static(x, 3)
    out = _compiled(q.device.type)(
        q,
        k,
        v,
        block_mask=block_mask(chosen_HCJ, cubes),
        kernel_options=_TILES if q.is_cuda else None,
    )
    # Not `out[0]`, whose gradient would be written into zeros.
    return out.squeeze(0).transpose(0, 1).unflatten(0, (-1, CUBE_TOKENS))


def block_mask(chosen_HCJ: Tensor, cubes: Cubes) -> BlockMask:
    """FlexAttention's block mask: each cube attends to its cubes in `chosen_HCJ`."""
    heads, count, most = chosen_HCJ.shape
    seen_HCC = chosen_HCJ.new_zeros(heads, count, count, dtype=torch.int32)
    seen_HCC[:, :, :most] = chosen_HCJ
    by_num_HC, by_HCC = seen_by(chosen_HCJ, cubes)

    def is_real(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        return cubes.real_S[key]

    # Not `from_kv_blocks`, which computes `q_indices` by sorting all pairs of cubes, as int64.
    return BlockMask(
        seq_lengths=(count * CUBE_TOKENS, count * CUBE_TOKENS),
        kv_num_blocks=cubes.chosen_C.expand(1, heads, count).contiguous(),
        kv_indices=seen_HCC[None],
        full_kv_num_blocks=None,
        full_kv_indices=None,
        q_num_blocks=by_num_HC[None],
        q_indices=by_HCC[None],
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(CUBE_TOKENS, CUBE_TOKENS),
        mask_mod=is_real,
    )


def seen_by(chosen_HCJ: Tensor, cubes: Cubes) -> tuple[Tensor, Tensor]:
    """(number [H, C], indices [H, C, C]) of the cubes that attend to each cube, int32.

    The indices of each cube are sorted; those beyond the number are undefined.
    """
    heads, count, most = chosen_HCJ.shape
    by_num_HC = chosen_HCJ.new_empty(heads, count, dtype=torch.int32)
    by_HCC = chosen_HCJ.new_zeros(heads, count, count, dtype=torch.int32)
    cube_C1 = torch.arange(count, device=chosen_HCJ.device)[:, None]
    seen_CJ = torch.arange(most, device=chosen_HCJ.device) < cubes.chosen_C[:, None]
    each = (x.split(cubes.heads_at_once) for x in (chosen_HCJ, by_num_HC, by_HCC))
    for some_HCJ, num_HC, some_by_HCC in zip(*each, strict=True):
        # upto[h, i, c]: how many cubes up to i attend to cube c. It is i's place in the list of c.
        upto_HCC = torch.zeros_like(some_by_HCC)
        upto_HCC.scatter_(2, some_HCJ, seen_CJ.int().expand_as(some_HCJ)).cumsum_(1)
        num_HC.copy_(upto_HCC[:, -1])
        place_HCJ = upto_HCC.gather(2, some_HCJ).long() - 1
        # If i does not attend to c, the list of c is not full, so its last place is free for i.
        place_HCJ = torch.where(seen_CJ, place_HCJ, count - 1).add_(some_HCJ, alpha=count)
        value_HCJ = (cube_C1 * seen_CJ).int().expand_as(some_HCJ)
        some_by_HCC.flatten(1).scatter_(1, place_HCJ.flatten(1), value_HCJ.flatten(1))
    return by_num_HC, by_HCC
