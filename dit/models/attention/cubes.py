"""The cubes of 4 x 4 x 4 tokens of the samples of a pack, for attention among cubes.

Cubes at the border of a grid have fewer tokens; means are over real tokens.
"""

# T packed tokens, C cubes of a pack, B positions of a cube, S = C * B, H heads, K head width
# F H W frames, rows, columns; X any width

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from dit.config.sparsity import CUBE, CUBE_TOKENS, attended_cubes
from dit.pack_wire import to_device

_PAIRS_AT_ONCE = 2**25
"""Largest number of scores of pairs of cubes that are computed at once: 128 MiB in float32, which
are 8 heads of 2,048 cubes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TakenRows:
    """A gather of rows of a tensor, in which some rows of the result are zeros."""

    index: Tensor  # int64; 0 for rows of zeros
    empty: Tensor  # int64: the rows of the result that are zeros

    @classmethod
    def of(cls, index: Tensor, device: torch.device) -> TakenRows:
        """The gather of `index`, a CPU tensor in which negative numbers stand for zeros."""
        empty = (index < 0).nonzero().flatten()
        return cls(index=to_device(index.clamp(min=0), device), empty=to_device(empty, device))

    def taken(self, x_TXX: Tensor) -> Tensor:
        """The gathered rows of `x_TXX`, with zeros at the rows `empty`."""
        rows = x_TXX.index_select(0, self.index)
        # Not by a mask, which would read and write all rows again.
        return rows.index_fill_(0, self.empty, 0) if len(self.empty) else rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Cubes:
    """The cubes of 4 x 4 x 4 tokens of all samples of a pack, in the order of samples."""

    counts: tuple[int, ...]  # cubes of each sample
    chosen: tuple[int, ...]  # for each sample, number of cubes that a cube attends to in full
    of_places: TakenRows  # gathers S rows from T: the token at each position of each cube
    of_tokens: TakenRows  # gathers T rows from S: the position of each token; padding has none
    cube_of_tokens: TakenRows  # gathers T rows from C: the cube of each token; padding has none
    real_S: Tensor  # bool: whether there is a token at a position
    tokens_C11: Tensor  # float32: number of real tokens of each cube
    chosen_C: Tensor  # int32: `chosen` of the sample of each cube
    apart_CC: Tensor  # bool: whether two cubes are of different samples

    @classmethod
    def of(
        cls,
        grids: Sequence[tuple[int, int, int]],
        starts: Sequence[int],
        *,
        total: int,
        share: Fraction,
        device: torch.device,
    ) -> Cubes:
        """The cubes of samples with these `grids` (frames, rows, columns).

        `starts` are the rows of their first tokens in the pack of `total` rows; rows outside all
        samples are padding. `share` is the fraction of a sample's cubes to which each of its cubes
        attends in full.
        """
        places = [_places(grid, start) for grid, start in zip(grids, starts, strict=False)]
        counts = tuple(len(one) for one in places)
        chosen = tuple(attended_cubes(share, count) for count in counts)
        token_S = torch.cat(places).flatten()
        real_S = token_S >= 0
        place_T = torch.full((total,), -1)
        place_T[token_S[real_S]] = real_S.nonzero().flatten()
        owner_C = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        tokens_C = real_S.view(-1, CUBE_TOKENS).sum(1)
        return cls(
            counts=counts,
            chosen=chosen,
            of_places=TakenRows.of(token_S, device),
            of_tokens=TakenRows.of(place_T, device),
            cube_of_tokens=TakenRows.of(place_T // CUBE_TOKENS, device),
            real_S=to_device(real_S, device),
            tokens_C11=to_device(tokens_C.float()[:, None, None], device),
            chosen_C=to_device(torch.tensor(chosen, dtype=torch.int32)[owner_C], device),
            apart_CC=to_device(owner_C[:, None] != owner_C, device),
        )

    @property
    def heads_at_once(self) -> int:
        """Number of heads whose scores of all pairs of cubes are computed at once."""
        return max(1, _PAIRS_AT_ONCE // sum(self.counts) ** 2)

    @property
    def all_chosen(self) -> bool:
        """Whether each cube attends to all cubes in full, so that attention is dense."""
        return self.chosen == self.counts

    def placed(self, x_THK: Tensor) -> Tensor:
        """The tokens `x_THK` rearranged by cube, [C, B, H, K], with zeros at empty positions."""
        return _taken(x_THK, self.of_places, self.of_tokens).unflatten(0, (-1, CUBE_TOKENS))

    def of_order(self, x_CBHK: Tensor) -> Tensor:
        """The tokens [T, H, K] of `x_CBHK`, with zeros for padding: the inverse of `placed`."""
        return _taken(x_CBHK.flatten(0, 1), self.of_tokens, self.of_places)

    def with_means(self, x_THK: Tensor) -> tuple[Tensor, Tensor]:
        """(`x_THK` rearranged by cube as by `placed`, mean of each cube's tokens).

        Means are [C, H, K] in float32.
        """
        x_CBHK, mean_CHK = _PlacedWithMeans.apply(x_THK, self)
        return x_CBHK, mean_CHK


def _places(grid: tuple[int, int, int], start: int) -> Tensor:
    """The row of the token at each position [cubes, B] of a sample's cubes; -1 if it is empty."""
    whole = [-(-side // CUBE) * CUBE for side in grid]
    token_FHW = torch.full(whole, -1)
    frames, rows, columns = grid
    token_FHW[:frames, :rows, :columns] = start + torch.arange(math.prod(grid)).view(grid)
    split = token_FHW.unflatten(2, (-1, CUBE)).unflatten(1, (-1, CUBE)).unflatten(0, (-1, CUBE))
    return split.permute(0, 2, 4, 1, 3, 5).reshape(-1, CUBE_TOKENS)


def _taken(x: Tensor, there: TakenRows, back: TakenRows) -> Tensor:
    out = _Take.apply(x, there, back)
    assert isinstance(out, Tensor)
    return out


class _Take(torch.autograd.Function):
    """Autograd function that gathers rows of a tensor [rows, H, K], each at most once.

    Because no row is gathered twice, the backward pass is a gather, too (`back`).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: TakenRows, back: TakenRows) -> Tensor:
        ctx.back = back
        return there.taken(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back.taken(gradients[0]), None, None


class _PlacedWithMeans(torch.autograd.Function):
    """Autograd function of `Cubes.with_means`.

    Its backward pass adds the gradients of a token and of its cube's mean.
    """

    @staticmethod
    def forward(ctx: Any, x_THK: Tensor, cubes: Cubes) -> tuple[Tensor, Tensor]:
        ctx.cubes, ctx.dtype = cubes, x_THK.dtype
        ctx.set_materialize_grads(False)
        x_CBHK = cubes.of_places.taken(x_THK).unflatten(0, (-1, CUBE_TOKENS))
        return x_CBHK, x_CBHK.sum(1, dtype=torch.float32) / cubes.tokens_C11

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        placed_CBHK, mean_CHK = gradients
        cubes: Cubes = ctx.cubes
        each_CHK = None if mean_CHK is None else (mean_CHK / cubes.tokens_C11).to(ctx.dtype)
        if placed_CBHK is None:
            return None if each_CHK is None else cubes.cube_of_tokens.taken(each_CHK), None
        if each_CHK is not None:
            placed_CBHK = placed_CBHK + each_CHK[:, None]
        return cubes.of_tokens.taken(placed_CBHK.flatten(0, 1)), None
