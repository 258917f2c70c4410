"""Self-attention over context ranks, each of which holds a part of every sample.

    a2a         tokens for heads: a rank gets all tokens of some of its heads, and gives them back
    all_gather  a rank keeps its queries and gets the keys and values of all tokens
    p2p         keys and values go round, which Transformer Engine does (ring.py)

The first two attend with the function that a rank alone uses.
"""

# T tokens of this rank, W = R * T tokens of all R context ranks, H heads, K head width, X any width

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    all_to_all,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from dit.batch import PackedBatch, SequenceShard
from dit.config import ContextComm
from dit.models.layers.attention import Attend, Spans
from dit.models.layers.ring_attention import attend_in_ring, check_ring


@dataclass(frozen=True, slots=True)
class TokenOrder:
    """Pack order and rank order (all tokens of rank 0, then of rank 1, ...) of W tokens."""

    to_pack_W: Tensor  # row in rank order of each token in pack order
    to_ranks_W: Tensor  # row in pack order of each token in rank order

    @classmethod
    def of(cls, batch: PackedBatch, *, rows: int) -> TokenOrder:
        """`rows` counts the tokens of one rank, with those that fill up the end of the pack."""
        parts, whole = batch.share.count, batch.starts[-1]
        filling = torch.arange(whole, parts * rows).split(max(rows - whole // parts, 1))
        to_ranks = []
        for rank in range(parts):
            to_ranks.append(batch.rows(replace(batch.share, index=rank)))
            to_ranks += filling[rank : rank + 1]
        to_ranks_W = torch.cat(to_ranks)
        device = batch.latent_TC.device
        to_pack_W = to_ranks_W.argsort()
        return cls(*(way.to(device, non_blocking=True) for way in (to_pack_W, to_ranks_W)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The context ranks of this rank, and how they exchange tokens."""

    group: dist.ProcessGroup
    comm: ContextComm

    def __post_init__(self) -> None:
        if self.comm is ContextComm.P2P:
            check_ring(self.group)

    @property
    def share(self) -> SequenceShard:
        """Which tokens of a pack are this rank's."""
        halves = self.comm is ContextComm.P2P and self.group.size() > 1
        return SequenceShard(index=self.group.rank(), count=self.group.size(), halves=halves)

    def order(self, batch: PackedBatch, *, rows: int) -> TokenOrder | None:
        """None where one rank holds all tokens, or the order of the pack is never needed."""
        needed = self.group.size() > 1 and self.comm is not ContextComm.P2P
        return TokenOrder.of(batch, rows=rows) if needed else None

    def spans(self, batch: PackedBatch, *, rows: int) -> Spans:
        """Which tokens attend to which, once they are exchanged; `rows` as in `TokenOrder`."""
        whole = list(zip(batch.starts, batch.num_tokens, strict=False))
        device = batch.latent_TC.device
        if self.comm is ContextComm.ALL_GATHER:
            return Spans.of(batch.shared_spans, whole, total=rows, device=device)
        filling = 0 if self.share.halves else rows * self.group.size() - batch.starts[-1]
        return Spans.of(whole, whole, total=batch.starts[-1] + filling, device=device)

    def attend(
        self,
        attend: Attend,
        qkv: tuple[Tensor, Tensor, Tensor],
        spans: Spans,
        order: TokenOrder | None,
    ) -> Tensor:
        """Attention [T, H, K] of this rank's tokens to all tokens of their samples."""
        q_THK, k_THK, v_THK = qkv
        if self.share.halves:
            return attend_in_ring(*qkv, spans, group=self.group)
        if order is None:
            return attend(*qkv, spans)
        if self.comm is ContextComm.ALL_GATHER:
            kv_THX = torch.cat((k_THK, v_THK), dim=-1)
            kv_WHX = gather_from_sequence_parallel_region(kv_THX, group=self.group)
            k_WHK, v_WHK = kv_WHX[order.to_pack_W].chunk(2, dim=-1)
            return attend(q_THK, k_WHK, v_WHK, spans)
        qkv_WHX = self._heads_of_all(torch.cat(qkv, dim=-1))[order.to_pack_W]
        q_WHK, k_WHK, v_WHK = qkv_WHX.chunk(3, dim=-1)
        out_WHK = attend(q_WHK, k_WHK, v_WHK, spans)
        return self._tokens_of_mine(out_WHK[order.to_ranks_W])

    def _heads_of_all(self, x_THX: Tensor) -> Tensor:
        """All heads of this rank's tokens -> this rank's heads of all tokens [W, H / R, X]."""
        x_RTHX = torch.stack(x_THX.chunk(self.group.size(), dim=1))
        return all_to_all(self.group, x_RTHX).flatten(0, 1)

    def _tokens_of_mine(self, x_WHK: Tensor) -> Tensor:
        """The way back: this rank's tokens [T, H, K] with all their heads."""
        x_RTHK = all_to_all(self.group, x_WHK.unflatten(0, (self.group.size(), -1)))
        return torch.cat(x_RTHK.unbind(), dim=1)
