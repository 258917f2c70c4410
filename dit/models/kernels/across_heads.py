"""RMSNorm over all heads of a token, and rotary positions, of queries and keys.

1. across_heads_sums       sum of squares of each token, which is then summed over tensor ranks
2. across_heads            normalised queries or keys, rotated if there are angles
3. across_heads_sums       backward: sum of output * gradient of each token, summed over ranks, too
4. across_heads_backward   gradients of queries and keys, and of the norms' weights

The matrix product writes queries, keys and values of each head next to each other. Kernels read
them there and write gradients in the same layout, so nothing is copied to split or join them.
"""

# T tokens, H heads of this tensor rank, K head width, X numbers of a head in the product
# P programs

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dit.models.kernels.row_gradient import RowGradient, offered, row_to_fill

PROGRAMS = 512
"""Largest number of programs for each group of heads. A program reads the norm's weights once and
accumulates their gradient over its tokens. This number fills an H100 even with few groups of
heads."""
HEADS = 16
"""Largest number of heads of a program; it limits the registers that wide models need."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NormedRow:
    """The output [T, H, X] of a matrix product, in which some slices of each head are normalised.

    Each head begins with `parts` slices of K numbers, which are normalised. Slices of the widths
    `widths` follow, which are not.
    """

    x_THX: Tensor
    parts: int
    widths: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Across:
    """Parameters of the norm across heads and of the rotation that are not tensors."""

    eps: float
    numbers: int
    """Number of elements of a token's queries (or keys) on all tensor ranks, the divisor of the
    mean of squares."""
    summed: Callable[[Tensor], Tensor]
    """Returns the sum of a tensor over tensor ranks."""
    twisted: bool = False
    """Whether the two halves of a head have different cosines and sines."""


def normalised(
    rows: Sequence[NormedRow],
    weights: Sequence[Tensor],
    angles: tuple[Tensor, Tensor] | None,
    across: Across,
) -> tuple[Tensor, ...]:
    """The slices of each row: first the normalised and rotated ones, then views of the others.

    `weights` has the norm's weight [H * K] for each normalised slice, in order. `angles` are
    (cosines, sines) in float32, [T, K] or for each head [T, H, K]; None: no rotation. With
    j = i + K/2, the pair (x_i, x_j) becomes (x_i cos_i - x_j sin_i, x_j cos_j + x_i sin_j).
    """
    width = len(weights[0]) // rows[0].x_THX.shape[1]
    layout = tuple((row.parts, row.widths, RowGradient(row.parts * width)) for row in rows)
    xs = [row.x_THX for row in rows]
    made = _AcrossHeads.apply(across, layout, *(angles or (None, None)), *weights, *xs)
    assert isinstance(made, tuple)
    begin = 0
    for parts, widths, place in layout:
        for values_THK in made[begin + parts :][: len(widths[:1])]:
            offered(values_THK, place)
        begin += parts + len(widths)
    return made


class _AcrossHeads(torch.autograd.Function):
    """Autograd function of `normalised`.

    It is one function for all rows, because it communicates over tensor ranks and returns views.
    """

    @staticmethod
    def forward(
        ctx: Any,
        across: Across,
        layout: tuple[tuple[int, tuple[int, ...], RowGradient], ...],
        cos: Tensor | None,
        sin: Tensor | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """The results of `normalised`.

        `tensors` are the weights [H * K] of all normalised slices, then a tensor [T, H, X] for each
        row. `cos` and `sin` are [T, K] or [T, H, K], float32.
        """
        rows = len(layout)
        weights, xs = tensors[:-rows], [x.contiguous() for x in tensors[-rows:]]
        width = len(weights[0]) // xs[0].shape[1]
        parts = [
            x for row in zip(xs, layout, strict=True) for x in _parts(row[0], row[1][0], width)
        ]
        squares = across.summed(torch.cat([across_heads_sums(x, None) for x in parts]))
        each = zip(parts, weights, squares.split([len(x) for x in parts]), strict=True)
        how = cos, sin, across.twisted, across.numbers, across.eps
        out = [across_heads(*one, *how) for one in each]
        ctx.save_for_backward(cos, sin, squares, *weights, *xs, *out)
        ctx.across, ctx.layout = across, layout
        made, every = iter(out), []
        for x, (count, widths, _) in zip(xs, layout, strict=True):
            every += [next(made) for _ in range(count)]
            every += x[..., count * width :].split(widths, dim=-1) if widths else ()
        return tuple(every)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs of `forward`.

        `gradients` [T, H, width] are in the order of the results.
        """
        across, layout, given = ctx.across, ctx.layout, iter(gradients)
        cos, sin, squares, *kept = ctx.saved_tensors
        count = sum(parts for parts, *_ in layout)
        weights, xs, out = kept[:count], kept[count:-count], iter(kept[-count:])
        to_rows = [
            ([next(given) for _ in range(parts)], [next(given) for _ in widths])
            for parts, widths, _ in layout
        ]
        to_out = [one for to_parts, _ in to_rows for one in to_parts]
        products = across.summed(
            torch.cat([across_heads_sums(*pair) for pair in zip(to_out, out, strict=True)])
        )
        lengths = [len(x) * parts for x, (parts, *_) in zip(xs, layout, strict=True)]
        sums = zip(squares.split(lengths), products.split(lengths), strict=True)
        how = cos, sin, across.twisted, across.numbers, across.eps
        to_xs, to_weights, own = [], [], iter(weights)
        for x, to_row, of_row, (*_, place) in zip(xs, to_rows, sums, layout, strict=True):
            scales = [next(own) for _ in to_row[0]]
            to_x, left, begin = row_to_fill(place, to_row[1], x)
            made = across_heads_backward(to_row[0], left, begin, to_x, x, scales, *of_row, *how)
            to_xs.append(to_x)
            to_weights += made
        return None, None, None, None, *to_weights, *to_xs


def _parts(x_THX: Tensor, count: int, width: int) -> Iterator[Tensor]:
    return (x_THX[..., part * width : (part + 1) * width] for part in range(count))


@torch.library.custom_op(
    "dit::across_heads_sums", mutates_args=(), schema="(Tensor a, Tensor? b) -> Tensor"
)
def across_heads_sums(a_THK: Tensor, b_THK: Tensor | None) -> Tensor:
    """Sums [T], float32, of a * b over all numbers of a token; of a * a if `b` is None."""
    a_THK, b_THK = _columns(a_THK), None if b_THK is None else _columns(b_THK)
    tokens, heads, width = a_THK.shape
    sums_T = a_THK.new_empty(tokens, dtype=torch.float32)
    if tokens:
        rows, block = _tile(heads, width)
        _kernels().across_heads_sums[(tokens,)](
            *(a_THK, b_THK, sums_T, *a_THK.stride()[:2]),
            *((0, 0) if b_THK is None else b_THK.stride()[:2]),
            **{"H": heads, "WIDTH": width, "HEADS": rows, "BLOCK": block},
            num_warps=min(max(rows * block // 256, 1), 8),
        )
    return sums_T


@across_heads_sums.register_fake
def _(a_THK: Tensor, b_THK: Tensor | None) -> Tensor:  # noqa: ARG001
    return a_THK.new_empty(len(a_THK), dtype=torch.float32)


@torch.library.custom_op(
    "dit::across_heads",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor squares, Tensor? cos, Tensor? sin, bool twisted,"
    " int numbers, float eps) -> Tensor",
)
def across_heads(  # noqa: PLR0913  # what an operator takes is flat
    x_THK: Tensor,
    weight_X: Tensor,
    squares_T: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    twisted: bool,
    numbers: int,
    eps: float,
) -> Tensor:
    """The queries or keys `x_THK`, normalised across heads and rotated; contiguous [T, H, K].

    `squares_T` are the sums of squares over all tensor ranks.
    """
    x_THK, (tokens, heads, width) = _columns(x_THK), x_THK.shape
    out_THK = x_THK.new_empty(x_THK.shape)
    if tokens:
        angles, how = _angles(cos, sin), _how(cos, twisted, numbers, eps)
        _kernels().across_heads_forward[grid_of(tokens, heads)](
            *(x_THK, weight_X, squares_T, *angles, out_THK, tokens, *x_THK.stride()[:2]),
            **how,
            **_sizes(heads, width),
        )
    return out_THK


@across_heads.register_fake
def _(x_THK: Tensor, *_others: Any) -> Tensor:
    return x_THK.new_empty(x_THK.shape)


@torch.library.custom_op(
    "dit::across_heads_backward",
    mutates_args=("to_x",),
    schema="(Tensor[] to_out, Tensor[] to_others, int begin, Tensor(a!) to_x, Tensor x,"
    " Tensor[] weights, Tensor squares, Tensor products, Tensor? cos, Tensor? sin, bool twisted,"
    " int numbers, float eps) -> Tensor[]",
)
def across_heads_backward(  # noqa: PLR0913  # what an operator takes is flat
    to_out: list[Tensor],
    to_others: list[Tensor],
    begin: int,
    to_x_THX: Tensor,
    x_THX: Tensor,
    weights: list[Tensor],
    squares: Tensor,
    products: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    twisted: bool,
    numbers: int,
    eps: float,
) -> list[Tensor]:
    """Writes the gradient of x to `to_x_THX` and returns the gradients [H * K] of the weights.

    `to_out` are the gradients [T, H, K] of the normalised slices. Their gradients with respect to x
    are written to the first numbers of each head of `to_x_THX`, and `to_others` [T, H, width], the
    gradients of other slices, are copied to the numbers from `begin` on; numbers in between are not
    written. `weights` are [H * K]. `squares` and `products` are sums [slices * T], float32, slice
    after slice. `cos` and `sin` are [T, K] or [T, H, K].
    """
    (tokens, heads, _), (*_, width) = x_THX.shape, to_out[0].shape
    for one in to_others:
        to_x_THX[..., begin : begin + one.shape[-1]].copy_(one)
        begin += one.shape[-1]
    if not tokens:
        return [torch.zeros_like(weight) for weight in weights]
    angles, how = _angles(cos, sin), _how(cos, twisted, numbers, eps)
    grid, to_weights = grid_of(tokens, heads), []
    sums = squares.view(-1, tokens), products.view(-1, tokens)
    views = (_parts(x, len(to_out), width) for x in (x_THX, to_x_THX))
    for to_one, weight, square, product, x, to_x in zip(
        map(_columns, to_out), weights, *sums, *views, strict=True
    ):
        parts_PX = x.new_empty(grid[0], heads * width, dtype=torch.float32)
        # `x` and its gradient have the same strides.
        _kernels().across_heads_backward[grid](
            *(to_one, x, weight, square, product, *angles, to_x, parts_PX, tokens),
            *(*to_one.stride()[:2], *x.stride()[:2]),
            **how,
            **_sizes(heads, width),
        )
        to_weights.append(parts_PX.sum(0).to(weight.dtype))
    return to_weights


@across_heads_backward.register_fake
def _(
    to_out: list[Tensor],  # noqa: ARG001
    to_others: list[Tensor],  # noqa: ARG001
    begin: int,  # noqa: ARG001
    to_x_THX: Tensor,  # noqa: ARG001
    x_THX: Tensor,  # noqa: ARG001
    weights: list[Tensor],
    *_others: Any,
) -> list[Tensor]:
    return [torch.empty_like(weight) for weight in weights]


def grid_of(tokens: int, heads: int) -> tuple[int, int]:
    """(number of programs, number of groups of heads): the grid of a kernel launch."""
    return min(tokens, PROGRAMS), -(-heads // HEADS)


def _columns(x_THK: Tensor) -> Tensor:
    """`x_THK`, copied if the numbers of a head are not contiguous."""
    return x_THK if x_THK.stride(-1) == 1 else x_THK.contiguous()


def _angles(*both: Tensor | None) -> list[Tensor | None]:
    """Cosines and sines, copied if they are not contiguous, as the kernels require."""
    return [one if one is None else one.contiguous() for one in both]


def _how(cos: Tensor | None, twisted: bool, numbers: int, eps: float) -> dict[str, Any]:
    of_heads = cos is not None and cos.dim() == 3
    return {"EPS": eps, "NUMBERS": numbers, "OF_HEADS": of_heads, "TWISTED": twisted}


def _kernels() -> Any:
    from dit.models.kernels import across_heads_triton

    return across_heads_triton


def _tile(heads: int, width: int) -> tuple[int, int]:
    """(heads, columns) of a kernel's tile, rounded up to powers of two."""
    rows, block = (1 << max(size - 1, 1).bit_length() for size in (min(heads, HEADS), width))
    return rows, block


def _sizes(heads: int, width: int) -> dict[str, int]:
    """Launch parameters of the forward and backward kernels.

    Each thread loads 4 numbers of each half of a head at once; `maxnreg` lets a multiprocessor run
    1024 threads.
    """
    rows, block = _tile(heads, width // 2)
    warps = min(max(rows * block // 128, 1), 16)
    sizes = {"H": heads, "HALF": width // 2, "HEADS": rows, "BLOCK": block}
    return {**sizes, "num_warps": warps, "maxnreg": 64}
