"""Separate rows (streams of tokens) of latents and text, and the joint order of attention.

1. Piece, TokenRow    where the samples are in a row, and this rank's shard of the row
2. text_row           this context rank's shard of the text of a pack
3. row_exchange       the exchange for attention from one row to another
4. JointOrder         permutations to [latents of s0, text of s0, latents of s1, ..., padding]

Softmax attention does not depend on the order of keys, so one joint order serves every family. In
joint order the real tokens of a sample are adjacent, latents before text, and all padding is at the
end; so the attention functions for a single row can be used.

Under context parallelism each rank has a shard of every piece of every row, so no text is computed
twice. Under sequence parallelism tensor ranks divide each row separately.
"""

# T latent tokens, L text tokens, J = T + L tokens of both, all of this context rank
# W = R * J tokens of all R context ranks, X any width
# With sequence parallelism a tensor rank has an equal shard of T, of L and of J.

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.nn.functional import pad

from dit.batch import PackedBatch, SequenceShard, TokenStream
from dit.config import ContextComm
from dit.models.attention.block_causal import Located, Segment, SequencePlaces, calls_of
from dit.models.attention.spans import Spans
from dit.models.layers.context_parallel import (
    Context,
    RowExchange,
    TokenExchange,
    TokenOrder,
    check_joint_context,
    then_others,
)
from dit.pack_wire import to_device


@dataclass(frozen=True, slots=True)
class Piece:
    """Adjacent tokens of one sample in a row: `before` others, `real` tokens, then padding."""

    sample: int
    start: int  # index of the first token in the row
    size: int  # number of tokens, padding included
    real: int  # number of real tokens
    before: int = 0  # number of tokens before the real ones, which belong to another picture

    def on(self, share: SequenceShard) -> Piece:
        """The part of the piece on the context rank of `share`, with `start` in that rank's row."""
        assert self.size % share.count == 0
        size = self.size // share.count
        first, stop = (
            min(max(row - share.index * size, 0), size)
            for row in (self.before, self.before + self.real)
        )
        return Piece(self.sample, self.start // share.count, size, stop - first, first)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRow:
    """A row: one stream of tokens of a pack; each context rank has a shard of every piece."""

    pieces: tuple[Piece, ...]  # of the whole row, in order; the number of ranks divides sizes
    rows: int  # number of tokens on each context rank, including padding at its end
    share: SequenceShard  # the shard of this context rank

    @classmethod
    def of_stream(cls, stream: TokenStream, *, attended: Sequence[int]) -> TokenRow:
        """The row of the tokens of `stream`.

        `attended` has, for each sample, the number of tokens that attention processes, which may
        include padding.
        """
        spans = zip(pairwise(stream.starts), attended, strict=True)
        pieces = [Piece(i, a, b - a, real) for i, ((a, b), real) in enumerate(spans)]
        assert all(piece.real <= piece.size for piece in pieces), "the pack lacks attended padding"
        return cls(pieces=tuple(pieces), rows=len(stream.segment_T), share=stream.share)

    @classmethod
    def of_pictures(cls, batch: PackedBatch, *, references_meet: bool = False) -> TokenRow:
        """The row of latents for attention within each picture of `batch`.

        Each target and each reference counts as a separate sample, so they do not attend to each
        other. With `references_meet`, all references of a sample together count as one sample.
        """
        pieces: list[Piece] = []
        samples = zip(pairwise(batch.starts), batch.grids, batch.references, strict=True)
        for (start, stop), own, others in samples:
            sizes = [math.prod(grid) for grid in (own, *others)]
            if references_meet:
                sizes[1:] = [sum(sizes[1:])] * bool(others)
            for first, end in pairwise(accumulate(sizes, initial=0)):
                pieces.append(Piece(len(pieces), start, stop - start, end - first, first))
        return cls(pieces=tuple(pieces), rows=len(batch.segment_T), share=batch.share)

    def on(self, rank: int) -> list[Piece]:
        """The pieces of the row on context rank `rank`; `start` counts in that rank's row."""
        return [piece.on(replace(self.share, index=rank)) for piece in self.pieces]

    @property
    def lengths(self) -> dict[int, int]:
        """Number of real tokens, on all ranks together, of each sample that has a piece."""
        lengths: dict[int, int] = {}
        for piece in self.pieces:
            lengths[piece.sample] = lengths.get(piece.sample, 0) + piece.real
        return lengths


@dataclass(frozen=True, slots=True)
class TextRow:
    """The shard of a pack's text on this context rank."""

    row: TokenRow
    source_L: Tensor  # index of each token in the text of the whole pack; its length for padding
    sample_L: Tensor  # sample of each token; padding belongs to an adjacent sample

    def of(self, whole_X: Tensor) -> Tensor:
        """The rows [L, ...] of this rank's tokens, from `whole_X` with a row per token of the pack.

        Padding gets zeros.
        """
        last = (0, 0) * (whole_X.dim() - 1)
        return pad(whole_X, (*last, 0, 1)).index_select(0, self.source_L)


def _multiple_of(number: int, length: int) -> int:
    return -(-length // number) * number


def _padded(length: int, share: SequenceShard) -> int:
    return _multiple_of(share.count, length)


def text_rows(lengths: Sequence[int], *, share: SequenceShard, multiple: int) -> int:
    """The number of text tokens on each context rank, including the padding by `text_row`.

    `lengths` are the numbers of text tokens of samples; `multiple` is as in `text_row`.
    """
    here = sum(_padded(length, share) for length in lengths) // share.count
    return _multiple_of(multiple, max(here, 1))


def text_row(
    lengths: Sequence[int], *, share: SequenceShard, multiple: int, device: torch.device
) -> TextRow:
    """This context rank's shard of the text of samples with `lengths` tokens, which may be 0.

    The number of tokens on a rank is padded to a `multiple`, for sequence parallelism. It is never
    0, so that weights for text always have a gradient.
    """
    sizes = [_padded(length, share) for length in lengths]
    starts = list(accumulate(sizes, initial=0))
    every = enumerate(zip(starts, sizes, lengths, strict=False))
    pieces = tuple(Piece(i, start, size, real) for i, (start, size, real) in every if size)
    rows = text_rows(lengths, share=share, multiple=multiple)
    row = TokenRow(pieces=pieces, rows=rows, share=share)
    first = list(accumulate(lengths, initial=0))  # token of each sample in the text of the pack
    source_L = torch.full((rows,), first[-1])
    sample_L = torch.full((rows,), max(len(lengths) - 1, 0))
    for piece in row.on(share.index):
        here = slice(piece.start, piece.start + piece.size)
        sample_L[here] = piece.sample
        begin = first[piece.sample] + share.index * piece.size
        source_L[here][: piece.real] = torch.arange(begin, begin + piece.real)
    return TextRow(row, *to_device(torch.stack((source_L, sample_L)), device))


def row_exchange(
    asking: TokenRow, answering: TokenRow, *, context: Context, device: torch.device
) -> RowExchange:
    """The exchange for attention from tokens of `asking` to the same sample's in `answering`.

    Context ranks divide both rows.

    Raises:
        ValueError: there are several context ranks, and `model.cp_comm_type` is p2p.
    """
    check_joint_context(context.comm, context.group.size())
    gathers = context.group.size() > 1 and context.comm is ContextComm.ALL_GATHER
    if gathers:
        own, own_real = _joint_rows([asking], asking.share.index)
    else:
        own, own_real = _joint_rows_of_all([asking])
    # Keys of samples without queries come last, so that all other keys are adjacent.
    every, every_real = _joint_rows_of_all([answering], asked=defaultdict(int, own_real))
    queries, keys = _spans_of(own_real), _spans_of(every_real)
    # Sorted by the first key; samples without keys get an empty span after all keys.
    nowhere = (sum(every_real.values()), 0)
    samples = sorted(queries, key=lambda sample: (keys.get(sample, nowhere)[0], sample))
    spans = Spans.of(
        [queries[sample] for sample in samples],
        [keys.get(sample, nowhere) for sample in samples],
        total=len(own),
        device=device,
    )
    return RowExchange(
        spans=spans,
        queries=TokenOrder.from_pack(own, device=device),
        keys=TokenOrder.from_pack(every, device=device),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class JointOrder:
    """Permutations between the separate rows of a pack and one joint row of all their tokens."""

    sizes: tuple[int, ...]  # numbers of tokens of the rows on this context rank
    own: TokenOrder  # between the concatenated rows of this rank and its joint row
    apart: TokenExchange  # for joint attention of separate rows
    joined: TokenExchange  # for attention in the joint row
    shared_by: dist.ProcessGroup | None  # tensor ranks that divide tokens; None if they do not

    @classmethod
    def of(
        cls,
        rows: Sequence[TokenRow],
        *,
        context: Context,
        device: torch.device,
        shared_by: dist.ProcessGroup | None,
        sequences: Sequence[Sequence[Segment]] | None = None,
    ) -> JointOrder:
        """The joint order of `rows`: for each sample, its tokens of the first row, then the next.

        `shared_by` are tensor ranks that divide tokens, or None. `sequences` has the segments of
        each sample and makes attention block-causal (`block_causal.py`); `rows` must then be
        latents, then text.
        """
        ranks = rows[0].share.count
        orders = [_joint_rows(rows, rank) for rank in range(ranks)]
        mine, mine_real = orders[rows[0].share.index]
        own = TokenOrder.from_pack(mine, device=device)
        gathers = ranks > 1 and context.comm is ContextComm.ALL_GATHER
        everyone, real = _joint_rows_of_all(rows, asked=mine_real if gathers else None)
        keys = _spans_of(real)
        queries, total = (_spans_of(mine_real), len(mine)) if gathers else (keys, len(everyone))
        asking = [queries[sample] for sample in keys]
        spans = Spans.of(asking, [*keys.values()], total=total, device=device)
        if sequences is not None:
            every = _located(rows, range(ranks), sequences, keys)
            own_ranks = [rows[0].share.index]
            asked = _located(rows, own_ranks, sequences, queries) if gathers else every
            spans = replace(spans, block_causal=calls_of(asked, every, total=total, device=device))
        apart = joined = None
        if ranks > 1:
            inverse = torch.cat([o.argsort() + r * len(o) for r, (o, _) in enumerate(orders)])
            apart = TokenOrder.from_pack(everyone, device=device)
            joined = TokenOrder.from_pack(inverse[everyone], device=device)
        return cls(
            sizes=tuple(row.rows for row in rows),
            own=own,
            apart=TokenExchange(spans=spans, own=own, all_ranks=apart),
            joined=TokenExchange(spans=spans, all_ranks=joined),
            shared_by=shared_by,
        )

    def join(self, rows: Sequence[Tensor]) -> Tensor:
        """The joint row [J, X], computed from the separate `rows`.

        Under sequence parallelism, rows are this tensor rank's shards.
        """
        return self._scattered(self.own.arrange(torch.cat([self._whole(x) for x in rows])))

    def split(self, joint_JX: Tensor) -> tuple[Tensor, ...]:
        """The separate rows, computed from the joint row `joint_JX`: the inverse of `join`.

        Under sequence parallelism, rows are this tensor rank's shards.
        """
        apart = self.own.restore(self._whole(joint_JX)).split(self.sizes)
        return tuple(self._scattered(x) for x in apart)

    def latents(self, joint_JX: Tensor) -> Tensor:
        """The latents [T, X] of the joint row `joint_JX`, gathered from all tensor ranks."""
        return self.own.restore(joint_JX)[: self.sizes[0]]

    def arranged(self, rows: Sequence[Tensor]) -> Tensor:
        """Values [J, ...] in joint order, from the values of the tokens of each row.

        Examples are rotary angles and sample indices. `rows` are those of this context rank,
        gathered from all tensor ranks.
        """
        return self.own.arrange(torch.cat(list(rows)))

    def _whole(self, x: Tensor) -> Tensor:
        """The row `x` of this context rank, gathered from its tensor ranks.

        Each tensor rank computes the whole gradient of the row, so gradients are not summed.
        """
        if self.shared_by is None:
            return x
        return gather_from_sequence_parallel_region(
            x, tensor_parallel_output_grad=False, group=self.shared_by
        )

    def _scattered(self, x: Tensor) -> Tensor:
        if self.shared_by is None:
            return x
        return scatter_to_sequence_parallel_region(x, group=self.shared_by)


Real = dict[int, int]  # number of real tokens by sample


def _joint_rows(rows: Sequence[TokenRow], rank: int) -> tuple[Tensor, Real]:
    """(indices of a rank's tokens in joint order, padding last; real tokens by sample)."""
    return _in_order([_real_rows(rows, rank)], sum(row.rows for row in rows))


def _joint_rows_of_all(
    rows: Sequence[TokenRow], *, asked: Real | None = None
) -> tuple[Tensor, Real]:
    """(indices of all ranks' tokens in joint order, padding last; number of real tokens by sample).

    Indices count in the concatenation of `rows` of rank 0, of rank 1, and so on. `asked` has the
    number of queries by sample; if given, samples without queries come after all others.
    """
    each, ranks = sum(row.rows for row in rows), rows[0].share.count
    parts = [
        [(sample, rows_of + rank * each) for sample, rows_of in _real_rows(rows, rank)]
        for rank in range(ranks)
    ]
    return _in_order(parts, each * ranks, asked=asked)


def _real_rows(rows: Sequence[TokenRow], rank: int) -> Iterator[tuple[int, Tensor]]:
    """Yields (sample, indices of its real tokens) for each piece on context rank `rank`.

    Indices count in the concatenation of `rows` on that rank.
    """
    offset = 0
    for row in rows:
        for piece in row.on(rank):
            first = offset + piece.start + piece.before
            yield piece.sample, torch.arange(first, first + piece.real)
        offset += row.rows


def _located(
    rows: Sequence[TokenRow],
    ranks: Sequence[int],
    sequences: Sequence[Sequence[Segment]],
    spans: Mapping[int, tuple[int, int]],
) -> Located:
    """Maps each sample in `spans` to (its first row in joint order, positions of its tokens).

    Positions are those in the sample's sequence, of the tokens on `ranks`, ordered by rank, then as
    in `_real_rows`. Samples without tokens are left out.
    """
    kinds = [number > 0 for number in range(len(rows))]  # latents, then text
    whole = [[SequencePlaces.of(one, text=kind) for kind in kinds] for one in sequences]
    parts: dict[int, list[SequencePlaces]] = {sample: [] for sample in spans}
    for rank in ranks:
        for number, row in enumerate(rows):
            for piece in row.on(rank):
                if piece.sample in parts:
                    own = whole[piece.sample][number]
                    parts[piece.sample].append(own.part(rank * piece.size, piece.real))
    return {
        sample: (first, SequencePlaces.joined(parts[sample]))
        for sample, (first, number) in spans.items()
        if number
    }


def _in_order(
    parts: Sequence[Iterator[tuple[int, Tensor]] | list],
    total: int,
    *,
    asked: Real | None = None,
) -> tuple[Tensor, Real]:
    """(indices of tokens in joint order, int64 [J] or [W]; number of real tokens by sample).

    Each of `parts` has (sample, indices of its real tokens) for the pieces of one rank; `total` is
    the number of tokens. If `asked` is given, samples without queries in it follow all others.
    Padding comes last.
    """
    by_sample: dict[int, list[Tensor]] = {}
    for part in parts:
        for sample, rows_of in part:
            by_sample.setdefault(sample, []).append(rows_of)
    samples = sorted(
        by_sample, key=lambda sample: (asked is not None and not asked[sample], sample)
    )
    order = {sample: torch.cat(by_sample[sample]) for sample in samples}
    # With an empty tensor, in case a rank has no real tokens.
    real = torch.cat([*order.values(), torch.zeros(0, dtype=torch.int64)])
    return then_others(real, total), {sample: len(rows_of) for sample, rows_of in order.items()}


def _spans_of(real: Real) -> dict[int, tuple[int, int]]:
    """(first row, number of rows) of each sample in joint order; `real` is sorted in that order."""
    starts = accumulate(real.values(), initial=0)
    return {sample: (at, n) for (sample, n), at in zip(real.items(), starts, strict=False)}
