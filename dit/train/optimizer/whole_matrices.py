"""Whole matrices from their shards on data and tensor ranks, each gathered on one owner rank.

1. SharedMatrix    a weight, and its shard on each rank
2. WholeMatrices   shards are sent to the owners, which update the whole matrix and return results

Who holds which shard follows from the optimizer's `holdings`, without communication.
"""

# O outputs, I inputs of a linear

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.nn.functional import pad

from dit.distributed.data_parallel import (
    Holding,
    MainParamShard,
    ModelChunk,
    holdings,
    is_sharded,
    main_param_shards,
)
from dit.distributed.process_groups import device
from dit.models.diffusers.names import Pair
from dit.models.linears import linear_shapes
from dit.train.checkpoint.shares import data_of, entries_of, weight_of

BUCKET = 2**26
"""Most numbers that an owner receives in one exchange; a larger matrix is sent alone."""
PartOf = Callable[["SharedMatrix"], Tensor]
"""Function that returns, for a matrix, this rank's flat shard of a tensor in its shape."""
_Waiting = Callable[[], list[Tensor]]
"""Function that waits for the tensors being received, and returns them."""


class _Piece(NamedTuple):
    """A shard of a weight, and the rank of the group that holds it."""

    tensor: int  # tensor rank to whose part of the whole matrix the shard belongs
    rank: int
    part: slice  # of the flattened part of this tensor rank

    @property
    def size(self) -> int:
        return self.part.stop - self.part.start


@dataclass(kw_only=True, slots=True, eq=False)
class SharedMatrix:
    """A weight, and which rank has each of its shards; only `shard` differs between ranks."""

    pair: Pair
    shape: tuple[int, int]  # of the weight on one tensor rank
    axis: int | None  # axis that tensor ranks divide; None: each has the whole weight
    pieces: Sequence[_Piece]  # shards that make up the whole weight
    copies: Sequence[_Piece]  # the same shards on other tensor ranks
    owner: int = 0  # rank of the group
    shard: MainParamShard | None = None  # what this rank updates of it

    @property
    def cost(self) -> float:
        """Multiplications in a product of each linear of the matrix with its transpose."""
        return sum(math.prod(shape) * min(shape) for shape in linear_shapes(self.pair))

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole weight [O, I], joined from `parts`, which are the flat shards in `pieces`."""
        flat: dict[int, list[Tensor]] = {}
        for piece, part in zip(self.pieces, parts, strict=True):
            flat.setdefault(piece.tensor, []).append(part)
        shards = [torch.cat(own).view(self.shape) for own in flat.values()]
        return shards[0] if self.axis is None else torch.cat(shards, self.axis)

    def cut(self, whole_OI: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(rank, flat shard of `whole_OI`) for each shard, also copies on other tensor ranks."""
        shards = [whole_OI]
        if self.axis is not None:
            shards = [*whole_OI.split(self.shape[self.axis], self.axis)]
        flat = [shard.reshape(-1) for shard in shards]
        for piece in (*self.pieces, *self.copies):
            yield piece.rank, flat[piece.tensor][piece.part]


class WholeMatrices:
    """The matrices of `pairs` on this pipeline stage.

    All ranks of the stage create it and call its methods together. Each copy of the optimizer state
    has its own owners, and a rank that has all weights owns all matrices.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        chunks: Sequence[ModelChunk],
        optimizer: MegatronOptimizer,
        groups: ProcessGroupCollection,
        *,
        dtype: torch.dtype,
    ):
        """Finds the shards of the matrices, and chooses owners; shards are sent in `dtype`."""
        self._groups, self._type, self._sharded = groups, dtype, is_sharded(chunks)
        # Only tensor ranks, if each data rank updates all weights. The group is created here, so
        # that runs without Muon do without it.
        together: Any = groups.tp_dp_cp if self._sharded else groups.tp
        self._group: Any = dist.new_group(
            dist.get_process_group_ranks(together), use_local_synchronization=True
        )
        self._rank = self._rank_of(groups.tp.rank(), groups.dp_cp.rank())
        self.matrices = self._matrices(pairs, chunks, optimizer)
        self._give_owners()
        self._rounds = _rounds(self.matrices)

    @cached_property
    def mine(self) -> dict[SharedMatrix, MainParamShard]:
        """This rank's shard of each matrix that it updates a part of."""
        return {one: one.shard for one in self.matrices if one.shard is not None}

    def _rank_of(self, tensor: int, data: int) -> int:
        """Rank in the group of tensor and data ranks, which is ordered by data rank first."""
        return data * self._groups.tp.size() + tensor if self._sharded else tensor

    def _matrices(
        self, pairs: Sequence[Pair], chunks: Sequence[ModelChunk], optimizer: MegatronOptimizer
    ) -> list[SharedMatrix]:
        named = {(pair.ours, pair.layer): pair for pair in pairs}
        networks: list[Any] = [chunk.module for chunk in chunks]
        entries = [e for one in networks for e in entries_of(one) if weight_of(e) in named]
        held = holdings(optimizer, self._groups, [data_of(entry) for entry in entries])
        shards: dict[Tensor, MainParamShard] = {
            shard.weight: shard for shard in main_param_shards(optimizer)
        }
        found = []
        for entry in entries:
            pair, shape = named[weight_of(entry)], tuple(entry.local_shape)
            axis = next((n for n in (0, 1) if shape[n] != pair.shape[n]), None)
            pieces = [*self._pieces(held[data_of(entry)], math.prod(shape))]
            found.append(
                SharedMatrix(
                    pair=pair,
                    shape=shape,  # type: ignore[arg-type]
                    axis=axis,
                    pieces=[p for p in pieces if axis is not None or p.tensor == 0],
                    copies=[_Piece(0, *p[1:]) for p in pieces if axis is None and p.tensor > 0],
                    shard=shards.get(data_of(entry)),
                )
            )
        return found

    def _pieces(self, held: Sequence[Holding], numel: int) -> Iterator[_Piece]:
        """Shards of a matrix of `numel` numbers, on ranks of one copy of the optimizer state."""
        copy = self._groups.dp_cp.rank() // self._groups.intra_dp_cp.size()
        parts = [(one.rank, one.part) for one in held if one.copy == copy]
        for tensor in range(self._groups.tp.size()):
            for data, part in parts if self._sharded else [(0, slice(0, numel))]:
                yield _Piece(tensor, self._rank_of(tensor, data), part)

    def _give_owners(self) -> None:
        """Chooses the rank that updates each matrix: costliest first, on the least loaded rank."""
        each, tensor = self._groups.intra_dp_cp.size(), self._groups.tp.size()
        first = self._groups.dp_cp.rank() // each * each
        ranks = range(first * tensor, (first + each) * tensor) if self._sharded else range(tensor)
        totals = [(0.0, rank) for rank in ranks]
        for matrix in sorted(self.matrices, key=lambda one: -one.cost):
            total, matrix.owner = heapq.heappop(totals)
            heapq.heappush(totals, (total + matrix.cost, matrix.owner))

    def applied(
        self, part_of: PartOf, function: Callable[[Pair, Tensor], Tensor]
    ) -> Iterator[tuple[SharedMatrix, Tensor]]:
        """(matrix, this rank's flat shard of the result) after the owners called `function`.

        `function` takes a pair and the whole matrix [O, I]. While the owners compute one round, the
        shards of the next round are sent.
        """
        coming = [self._gather(matrices, part_of) for matrices in self._rounds[:1]]
        for number, matrices in enumerate(self._rounds):
            own = iter(coming.pop()())
            coming += [self._gather(m, part_of) for m in self._rounds[number + 1 : number + 2]]
            leaving: list[tuple[int, Tensor]] = []
            for matrix in matrices:
                if matrix.owner == self._rank:
                    whole_OI = matrix.joined([next(own) for _ in matrix.pieces])
                    leaving += matrix.cut(function(matrix.pair, whole_OI))
            wanted = [
                (matrix, piece)
                for matrix in matrices
                for piece in (*matrix.pieces, *matrix.copies)
                if piece.rank == self._rank
            ]
            results = self._send(leaving, [(matrix.owner, piece.size) for matrix, piece in wanted])
            for (matrix, _), result in zip(wanted, results(), strict=True):
                yield matrix, result

    def _gather(self, matrices: Sequence[SharedMatrix], part_of: PartOf) -> _Waiting:
        """Starts to send `matrices` to their owners; the result waits for those of this rank."""
        pieces = [(matrix, piece) for matrix in matrices for piece in matrix.pieces]
        return self._send(
            [(m.owner, part_of(m)) for m, piece in pieces if piece.rank == self._rank],
            [(piece.rank, piece.size) for m, piece in pieces if m.owner == self._rank],
        )

    def _send(
        self, leaving: Sequence[tuple[int, Tensor]], coming: Sequence[tuple[int, int]]
    ) -> _Waiting:
        """Starts to exchange flat tensors: (target, tensor) `leaving`, (source, size) `coming`.

        Between two ranks both sides use the same order. The returned function waits, and returns
        the tensors in the order of `coming`.
        """
        if self._group.size() == 1:
            return lambda: [tensor for _, tensor in leaving]
        ranks = range(self._group.size())
        order = sorted(range(len(coming)), key=lambda n: coming[n][0])
        sent = [tensor.to(self._type) for _, tensor in sorted(leaving, key=lambda one: one[0])]
        outgoing = torch.cat(sent) if sent else torch.empty(0, dtype=self._type, device=device())
        received = outgoing.new_empty(sum(size for _, size in coming))
        work = dist.all_to_all_single(
            received,
            outgoing,
            [sum(size for source, size in coming if source == rank) for rank in ranks],
            [sum(len(tensor) for target, tensor in leaving if target == rank) for rank in ranks],
            group=self._group,
            async_op=True,
        )

        def wait() -> list[Tensor]:
            assert work is not None
            work.wait()
            parts = received.split([coming[n][1] for n in order])
            return [part for _, part in sorted(zip(order, parts, strict=True), key=lambda p: p[0])]

        return wait

    def squares_of_rows(self, part_of: PartOf) -> dict[SharedMatrix, Tensor]:
        """Sums of squares of the rows of each whole matrix, for the rows on this tensor rank.

        All ranks call it.
        """
        # Rows that tensor ranks share come last, so that their sums are one tensor.
        matrices = sorted(self.matrices, key=lambda one: one.axis == 1)
        sizes = [matrix.shape[0] for matrix in matrices]
        every = torch.zeros(sum(sizes), device=device())
        squares = dict(zip(matrices, every.split(sizes), strict=True))
        for matrix, shard in self.mine.items():
            width, part = matrix.shape[1], shard.part
            missing = part.start % width, -part.stop % width
            rows = pad(part_of(matrix).square(), missing).view(-1, width)
            squares[matrix][part.start // width :][: len(rows)] = rows.sum(1)
        if self._sharded:
            dist.all_reduce(every, group=self._groups.intra_dp_cp)
        shared = sum(matrix.shape[0] for matrix in matrices if matrix.axis == 1)
        if shared:
            dist.all_reduce(every[-shared:], group=self._groups.tp)
        return squares


def _rounds(matrices: Sequence[SharedMatrix]) -> list[list[SharedMatrix]]:
    """Groups of matrices that are sent together: at most `BUCKET` numbers for each owner.

    A larger matrix is sent alone.
    """
    of_owner: dict[int, list[list[SharedMatrix]]] = {}
    sizes: dict[int, int] = {}
    for matrix in matrices:
        numel, buckets = math.prod(matrix.pair.shape), of_owner.setdefault(matrix.owner, [])
        sizes[matrix.owner] = sizes.get(matrix.owner, 0) + numel
        if not buckets or sizes[matrix.owner] > BUCKET:
            buckets.append([])
            sizes[matrix.owner] = numel
        buckets[-1].append(matrix)
    return [
        [matrix for bucket in turn for matrix in bucket or ()]
        for turn in zip_longest(*of_owner.values())
    ]
