"""The fine part of attention among cubes by torch's FlexAttention: one block of keys for each cube.

Only compiled it computes blocks: plain calls of `flex_attention` see all keys that the mask of
tokens allows, and say nothing. On CPUs the compiled forward pass is right, and there is none back.
"""

# C cubes of a pack, B places of a cube, S = C * B, H heads, K head width
# J cubes that one attends to, at most

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from dit.config.sparsity import CUBE_TOKENS
from dit.models.attention.cubes import Cubes

# Triton's tiles must divide a cube. Of the backward pass torch takes none of its default ones on
# Hopper then, which are 128 wide (get_flex_attn_bwd_configs); those of `max_autotune` have some.
_TILES = {"BLOCK_M": CUBE_TOKENS, "BLOCK_N": CUBE_TOKENS}


@cache
def _compiled(device: str) -> Callable[..., Any]:
    options: Any = {"max_autotune": True} if device == "cuda" else None
    # The whole of it, or torch would say nothing where it stops to compile, and take plain calls.
    # Dynamic from the first pack on: a kernel for its number of cubes alone would be tuned, too.
    return torch.compile(flex_attention, fullgraph=True, dynamic=True, options=options)


def attend_in_blocks(
    placed_CBHK: tuple[Tensor, Tensor, Tensor], chosen_HCJ: Tensor, cubes: Cubes
) -> Tensor:
    """Attention [C, B, H, K] of queries, keys and values by cubes; places without a token: any."""
    q, k, v = (x.flatten(0, 1).transpose(0, 1)[None].contiguous() for x in placed_CBHK)
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
    return out[0].transpose(0, 1).unflatten(0, (-1, CUBE_TOKENS))


def block_mask(chosen_HCJ: Tensor, cubes: Cubes) -> BlockMask:
    """Which cubes see which, of the first that are chosen of each sample."""
    heads, count, _ = chosen_HCJ.shape
    index_HCC = chosen_HCJ.new_zeros(heads, count, count, dtype=torch.int32)
    index_HCC[:, :, : chosen_HCJ.shape[-1]] = chosen_HCJ
    empty_S = cubes.of_places.empty_XX1.flatten()

    def is_real(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        return ~empty_S[key]

    return BlockMask.from_kv_blocks(
        cubes.chosen_C.expand(1, heads, count).contiguous(),
        index_HCC[None],
        BLOCK_SIZE=CUBE_TOKENS,
        mask_mod=is_real,
    )
