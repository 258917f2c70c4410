"""Latents and text in separate rows, and the joint order in which attention reads both.

1. Piece, TokenRow    the places of samples in one row, and this rank's shard of it
2. text_row           text, which arrives whole, with this context rank's shard of each piece
3. row_exchange       connects the queries of one row to the keys of another
4. JointOrder         both rows <-> [latents of s0, text of s0, latents of s1, ..., padding]

Softmax attention does not depend on the order of keys, so one order serves every family. The real
tokens of a sample are adjacent in it, latents before text, and all padding is at the end, so the
attention functions for one row can be used.

Under context parallelism each rank holds a shard of every piece of both rows, so that no text is
computed twice. Under sequence parallelism tensor ranks divide each row separately.
"""

# T latent tokens, L text tokens, J = T + L tokens of both, all of this context rank
# W = R * J tokens of all R context ranks, X any width
# With sequence parallelism a tensor rank holds an equal part of T, of L and of J.

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
    """Adjacent rows of one sample in a token row: other pictures' tokens, real tokens, padding."""

    sample: int
    start: int  # first row
    size: int  # rows, padding included
    real: int
    before: int = 0  # rows in front of the real ones, of another picture of the sample

    def on(self, share: SequenceShard) -> Piece:
        """The part of the piece on the context rank of `share`, placed in that rank's row."""
        assert self.size % share.count == 0
        size = self.size // share.count
        first, stop = (
            min(max(row - share.index * size, 0), size)
            for row in (self.before, self.before + self.real)
        )
        return Piece(self.sample, self.start // share.count, size, stop - first, first)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRow:
    """One kind of tokens of a pack, end to end; each context rank holds a shard of each piece."""

    pieces: tuple[Piece, ...]  # of all ranks together, in the order of the row; sizes divide
    rows: int  # of one context rank, with those that fill up its end: as many on every rank
    share: SequenceShard  # what is here

    @classmethod
    def of_stream(cls, stream: TokenStream, *, attended: Sequence[int]) -> TokenRow:
        """The row of the tokens of `stream`, as this rank holds them.

        `attended` has, for each sample, the number of tokens that attention processes, which may
        include padding.
        """
        spans = zip(pairwise(stream.starts), attended, strict=True)
        pieces = [Piece(i, a, b - a, real) for i, ((a, b), real) in enumerate(spans)]
        assert all(piece.real <= piece.size for piece in pieces), "a pack without attended padding"
        return cls(pieces=tuple(pieces), rows=len(stream.segment_T), share=stream.share)

    @classmethod
    def of_pictures(cls, batch: PackedBatch, *, references_meet: bool = False) -> TokenRow:
        """A row in which each target and each reference counts as a sample of its own.

        So pictures do not attend to each other. With `references_meet` all references of a sample
        count as one, and attend to each other.
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
        """The pieces of the row that context rank `rank` holds, placed in that rank's shard."""
        return [piece.on(replace(self.share, index=rank)) for piece in self.pieces]

    @property
    def lengths(self) -> dict[int, int]:
        """Number of real tokens over all ranks by sample, for samples with a piece."""
        lengths: dict[int, int] = {}
        for piece in self.pieces:
            lengths[piece.sample] = lengths.get(piece.sample, 0) + piece.real
        return lengths


@dataclass(frozen=True, slots=True)
class TextRow:
    """The shard of a pack's text on this context rank, and its rows in the whole text."""

    row: TokenRow
    source_L: Tensor  # row of the whole text of each token here; one past its end for padding
    sample_L: Tensor  # sample of each token here; padding belongs to a neighbour

    def of(self, whole_X: Tensor) -> Tensor:
        """Rows of `whole_X` (such as embeddings of the whole text) for this rank's text tokens.

        Padding gets zeros.
        """
        last = (0, 0) * (whole_X.dim() - 1)
        return pad(whole_X, (*last, 0, 1)).index_select(0, self.source_L)


def _multiple_of(number: int, length: int) -> int:
    return -(-length // number) * number


def _padded(length: int, share: SequenceShard) -> int:
    return _multiple_of(share.count, length)


def text_rows(lengths: Sequence[int], *, share: SequenceShard, multiple: int) -> int:
    """Number of text rows on each context rank for texts of these `lengths`.

    It includes the padding that `text_row` adds.
    """
    here = sum(_padded(length, share) for length in lengths) // share.count
    return _multiple_of(multiple, max(here, 1))


def text_row(
    lengths: Sequence[int], *, share: SequenceShard, multiple: int, device: torch.device
) -> TextRow:
    """This context rank's shard of texts with `lengths` tokens, some of which may be 0.

    The rows are padded to a `multiple` for sequence parallelism. There is at least one row, so that
    weights for text always have a gradient, if only of zeros.
    """
    sizes = [_padded(length, share) for length in lengths]
    starts = list(accumulate(sizes, initial=0))
    every = enumerate(zip(starts, sizes, lengths, strict=False))
    pieces = tuple(Piece(i, start, size, real) for i, (start, size, real) in every if size)
    rows = text_rows(lengths, share=share, multiple=multiple)
    row = TokenRow(pieces=pieces, rows=rows, share=share)
    first = list(accumulate(lengths, initial=0))  # of each text in the whole text
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
    """The exchange in which tokens of row `asking` attend to the same samples in `answering`.

    Context ranks divide both rows.

    Raises:
        ValueError: the ranks pass keys and values round a ring.
    """
    check_joint_context(context.comm, context.group.size())
    gathers = context.group.size() > 1 and context.comm is ContextComm.ALL_GATHER
    if gathers:
        own, own_real = _joint_rows([asking], asking.share.index)
    else:
        own, own_real = _joint_rows_of_all([asking])
    # Keys of samples without a query come last, so that the others lie side by side.
    every, every_real = _joint_rows_of_all([answering], asked=defaultdict(int, own_real))
    queries, keys = _spans_of(own_real), _spans_of(every_real)
    # Ascending keys; samples without any stand where there are none.
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
    """Permutations between separate rows of a pack and one joint row, for single-stream layers."""

    sizes: tuple[int, ...]  # of the rows of this context rank, before tensor ranks share them out
    own: TokenOrder  # both rows, one after the other <-> the joint row of this rank
    apart: TokenExchange  # for attention where the rows are kept apart
    joined: TokenExchange  # for attention on the joint row
    shared_by: dist.ProcessGroup | None  # tensor ranks that share the tokens out, if they do

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
        """The joint order of `rows`: a sample's tokens of the first row, then of the next.

        `shared_by` are tensor ranks that divide the tokens, or None. `sequences` has the segments
        of each sample and makes attention block-causal (`block_causal.py`); `rows` must then be
        latents and text.
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
        """This tensor rank's shard of the joint row [J, X], from its shards of `rows`."""
        return self._scattered(self.own.arrange(torch.cat([self._whole(x) for x in rows])))

    def split(self, joint_JX: Tensor) -> tuple[Tensor, ...]:
        """This tensor rank's shard of each separate row, from its shard of the joint row.

        It undoes `join`.
        """
        apart = self.own.restore(self._whole(joint_JX)).split(self.sizes)
        return tuple(self._scattered(x) for x in apart)

    def latents(self, joint_JX: Tensor) -> Tensor:
        """The latents [T, X] of a whole joint row `joint_JX`, which no tensor ranks divide."""
        return self.own.restore(joint_JX)[: self.sizes[0]]

    def arranged(self, rows: Sequence[Tensor]) -> Tensor:
        """Values [J, ...] in joint order, from the values of each row on this context rank.

        Examples are sample indices and rotary angles.
        """
        return self.own.arrange(torch.cat(list(rows)))

    def _whole(self, x: Tensor) -> Tensor:
        """The row of this context rank, gathered from the shards `x` of its tensor ranks.

        Each tensor rank computes the whole gradient, so gradients are not summed.
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


Real = dict[int, int]  # real tokens by sample


def _joint_rows(rows: Sequence[TokenRow], rank: int) -> tuple[Tensor, Real]:
    """(indices of a rank's rows in joint order, padding last; number of real tokens by sample)."""
    return _in_order([_real_rows(rows, rank)], sum(row.rows for row in rows))


def _joint_rows_of_all(
    rows: Sequence[TokenRow], *, asked: Real | None = None
) -> tuple[Tensor, Real]:
    """(indices of the rows of all ranks in joint order; number of real tokens by sample).

    An index counts in the concatenation of all ranks' `rows`. If `asked` is given, samples without
    real tokens in it come last, because no query attends to them.
    """
    each, ranks = sum(row.rows for row in rows), rows[0].share.count
    parts = [
        [(sample, rows_of + rank * each) for sample, rows_of in _real_rows(rows, rank)]
        for rank in range(ranks)
    ]
    return _in_order(parts, each * ranks, asked=asked)


def _real_rows(rows: Sequence[TokenRow], rank: int) -> Iterator[tuple[int, Tensor]]:
    """Yields (sample, indices of its real tokens) for each piece on the context rank `rank`.

    Indices count in the concatenation of `rows`.
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
    """Maps each sample in `spans` to (its first row in joint order, places of its tokens).

    The places are those in the sample's sequence, for the tokens on `ranks`, ordered by rank, then
    by row as in `_real_rows`. Samples without tokens are absent.
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
    """(row indices in joint order, int64 [J] or [W]; number of real tokens by sample).

    `parts` belong to one rank or all; each yields pairs (sample, its real tokens in one piece). If
    `asked` is given, samples without real tokens in it follow all others. Padding comes last.
    """
    by_sample: dict[int, list[Tensor]] = {}
    for part in parts:
        for sample, rows_of in part:
            by_sample.setdefault(sample, []).append(rows_of)
    samples = sorted(
        by_sample, key=lambda sample: (asked is not None and not asked[sample], sample)
    )
    order = {sample: torch.cat(by_sample[sample]) for sample in samples}
    # The empty tensor is all there is where a rank has no real token.
    real = torch.cat([*order.values(), torch.zeros(0, dtype=torch.int64)])
    return then_others(real, total), {sample: len(rows_of) for sample, rows_of in order.items()}


def _spans_of(real: Real) -> dict[int, tuple[int, int]]:
    """(first row, number of rows) of each sample in joint order, by its number of real tokens."""
    starts = accumulate(real.values(), initial=0)
    return {sample: (at, n) for (sample, n), at in zip(real.items(), starts, strict=False)}
