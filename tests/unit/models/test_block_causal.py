"""Block-causal attention is that of a dense mask, on one rank and over context ranks."""

# T query tokens, S key tokens, H heads, K head width

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from dit.batch import SequenceShard
from dit.config import ContextComm
from dit.models.attention.block_causal import Segment, attend_block_causal, masked_attention
from dit.models.attention.kernels import attend_by_runs, attend_packed
from dit.models.attention.spans import Attend, Offsets
from dit.models.layers.joint_order import JointOrder, Piece, TokenRow, text_row
from tests.unit.models.test_joint_order import _context

CPU = torch.device("cpu")
HEADS, WIDTH = 2, 4
SEQUENCES = {
    "text, then a picture": [
        [Segment(True, 0, 3), Segment(False, 0, 6)],
        [Segment(False, 0, 5)],
        [Segment(True, 0, 4), Segment(False, 0, 2)],
    ],
    "two pictures side by side, texts between others": [
        [
            *(Segment(True, 0, 2), Segment(False, 4, 4), Segment(False, 8, 2)),
            *(Segment(True, 2, 3), Segment(False, 0, 4)),
        ],
        [Segment(True, 0, 1), Segment(False, 0, 3)],
        [Segment(True, 0, 0), Segment(False, 1, 3), Segment(True, 0, 5), Segment(False, 0, 1)],
    ],
}
"""Latents hold the target first, which is the last in the sequence."""


def rows_of(sequences: list[list[Segment]], ranks: int, rank: int) -> tuple[TokenRow, TokenRow]:
    share, pieces, start = SequenceShard(index=rank, count=ranks), [], 0
    for sample, segments in enumerate(sequences):
        real = sum(one.count for one in segments if not one.is_text)
        size = -(-real // 4) * 4
        pieces.append(Piece(sample, start, size, real))
        start += size
    lengths = [sum(one.count for one in segments if one.is_text) for segments in sequences]
    text = text_row(lengths, share=share, multiple=1, device=CPU)
    return TokenRow(pieces=tuple(pieces), rows=start // ranks, share=share), text.row


def seen(sequences: list[list[Segment]]) -> tuple[Tensor, dict[tuple[int, bool, int], int]]:
    """The mask over all tokens, and the number of each: by sample, kind, and place in its row."""
    numbers: dict[tuple[int, bool, int], int] = {}
    owners: list[tuple[int, int, bool]] = []
    for sample, segments in enumerate(sequences):
        for number, one in enumerate(segments):
            for token in range(one.first, one.first + one.count):
                numbers[sample, one.is_text, token] = len(owners)
                owners.append((sample, number, one.is_text))
    mask = torch.zeros(len(owners), len(owners), dtype=torch.bool)
    for i, (sample, segment, is_text) in enumerate(owners):
        for j, other in enumerate(owners):
            own = other[:2] == (sample, segment) and not is_text
            mask[i, j] = other[0] == sample and (j <= i or own)
    return mask, numbers


def tokens_of(rows: tuple[TokenRow, TokenRow], rank: int, numbers: dict) -> Tensor:
    """Number of the token in each row of a rank, latents and then text; -1 for padding."""
    found = []
    for kind, row in enumerate(rows):
        own = torch.full((row.rows,), -1)
        for piece in row.on(rank):
            for i in range(piece.real):
                own[piece.start + i] = numbers[piece.sample, kind > 0, rank * piece.size + i]
        found.append(own)
    return torch.cat(found)


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.einsum("thk,shk->hts", q, k) * WIDTH**-0.5
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("hts,shk->thk", weights, v)


def one_by_one(q: Tensor, k: Tensor, v: Tensor, offsets: Offsets) -> Tensor:
    """What a kernel of whole packs computes, which must hold each key in one sequence."""
    cu, key_cu = offsets.cu.tolist(), offsets.key_cu.tolist()
    assert cu[-1] == len(q) and key_cu[-1] == len(k)
    out = torch.zeros_like(q)
    for a, b, c, d in zip(cu, cu[1:], key_cu, key_cu[1:], strict=False):
        out[a:b] = masked(q[a:b], k[c:d], v[c:d], torch.ones(b - a, d - c, dtype=torch.bool))
    return out


KERNELS: dict[str, Attend] = {
    "runs": attend_by_runs,
    "packed": partial(attend_packed, kernel=one_by_one),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("comm", [ContextComm.A2A, ContextComm.ALL_GATHER])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", SEQUENCES)
def test_outputs_and_gradients_are_those_of_a_dense_mask(name, ranks, comm, kernel) -> None:
    """In float64; with `all_gather` each rank has its queries, with `a2a` all of some heads."""
    sequences = SEQUENCES[name]
    mask, numbers = seen(sequences)
    drawn = torch.Generator().manual_seed(3)
    shape = (3, len(numbers) + 1, HEADS, WIDTH)  # the last one is padding
    whole = torch.randn(shape, generator=drawn, dtype=torch.float64).requires_grad_()
    slope = torch.randn(shape[1:], generator=drawn, dtype=torch.float64)
    q, k, v = whole[:, :-1]
    expected = masked(q, k, v, mask)
    (wanted,) = torch.autograd.grad((expected * slope[:-1]).sum(), whole)

    every = [rows_of(sequences, ranks, rank) for rank in range(ranks)]
    ids = torch.cat([tokens_of(rows, rank, numbers) for rank, rows in enumerate(every)])
    each = len(ids) // ranks
    total, found = torch.zeros_like(whole), torch.zeros_like(expected)
    gathers = comm is ContextComm.ALL_GATHER
    for rank in range(ranks if gathers else 1):
        context = _context(ranks, rank, comm)
        made = JointOrder.of(
            every[rank], context=context, device=CPU, shared_by=None, sequences=sequences
        )
        exchange = made.apart
        met = ids if exchange.all_ranks is None else exchange.all_ranks.arrange(ids)
        mine = ids[rank * each : (rank + 1) * each] if gathers else met
        if exchange.own is not None and (gathers or ranks == 1):
            mine = exchange.own.arrange(mine)
            met = mine if ranks == 1 else met
        out = attend_block_causal(
            *(whole[0, mine], whole[1, met], whole[2, met], exchange.spans),
            attend=KERNELS[kernel],
            attend_masked=masked_attention,
        )
        real = mine >= 0
        found[mine[real]] = out[real].detach()
        (part,) = torch.autograd.grad((out[real] * slope[mine[real]]).sum(), whole)
        total += part
    assert (found - expected).abs().max() < 1e-12
    assert (total - wanted).abs().max() < 1e-12


def test_keys_are_copied_where_a_picture_does_not_see_its_sample_alone() -> None:
    """Those of text to picture are as they are: a copy costs as much as all keys."""
    calls = []
    for sequences in SEQUENCES.values():
        options = {"device": CPU, "shared_by": None, "sequences": sequences}
        rows = rows_of(sequences, 1, 0)
        order = JointOrder.of(rows, context=_context(1, 0, ContextComm.A2A), **options)
        calls.append(order.joined.spans.block_causal)
    assert [one is not None and one.keys is None for one in calls] == [True, False]
