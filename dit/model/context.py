"""Self-attention over context ranks, each of which holds a part of every sample.

    a2a         tokens for heads: a rank gets all tokens of some of its heads, and gives them back
    all_gather  a rank keeps its queries and gets the keys and values of all tokens

Both attend with the function that a rank alone uses.
"""

# T tokens of this rank, W = R * T tokens of all R context ranks, H heads, K head width, X any width

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import (
    all_to_all,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from dit.batch import PackedBatch
from dit.config import ContextComm
from dit.model.attention import Attend, Spans


@dataclass(frozen=True, slots=True)
class TokenOrder:
    """Pack order and rank order (all tokens of rank 0, then of rank 1, ...) of W tokens."""

    to_pack_W: Tensor  # row in rank order of each token in pack order
    to_ranks_W: Tensor  # row in pack order of each token in rank order

    @classmethod
    def of(cls, batch: PackedBatch, *, rows: int) -> TokenOrder:
        """`rows` counts the tokens of one rank, with those that fill up the end of the pack."""
        parts = batch.share.count
        by_rank_RT = torch.arange(parts * rows).view(parts, rows)
        pieces = [
            by_rank_RT[:, start // parts : stop // parts].flatten()
            for start, stop in pairwise(batch.starts)
        ]
        filling = by_rank_RT[:, batch.starts[-1] // parts :].flatten()
        to_pack_W = torch.cat([*pieces, filling])
        device = batch.latent_TC.device
        return cls(to_pack_W.to(device), to_pack_W.argsort().to(device))


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The context ranks of this rank, and how they exchange tokens."""

    group: dist.ProcessGroup
    comm: ContextComm

    def order(self, batch: PackedBatch, *, rows: int) -> TokenOrder | None:
        """None where one rank holds all tokens."""
        return TokenOrder.of(batch, rows=rows) if self.group.size() > 1 else None

    def spans(self, batch: PackedBatch, *, rows: int) -> Spans:
        """Which tokens attend to which, once they are exchanged; `rows` as in `TokenOrder`."""
        whole = list(zip(batch.starts, batch.num_tokens, strict=False))
        keeps_queries = self.comm is ContextComm.ALL_GATHER
        return Spans.of(
            batch.shared_spans if keeps_queries else whole,
            whole,
            total=rows if keeps_queries else rows * self.group.size(),
            device=batch.latent_TC.device,
        )

    def attend(
        self, attend: Attend, qkv: tuple[Tensor, Tensor, Tensor], spans: Spans, order: TokenOrder
    ) -> Tensor:
        """Attention [T, H, K] of this rank's tokens to all tokens of their samples."""
        q_THK, k_THK, v_THK = qkv
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
