"""RMSNorm of each head, and rotary positions, of queries and keys: a forward and a backward kernel.

The matrix product writes queries, keys and values of each head next to each other. Kernels read
them there and write gradients in the same layout, so nothing is copied to split or join them.
"""

# T packed tokens, H heads of this tensor rank, K head width, X numbers of a head in the product
# P x G programs of a kernel, for groups of tokens and groups of heads

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dit.models.kernels.row_gradient import RowGradient, offered, row_to_fill

PROGRAMS = 2048
"""Largest number of programs for each group of heads. Each program accumulates the weights'
gradient over its tokens."""
HEADS = 16
"""Largest number of heads of a program; it limits the registers that wide models need."""
WIDE = 128
"""Head width above which a program has at most HEADS / 2 heads, because its threads are limited."""


def queries_and_keys(
    x_THX: Tensor,
    weights_K: tuple[Tensor, Tensor],
    angles_TK: tuple[Tensor, Tensor],
    *,
    eps: float,
    others: Sequence[int],
) -> tuple[Tensor, ...]:
    """(normalised and rotated queries, keys, then views of the other slices of each head).

    Each head of `x_THX` has K numbers of queries, K of keys, then slices of the widths `others`.
    `weights_K` are the weights of the norms of queries and of keys. `angles_TK` are the cosines and
    sines from `RotaryTable`, equal for both halves of a head.
    """
    place = RowGradient(2 * len(weights_K[0]))
    made = _RotatedHeads.apply(x_THX, *weights_K, *angles_TK, eps, tuple(others), place)
    assert isinstance(made, tuple)
    for values_THK in made[2:3]:
        offered(values_THK, place)
    return made


class _RotatedHeads(torch.autograd.Function):
    """Autograd function of `queries_and_keys`.

    It returns values as a view of its input, which a custom operator must not do. The backward pass
    copies the gradient of values into the gradient of `x_THX`, unless attention wrote it there.
    """

    @staticmethod
    def forward(  # noqa: PLR0913  # autograd finds tensors only among direct arguments
        ctx: Any,
        x_THX: Tensor,
        weight_q_K: Tensor,
        weight_k_K: Tensor,
        cos_TK: Tensor,
        sin_TK: Tensor,
        eps: float,
        others: tuple[int, ...],
        place: RowGradient,
    ) -> tuple[Tensor, ...]:
        x_THX = x_THX.contiguous()
        q_THK, k_THK = rotated_heads(x_THX, weight_q_K, weight_k_K, cos_TK, sin_TK, eps)
        ctx.save_for_backward(x_THX, weight_q_K, weight_k_K, cos_TK, sin_TK)
        ctx.eps, ctx.place = eps, place
        return q_THK, k_THK, *x_THX[..., 2 * q_THK.shape[-1] :].split(others, dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs of `forward`.

        `gradients` are those of queries and keys, [T, H, K], then of the other slices.
        """
        to_q_THK, to_k_THK, *to_others = gradients
        # Read only once: a recomputed layer frees saved tensors at the first access.
        x_THX, *weights_and_angles = ctx.saved_tensors
        to_x_THX, left, begin = row_to_fill(ctx.place, to_others, x_THX)
        to_weights_2K = rotated_heads_backward(
            *(to_q_THK, to_k_THK, left, begin, to_x_THX, x_THX), *weights_and_angles, ctx.eps
        )
        return to_x_THX, *to_weights_2K, None, None, None, None, None


@torch.library.custom_op(
    "dit::rotated_heads",
    mutates_args=(),
    schema="(Tensor x, Tensor weight_q, Tensor weight_k, Tensor cos, Tensor sin, float eps)"
    " -> (Tensor, Tensor)",
)
def rotated_heads(
    x_THX: Tensor,
    weight_q_K: Tensor,
    weight_k_K: Tensor,
    cos_TK: Tensor,
    sin_TK: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """(queries, keys), normalised per head and rotated; contiguous [T, H, K] each."""
    tokens, heads, _ = x_THX.shape
    q_THK, k_THK = (x_THX.new_empty(tokens, heads, len(weight_q_K)) for _ in range(2))
    cos_TK, sin_TK = cos_TK.contiguous(), sin_TK.contiguous()
    if tokens:
        _kernels().rotated_heads_forward[grid_of(tokens, heads, len(weight_q_K))](
            *(x_THX, weight_q_K, weight_k_K, cos_TK, sin_TK, q_THK, k_THK),
            *(tokens, cos_TK.stride(0)),
            EPS=eps,
            **_sizes(x_THX, len(weight_q_K), numbers=4, registers=80),
        )
    return q_THK, k_THK


@rotated_heads.register_fake
def _(x_THX: Tensor, weight_q_K: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    tokens, heads, _ = x_THX.shape
    shape = (tokens, heads, len(weight_q_K))
    return x_THX.new_empty(shape), x_THX.new_empty(shape)


@torch.library.custom_op(
    "dit::rotated_heads_backward",
    mutates_args=("to_x",),
    schema="(Tensor to_q, Tensor to_k, Tensor[] to_others, int begin, Tensor(a!) to_x, Tensor x,"
    " Tensor weight_q, Tensor weight_k, Tensor cos, Tensor sin, float eps) -> Tensor",
)
def rotated_heads_backward(  # noqa: PLR0913  # what an operator takes is flat
    to_q_THK: Tensor,
    to_k_THK: Tensor,
    to_others: list[Tensor],
    begin: int,
    to_x_THX: Tensor,
    x_THX: Tensor,
    weight_q_K: Tensor,
    weight_k_K: Tensor,
    cos_TK: Tensor,
    sin_TK: Tensor,
    eps: float,
) -> Tensor:
    """Writes the gradient of x to `to_x_THX` and returns the gradients [2, K] of both weights.

    In each head of `to_x_THX` the gradients of queries and keys are written first; `to_others` are
    copied to the numbers from `begin` on; numbers in between are not written.
    """
    (tokens, heads, _), width = x_THX.shape, len(weight_q_K)
    for place, one in zip(_places(begin, to_others), to_others, strict=True):
        to_x_THX[..., place : place + one.shape[-1]].copy_(one)
    if not tokens:
        return weight_q_K.new_zeros(2, width)
    to_q_THK, to_k_THK = (x if x.stride(-1) == 1 else x.contiguous() for x in (to_q_THK, to_k_THK))
    cos_TK, sin_TK = cos_TK.contiguous(), sin_TK.contiguous()
    grid = grid_of(tokens, heads, width)
    strides = *to_q_THK.stride()[:2], *to_k_THK.stride()[:2]
    divisor = math.gcd(8, *strides)
    parts_PG2K = x_THX.new_empty(*grid, 2, width, dtype=torch.float32)
    _kernels().rotated_heads_backward[grid](
        *(to_q_THK, to_k_THK, x_THX, weight_q_K, weight_k_K, cos_TK, sin_TK, to_x_THX, parts_PG2K),
        *(tokens, cos_TK.stride(0), *(stride // divisor for stride in strides)),
        DIVISOR=divisor,
        EPS=eps,
        # Fewer numbers than in the forward pass, because a thread also holds sums. In both passes a
        # multiprocessor runs at least 768 threads.
        **_sizes(x_THX, width, numbers=2, registers=64),
    )
    return parts_PG2K.sum((0, 1)).to(weight_q_K.dtype)


@rotated_heads_backward.register_fake
def _(
    to_q_THK: Tensor,  # noqa: ARG001
    to_k_THK: Tensor,  # noqa: ARG001
    to_others: list[Tensor],  # noqa: ARG001
    begin: int,  # noqa: ARG001
    to_x_THX: Tensor,  # noqa: ARG001
    x_THX: Tensor,  # noqa: ARG001
    weight_q_K: Tensor,
    *_others: Any,
) -> Tensor:
    return weight_q_K.new_empty(2, len(weight_q_K))


def _places(first: int, parts: Sequence[Tensor]) -> list[int]:
    """The first column, in a head, of each of `parts` [T, H, width], which start at `first`."""
    places = [first]
    for part in parts[:-1]:
        places.append(places[-1] + part.shape[-1])
    return places[: len(parts)]


def grid_of(tokens: int, heads: int, width: int) -> tuple[int, int]:
    """(programs per group of heads, groups of heads): the grid of a kernel launch."""
    return min(tokens, PROGRAMS), -(-heads // _most_heads(width))


def _most_heads(width: int) -> int:
    return HEADS if width <= WIDE else HEADS // 2


def _kernels() -> Any:
    from dit.models.kernels import rotated_heads_triton

    return rotated_heads_triton


def _sizes(x_THX: Tensor, width: int, *, numbers: int, registers: int) -> dict[str, int]:
    """Launch parameters of a kernel in which a thread has `numbers` numbers of each half of a head.

    `width` is the head width, and `registers` limits the registers of a thread.
    """
    _, heads, every = x_THX.shape
    of_program = min(heads, _most_heads(width)), width // 2
    rows, block = (1 << max(size - 1, 1).bit_length() for size in of_program)
    warps = min(max(rows * block // (32 * numbers), 1), 16)
    sizes = {"H": heads, "X": every, "HALF": width // 2, "HEADS": rows, "BLOCK": block}
    return {**sizes, "num_warps": warps, "maxnreg": registers}
