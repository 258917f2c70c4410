"""Self-attention under context parallelism: each rank holds a shard of the pack.

    a2a         a rank exchanges all heads of its tokens for some heads of all tokens
    all_gather  a rank keeps its queries and gathers the keys and values of all tokens
    p2p         Transformer Engine passes keys and values round a ring; not between two rows

With a2a and all_gather the attention function is that of a single rank. With a2a, ranks hold
consecutive pieces of the pack, so nothing has to be reordered. If latents and text are separate
rows, each rank holds a part of every sample, and the same exchange brings both into joint order
(joint_order.py).
"""

# T tokens of this rank, W = R * T tokens of all R context ranks, H heads, K head width, X any width

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all, gather_from_sequence_parallel_region
from torch import Tensor
from torch.nn.functional import pad

from dit.batch import SequenceShard, TokenStream
from dit.config import ContextComm
from dit.models.attention.kernels import COUNT_MULTIPLE, dot_product, few_lengths, filled_up
from dit.models.attention.spans import Spans
from dit.pack_wire import to_device


@dataclass(frozen=True, slots=True)
class TokenOrder:
    """Permutations of the same W tokens between the order on ranks and the order of attention.

    The order on ranks is rank 0's rows, then rank 1's, and so on. Both permutations are None if the
    orders are equal.
    """

    to_pack_W: Tensor | None  # row, as ranks hold them, of each token in the order of attention
    to_ranks_W: Tensor | None  # row in the order of attention of each token, as ranks hold them

    @classmethod
    def of(
        cls, batch: TokenStream, *, rows: int, first: Sequence[tuple[int, int]] = ()
    ) -> TokenOrder:
        """The permutations between rows on ranks and the order of the pack, for attention.

        `rows` is the number of tokens of one rank, including padding at the end of the pack.
        `first` lists pairs (first row, number of rows) in the order of the pack; their tokens come
        before all others in the order of attention.
        """
        parts, whole = batch.share.count, batch.starts[-1]
        filling = torch.arange(whole, parts * rows).split(max(rows - whole // parts, 1))
        to_ranks = []
        for rank in range(parts):
            to_ranks.append(batch.rows(replace(batch.share, index=rank)))
            to_ranks += filling[rank : rank + 1]
        to_pack_W = torch.cat(to_ranks).argsort()
        if first:
            chosen = torch.cat([torch.arange(row, row + number) for row, number in first])
            to_pack_W = to_pack_W[then_others(chosen, len(to_pack_W))]
        return cls.from_pack(to_pack_W, device=batch.latent_TC.device)

    @classmethod
    def from_pack(cls, to_pack_W: Tensor, *, device: torch.device) -> TokenOrder:
        """The permutations by which attention's token i is row `to_pack_W[i]` of all ranks' rows.

        `to_pack_W` is a CPU tensor.
        """
        if torch.equal(to_pack_W, torch.arange(len(to_pack_W))):
            return cls(None, None)
        return cls(*to_device(torch.stack((to_pack_W, to_pack_W.argsort())), device))

    def arrange(self, x_WX: Tensor) -> Tensor:
        """`x_WX` permuted from the order on ranks to the order of attention."""
        return _permuted(x_WX, self.to_pack_W, self.to_ranks_W)

    def restore(self, x_WX: Tensor) -> Tensor:
        """`x_WX` permuted from the order of attention to the order on ranks."""
        return _permuted(x_WX, self.to_ranks_W, self.to_pack_W)


def then_others(first: Tensor, total: int) -> Tensor:
    """The indices in `first`, then all other indices below `total`, ascending; on the CPU."""
    others = torch.ones(total, dtype=torch.bool)
    others[first] = False
    return torch.cat((first, others.nonzero().flatten()))  # on the host: nobody waits for a device


def side_by_side(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(first row, number of rows) of each of `spans` when their rows are concatenated."""
    ends = accumulate((number for _, number in spans), initial=0)
    return [(start, number) for start, (_, number) in zip(ends, spans, strict=False)]


def _permuted(x_WX: Tensor, there_W: Tensor | None, back_W: Tensor | None) -> Tensor:
    if there_W is None:
        return x_WX
    out_WX = _Permute.apply(x_WX, there_W, back_W)
    assert isinstance(out_WX, Tensor)
    return out_WX


class _Permute(torch.autograd.Function):
    """Autograd function that permutes rows; the backward pass needs neither a sort nor a sum."""

    @staticmethod
    def forward(ctx: Any, x_WX: Tensor, there_W: Tensor, back_W: Tensor) -> Tensor:
        ctx.save_for_backward(back_W)
        return x_WX.index_select(0, there_W)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (back_W,) = ctx.saved_tensors
        return gradients[0].index_select(0, back_W), None, None


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenExchange:
    """The exchange of tokens between context ranks before and after self-attention."""

    spans: Spans  # which tokens attend to which, in the order of attention
    own: TokenOrder | None = None  # of this rank's rows; None where they are in that order
    all_ranks: TokenOrder | None = None  # of the rows of all context ranks, where they meet


@dataclass(frozen=True, kw_only=True, slots=True)
class RowExchange:
    """The exchange for attention from queries of one row of tokens to keys of another row."""

    spans: Spans  # which queries see which keys, each in its own order of attention
    queries: TokenOrder  # of the rows of this rank by all_gather, else of all context ranks
    keys: TokenOrder  # of the rows of all context ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The context-parallel group of this rank, and how its ranks exchange tokens (`comm`)."""

    group: dist.ProcessGroup
    comm: ContextComm
    shares_samples: bool = True
    """Whether every rank needs an equal shard of each sample. If not, ranks take consecutive pieces
    of the pack with a2a."""

    def __post_init__(self) -> None:
        if self.comm is ContextComm.P2P:
            check_ring(self.group.size())

    @property
    def share(self) -> SequenceShard:
        """The shard of a pack's tokens that this rank has."""
        many = self.group.size() > 1
        return SequenceShard(
            index=self.group.rank(),
            count=self.group.size(),
            halves=many and self.comm is ContextComm.P2P,
            contiguous=many and self.comm is ContextComm.A2A and not self.shares_samples,
        )

    def exchange(self, batch: TokenStream, *, rows: int) -> TokenExchange:
        """The exchange for attention among the tokens of the stream `batch` alone.

        `rows` is the number of tokens of one rank, including padding at the end of the pack.
        """
        whole = list(zip(batch.starts, batch.num_tokens, strict=False))
        device, ranks = batch.latent_TC.device, self.group.size()
        if ranks > 1 and self.comm is ContextComm.ALL_GATHER:
            mine = batch.shared_spans
            asked = [
                (start, n if here else 0) for (start, n), (_, here) in zip(whole, mine, strict=True)
            ]
            return TokenExchange(
                spans=Spans.of(mine, side_by_side(asked), total=rows, device=device),
                all_ranks=TokenOrder.of(batch, rows=rows, first=asked),
            )
        order = None
        if ranks > 1 and self.comm is ContextComm.A2A:
            order = TokenOrder.of(batch, rows=rows)
        total = batch.starts[-1] if self.share.halves else rows * ranks
        return TokenExchange(
            spans=Spans.of(whole, whole, total=total, device=device), all_ranks=order
        )

    def attend(
        self, attend: Callable[..., Tensor], qkv: tuple[Tensor, ...], exchange: TokenExchange
    ) -> Tensor:
        """Attention [T, H, K] of this rank's tokens to all tokens of their samples.

        `qkv` holds queries, keys and values, and `attend` computes attention of tokens that are all
        on one rank. With a2a, or on a single rank, `qkv` may hold further tensors, such as gates,
        which are exchanged as queries are and passed to `attend`.
        """
        spans, everyone = exchange.spans, exchange.all_ranks
        if self.share.halves:
            q_THK, k_THK, v_THK = qkv
            return attend_in_ring(q_THK, k_THK, v_THK, spans, group=self.group)
        if everyone is None:
            return _attend_here(attend, qkv, exchange)
        if self.comm is ContextComm.ALL_GATHER:
            q_THK, k_THK, v_THK = qkv
            kv_THX = torch.cat((k_THK, v_THK), dim=-1)
            kv_WHX = gather_from_sequence_parallel_region(kv_THX, group=self.group)
            k_WHK, v_WHK = everyone.arrange(kv_WHX).chunk(2, dim=-1)
            q_THK = q_THK if exchange.own is None else exchange.own.arrange(q_THK)
            out_THK = attend(q_THK, k_WHK, v_WHK, spans)
            return out_THK if exchange.own is None else exchange.own.restore(out_THK)
        qkv_WHX = everyone.arrange(self._heads_of_all(qkv))
        out_WHK = attend(*qkv_WHX.chunk(len(qkv), dim=-1), spans)
        return self._tokens_of_mine(everyone.restore(out_WHK))

    def attend_across(
        self,
        attend: Callable[..., Tensor],
        q_THK: Tensor,
        kv_LHK: tuple[Tensor, Tensor],
        exchange: RowExchange,
    ) -> Tensor:
        """Attention [T, H, K] from the queries of one row to the keys of another, sample by sample.

        `kv_LHK` holds keys and values. Context ranks divide both rows. A sample without keys gets
        zeros.
        """
        assert not self.share.halves, "a ring passes one row round"
        spans, queries, keys = exchange.spans, exchange.queries, exchange.keys
        if self.group.size() == 1:
            k_LHK, v_LHK = map(keys.arrange, kv_LHK)
            return queries.restore(attend(queries.arrange(q_THK), k_LHK, v_LHK, spans))
        if self.comm is ContextComm.ALL_GATHER:
            kv_WHX = gather_from_sequence_parallel_region(torch.cat(kv_LHK, -1), group=self.group)
            k_WHK, v_WHK = keys.arrange(kv_WHX).chunk(2, dim=-1)
            return queries.restore(attend(queries.arrange(q_THK), k_WHK, v_WHK, spans))
        q_WHK = queries.arrange(self._heads_of_all((q_THK,)))
        k_WHK, v_WHK = keys.arrange(self._heads_of_all(kv_LHK)).chunk(2, dim=-1)
        return self._tokens_of_mine(queries.restore(attend(q_WHK, k_WHK, v_WHK, spans)))

    def _heads_of_all(self, qkv: tuple[Tensor, ...]) -> Tensor:
        """All-to-all from all heads of this rank's tokens to 1 / R of the heads of all tokens.

        The result is [W, H / R, n K]: the n tensors of `qkv` side by side.
        """
        ranks = self.group.size()
        by_rank = [x_THK.unflatten(1, (ranks, -1)).transpose(0, 1) for x_THK in qkv]
        x_RTHX = torch.cat(by_rank, dim=-1).contiguous()  # one copy does both
        return all_to_all(self.group, x_RTHX).flatten(0, 1)

    def _tokens_of_mine(self, x_WHK: Tensor) -> Tensor:
        """All-to-all back to all heads of this rank's tokens [T, H, K], from `x_WHK`."""
        x_RTHK = all_to_all(self.group, x_WHK.unflatten(0, (self.group.size(), -1)))
        return torch.cat(x_RTHK.unbind(), dim=1)


def _attend_here(
    attend: Callable[..., Tensor], qkv: tuple[Tensor, ...], exchange: TokenExchange
) -> Tensor:
    """Attention [T, H, K] on a rank that holds all tokens, in the order of `exchange.own`."""
    if exchange.own is None:
        return attend(*qkv, exchange.spans)
    parts = exchange.own.arrange(torch.cat(qkv, dim=-1)).chunk(len(qkv), dim=-1)
    return exchange.own.restore(attend(*parts, exchange.spans))


def check_joint_context(comm: ContextComm, ranks: int) -> None:
    """Checks that the context-parallel exchange `comm` supports joint attention.

    Raises:
        ValueError: `comm` is p2p, a ring, and there are several `ranks`.
    """
    if comm is ContextComm.P2P and ranks > 1:
        raise ValueError(
            "model.cp_comm_type=p2p works for one sequence of tokens, and this network keeps"
            " latents and"
            " text in two; use a2a or all_gather"
        )


def check_ring(ranks: int) -> None:
    """Checks that Transformer Engine's ring attention can run on this machine.

    Raises:
        ValueError: there are several `ranks`, and Transformer Engine or a GPU is missing.
    """
    if ranks > 1 and not (find_spec("transformer_engine") and torch.cuda.is_available()):
        raise ValueError(
            "model.cp_comm_type=p2p is Transformer Engine's, which needs a GPU and is not installed"
            " here; install the extra `te`, or use a2a or all_gather"
        )


def attend_in_ring(
    q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, spans: Spans, *, group: dist.ProcessGroup
) -> Tensor:
    """Attention [T, H, K] of this rank's tokens to their samples, by Transformer Engine's ring.

    `spans` are those of the whole pack. A rank holds two pieces of each sample
    (`SequenceShard.halves`), as Transformer Engine's THD layout prescribes.
    """
    heads, width = q_THK.shape[1:]
    length = spans.total // group.size()
    cu, cu_padded, longest = spans.once("ring", lambda: _offsets(spans))  # type: ignore[misc]
    # Rows that fill up the end of the pack are of no sample that the ring could share out.
    q, k, v = (x[:length].contiguous() for x in (q_THK, k_THK, v_THK))
    out = _ring(heads, width, group)(
        q,
        k,
        v,
        qkv_format="thd",
        attn_mask_type="padding",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        cu_seqlens_q_padded=cu_padded,
        cu_seqlens_kv_padded=cu_padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        pad_between_seqs=True,
    )
    # Zeros for what fills up the end of the pack.
    return pad(out.view(length, heads, width), (0, 0, 0, 0, 0, len(q_THK) - length))


def _offsets(spans: Spans) -> tuple[Tensor, Tensor, int]:
    """(offsets of samples without padding, offsets with padding, longest sample with padding).

    The offsets are int32 on the device; empty samples at the end make the number of samples a
    multiple of `COUNT_MULTIPLE`. The longest length is rounded up. So packs can reuse each other's
    graphs and memory.
    """
    real = (0, *accumulate(spans.lengths))
    padded = (*spans.starts, spans.total)
    longest = few_lengths(max(stop - start for start, stop in pairwise(padded)))
    filled = [filled_up(each, COUNT_MULTIPLE) for each in (real, padded)]
    cu, cu_padded = to_device(torch.tensor(filled, dtype=torch.int32), spans.device)
    return cu, cu_padded, longest


@cache
def _ring(heads: int, width: int, group: dist.ProcessGroup) -> Any:
    """Transformer Engine's ring attention; one module serves all layers, as it has no weights."""
    return dot_product(
        heads,
        width,
        cp_group=group,
        cp_global_ranks=dist.get_process_group_ranks(group),
        cp_stream=torch.cuda.Stream(),
        cp_comm_type="p2p",
    )
