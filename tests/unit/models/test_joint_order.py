"""Latents and text in rows of their own, and the order in which attention takes both."""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dit.batch import SequenceShard
from dit.config import ContextComm
from dit.models.attention.spans import attend_one_by_one
from dit.models.layers.context_parallel import Context, check_joint_context
from dit.models.layers.joint_order import (
    JointOrder,
    Piece,
    TokenRow,
    row_exchange,
    text_row,
    text_rows,
)
from tests.packs import random_pack, tiny_model

CPU = torch.device("cpu")
LATENTS = (Piece(0, 0, 8, 5), Piece(1, 8, 8, 8), Piece(2, 16, 4, 1))
TEXTS = [3, 0, 6]


def _rows(ranks: int, rank: int, *, multiple: int = 1) -> tuple[TokenRow, Any]:
    share = SequenceShard(index=rank, count=ranks)
    latents = TokenRow(pieces=LATENTS, rows=20 // ranks, share=share)
    return latents, text_row(TEXTS, share=share, multiple=multiple, device=CPU)


def _order(ranks: int, rank: int, comm: ContextComm, **options: int) -> JointOrder:
    latents, text = _rows(ranks, rank, **options)
    context = _context(ranks, rank, comm)
    return JointOrder.of((latents, text.row), context=context, device=CPU, shared_by=None)


def _context(ranks: int, rank: int, comm: ContextComm) -> Context:
    group: Any = SimpleNamespace(size=lambda: ranks, rank=lambda: rank)
    context = Context.__new__(Context)  # a group that only says how large it is
    object.__setattr__(context, "group", group)
    object.__setattr__(context, "comm", comm)
    return context


def _named(ranks: int, rank: int, **options: int) -> torch.Tensor:
    """The rows of a rank, each token with its own number: 100 · sample + token, text from 50 on."""
    latents, text = _rows(ranks, rank, **options)
    image = torch.full((latents.rows,), -1)
    for piece in latents.on(rank):
        first = 100 * piece.sample + rank * piece.size
        image[piece.start : piece.start + piece.real] = torch.arange(first, first + piece.real)
    whole = torch.cat([100 * i + 50 + torch.arange(n) for i, n in enumerate(TEXTS)])
    words = torch.where(text.source_L < sum(TEXTS), text.of(whole), -1)
    return torch.cat((image, words))


JOINT = [*range(5), *range(50, 53), *range(100, 108), 200, *range(250, 256)]


@pytest.mark.parametrize("multiple", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_together_have_each_token_once_and_in_joint_order(ranks, multiple):
    order = _order(ranks, 0, ContextComm.A2A, multiple=multiple)
    rows = torch.cat([_named(ranks, rank, multiple=multiple) for rank in range(ranks)])
    # The gather within a rank comes before the exchange where rows are joined, after it elsewhere.
    apart = order.own if ranks == 1 else order.apart.all_ranks
    assert apart is not None
    met = apart.arrange(rows)
    lengths = torch.tensor(order.apart.spans.lengths)
    assert lengths.tolist() == [8, 8, 7]
    # A rank's tokens follow those of the rank before; a sample's tokens lie side by side.
    assert (met[: len(JOINT)] // 100).tolist() == [n // 100 for n in JOINT]
    assert sorted(met[: len(JOINT)].tolist()) == JOINT and (met[len(JOINT) :] == -1).all()
    assert torch.equal(apart.restore(met), rows)
    joint_rows = torch.cat(
        [
            _order(ranks, rank, ContextComm.A2A, multiple=multiple).own.arrange(
                _named(ranks, rank, multiple=multiple)
            )
            for rank in range(ranks)
        ]
    )
    if order.joined.all_ranks is not None:
        joint_rows = order.joined.all_ranks.arrange(joint_rows)
    assert torch.equal(joint_rows, met)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_keeps_its_queries_has_them_in_joint_order_too(rank):
    order = _order(2, rank, ContextComm.ALL_GATHER)
    mine = order.own.arrange(_named(2, rank))
    spans = order.apart.spans
    assert spans.key_lengths == tuple(n for n, m in zip((8, 8, 7), (4, 4, 4), strict=True) if m)
    for start, length, sample in zip(spans.starts, spans.lengths, range(3), strict=True):
        assert (mine[start : start + length] // 100 == sample).all()
    assert (mine[sum(spans.lengths) :] == -1).all()


def test_joint_rows_come_apart_as_they_went_in():
    order = _order(1, 0, ContextComm.A2A, multiple=4)
    rows = [torch.randn(n, 3, requires_grad=True) for n in order.sizes]
    joint = order.join(rows)
    apart = order.split(joint)
    assert all(torch.equal(a, b) for a, b in zip(apart, rows, strict=True))
    assert torch.equal(order.latents(joint), rows[0])
    (apart[0] * 2 + apart[1].sum()).sum().backward()
    assert rows[0].grad is not None and (rows[0].grad == 2).all()
    assert rows[1].grad is not None and (rows[1].grad == rows[0].numel()).all()


@pytest.mark.parametrize("lengths", [[3, 0, 6], [0, 0], [1], [16, 5]])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("multiple", [1, 2, 16])
def test_every_word_is_on_one_rank(lengths, ranks, multiple):
    whole = torch.arange(1, sum(lengths) + 1)
    found = []
    for rank in range(ranks):
        share = SequenceShard(index=rank, count=ranks)
        text = text_row(lengths, share=share, multiple=multiple, device=CPU)
        assert len(text.source_L) == text_rows(lengths, share=share, multiple=multiple) >= 1
        assert len(text.source_L) % multiple == 0
        words = text.of(whole)
        found += [int(word) for word in words if word]
        owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        real = words > 0
        assert torch.equal(text.sample_L[real], owner[words[real] - 1])
    assert sorted(found) == whole.tolist()


def test_the_latent_row_is_that_of_the_pack():
    model = tiny_model()
    batch = random_pack([(1, 3, 5), (2, 2, 2)], [4, 1], model=model)
    row = TokenRow.of_stream(batch, attended=batch.num_tokens)
    assert row.pieces == (Piece(0, 0, 16, 15), Piece(1, 16, 8, 8))
    assert row.lengths == {0: 15, 1: 8} and row.rows == 24


def test_a_ring_of_two_rows_is_refused():
    with pytest.raises(
        ValueError,
        match=r"cp_comm_type=p2p works for a single sequence .*=a2a or all_gather",
    ):
        check_joint_context(ContextComm.P2P, 2)
    check_joint_context(ContextComm.P2P, 1)


def test_references_count_apart_or_together():
    """Of a target of 2 x 3, references of 2 and 4, and a sample without any."""
    batch = SimpleNamespace(
        starts=(0, 16, 24),
        grids=((1, 2, 3), (1, 1, 5)),
        references=(((1, 1, 2), (1, 2, 2)), ()),
        num_samples=2,
        segment_T=range(24),
        share=SequenceShard(),
    )
    pack: Any = batch
    apart, together = (
        [(piece.before, piece.real) for piece in TokenRow.of_pictures(pack, **told).pieces]
        for told in ({}, {"references_meet": True})
    )
    assert apart == [(0, 6), (6, 2), (8, 4), (0, 5)]
    assert together == [(0, 6), (6, 6), (0, 5)]


def test_a_row_attends_to_another_one_sample_by_sample():
    """One rank: a sample without words gets zeros, and words of no picture are read by nobody."""
    latents, text = _rows(1, 0, multiple=4)
    context = _context(1, 0, ContextComm.A2A)
    exchange = row_exchange(latents, text.row, context=context, device=CPU)
    rng = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(n, 2, 4, generator=rng) for n in (20, text.row.rows, text.row.rows))
    found = context.attend_across(attend_one_by_one, q, (k, v), exchange)
    for piece, number, first in zip(LATENTS, TEXTS, (0, 3, 3), strict=True):
        rows, keys = slice(piece.start, piece.start + piece.real), slice(first, first + number)
        score = torch.einsum("thk,shk->hts", q[rows], k[keys]) / 2
        wanted = torch.einsum("hts,shk->thk", score.softmax(-1), v[keys])
        torch.testing.assert_close(found[rows], wanted)
        assert found[rows].any() == (number > 0)


@pytest.mark.parametrize("comm", [ContextComm.A2A, ContextComm.ALL_GATHER])
@pytest.mark.parametrize("rank", [0, 1])
def test_queries_and_keys_of_two_rows_ascend(rank, comm):
    """As kernels need it; samples without a query on this rank have keys behind all others."""
    latents, text = _rows(2, rank)
    context = _context(2, rank, comm)
    for asking, answering in ((latents, text.row), (text.row, latents)):
        spans = row_exchange(asking, answering, context=context, device=CPU).spans
        ranks = [rank] if comm is ContextComm.ALL_GATHER else range(2)
        here = {piece.sample for one in ranks for piece in asking.on(one) if piece.real}
        both = [sample for sample in sorted(here) if sample in answering.lengths]
        assert spans.key_lengths == tuple(answering.lengths[sample] for sample in both)
        assert [*spans.starts] == sorted(spans.starts)
        ends = [*accumulate(spans.key_lengths, initial=0)]
        assert [*spans.key_starts] == ends[:-1]  # one behind the other


def test_a_ring_does_not_take_two_rows():
    latents, text = _rows(2, 0)
    context = _context(2, 0, ContextComm.P2P)
    with pytest.raises(ValueError, match="p2p works for a single sequence of tokens"):
        row_exchange(latents, text.row, context=context, device=CPU)
