"""Video Sparse Attention (VSA, arXiv:2505.13389): attention among the cubes of a sample.

1. Cubes         which tokens of a pack are in which cube of 4 x 4 x 4, and how many it attends to
2. attend_cubes  coarse: the means of cubes attend to each other, times a gate of each token
                 fine: tokens attend to those of the cubes whose coarse scores are highest

The choice has no gradient; the coarse part carries one to what it was made of. Cubes at the border
of a grid have fewer tokens: means and softmax are over real ones. Samples never see each other.
`tests` hold every way to compute it against dense attention with a mask.
"""

# T packed tokens, C cubes of a pack, B places of a cube, S = C * B, H heads, K head width
# J cubes that one attends to, at most; F H W frames, rows, columns; X any width

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from dit.config.sparse_share import CUBE, CUBE_TOKENS, attended_cubes
from dit.models.attention.spans import Attend, Spans
from dit.pack_wire import to_device


@dataclass(frozen=True, kw_only=True, slots=True)
class TakenRows:
    """What to take of rows: their indices, and where there is nothing to take."""

    index: Tensor  # int64; any row where `empty` is True
    empty_XX1: Tensor  # bool [rows, 1, 1]

    @classmethod
    def of(cls, index: Tensor, empty: Tensor, device: torch.device) -> TakenRows:
        """From the host."""
        index, empty = index.masked_fill(empty, 0), empty[:, None, None]
        return cls(index=to_device(index, device), empty_XX1=to_device(empty, device))

    def taken(self, x_TXX: Tensor) -> Tensor:
        """The rows; zeros where there is nothing."""
        return x_TXX.index_select(0, self.index).masked_fill_(self.empty_XX1, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cubes:
    """The cubes of a pack, those of a sample one after the other."""

    counts: tuple[int, ...]  # cubes of each sample
    chosen: tuple[int, ...]  # how many of them each attends to in full
    of_places: TakenRows  # S rows of T: the token at each place of each cube
    of_tokens: TakenRows  # T rows of S: the place of each token; padding has none
    cube_T: Tensor  # int64: the cube of each token, 0 of padding
    tokens_C11: Tensor  # float32: real tokens of each cube
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
        """`grids` are frames, rows and columns of the samples, whose tokens begin at `starts`.

        Of `total` rows all others are padding.
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
            of_places=TakenRows.of(token_S, ~real_S, device),
            of_tokens=TakenRows.of(place_T, place_T < 0, device),
            cube_T=to_device(place_T.clamp(min=0) // CUBE_TOKENS, device),
            tokens_C11=to_device(tokens_C.float()[:, None, None], device),
            chosen_C=to_device(torch.tensor(chosen, dtype=torch.int32)[owner_C], device),
            apart_CC=to_device(owner_C[:, None] != owner_C, device),
        )

    @property
    def all_chosen(self) -> bool:
        """Whether every token attends to all others of its sample."""
        return self.chosen == self.counts

    def placed(self, x_THK: Tensor) -> Tensor:
        """Tokens [T, H, K] -> [C, B, H, K] by cubes, zeros at places without one."""
        return _taken(x_THK, self.of_places, self.of_tokens).unflatten(0, (-1, CUBE_TOKENS))

    def of_order(self, x_CBHK: Tensor) -> Tensor:
        """The way back; padding gets zeros."""
        return _taken(x_CBHK.flatten(0, 1), self.of_tokens, self.of_places)

    def mean(self, x_CBHK: Tensor) -> Tensor:
        """Of the real tokens of each cube [C, H, K], float32."""
        return x_CBHK.sum(1, dtype=torch.float32) / self.tokens_C11


def _places(grid: tuple[int, int, int], start: int) -> Tensor:
    """The token at each place [cubes, B] of each cube of a sample, frames first; -1: none."""
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
    """Each row is taken once at most, so that gradients are taken back, and never added.

    TakenRows and gradients are [rows, H, K].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: TakenRows, back: TakenRows) -> Tensor:
        ctx.back = back
        return there.taken(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back.taken(gradients[0]), None, None


def attend_cubes(
    qkv: tuple[Tensor, Tensor, Tensor], gate_THK: Tensor, spans: Spans, *, attend: Attend
) -> Tensor:
    """Fine attention + gate * coarse [T, H, K], of queries, keys and values [T, H, K].

    `attend` computes the fine part where all cubes are chosen.
    """
    cubes = spans.cubes
    assert cubes is not None
    q, k, v = map(cubes.placed, qkv)
    means = tuple(map(cubes.mean, (q, k, v)))
    score_HCC = torch.einsum("chk,dhk->hcd", *means[:2]) * gate_THK.shape[-1] ** -0.5
    score_HCC = score_HCC.masked_fill(cubes.apart_CC, -math.inf)
    coarse_CHK = torch.einsum("hcd,dhk->chk", score_HCC.softmax(-1), means[2])
    gated_CBHK = cubes.placed(gate_THK) * coarse_CHK.to(gate_THK.dtype)[:, None]
    if cubes.all_chosen:
        return attend(*qkv, spans) + cubes.of_order(gated_CBHK)
    # The highest scores of a row, so that those of other samples, if any, are the last.
    chosen_HCJ = score_HCC.detach().topk(max(cubes.chosen), dim=-1).indices
    if gate_THK.is_cuda:
        from dit.models.attention.cube_kernel import attend_in_blocks

        return cubes.of_order(attend_in_blocks((q, k, v), chosen_HCJ, cubes) + gated_CBHK)
    return attend_by_mask(qkv, chosen_HCJ, spans) + cubes.of_order(gated_CBHK)


def attend_by_mask(qkv: tuple[Tensor, Tensor, Tensor], chosen_HCJ: Tensor, spans: Spans) -> Tensor:
    """The fine part on any device: dense attention of each sample, with a mask."""
    cubes = spans.cubes
    assert cubes is not None
    pieces, row = [], 0
    firsts = accumulate(cubes.counts, initial=0)
    samples = zip(spans.starts, spans.lengths, firsts, cubes.counts, cubes.chosen, strict=False)
    for start, length, first, count, most in samples:
        mine = slice(start, start + length)
        mask_HTT = None
        if most < count:
            own_HCJ = chosen_HCJ[:, first : first + count, :most] - first
            sees_HCC = torch.zeros(len(own_HCJ), count, count, dtype=torch.bool)
            sees_HCC = sees_HCC.to(own_HCJ.device).scatter(2, own_HCJ, True)
            cube_T = cubes.cube_T[mine] - first
            mask_HTT = sees_HCC[:, cube_T][:, :, cube_T]
        q, k, v = (x[mine].transpose(0, 1)[None] for x in qkv)
        out_HTK = scaled_dot_product_attention(q, k, v, attn_mask=mask_HTT)[0]
        pieces.append(pad(out_HTK.transpose(0, 1), (0, 0, 0, 0, start - row, 0)))
        row = start + length
    return pad(torch.cat(pieces), (0, 0, 0, 0, 0, spans.total - row))
