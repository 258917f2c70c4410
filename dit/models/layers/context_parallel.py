"""Attention under context parallelism, in which each rank has a shard of the pack's tokens.

    a2a         a rank exchanges all heads of its tokens for some heads of all tokens
    all_gather  a rank keeps its queries and gathers the keys and values of all tokens
    p2p         Transformer Engine's ring attention, for a single stream of tokens

With a2a and all_gather the attention function is that of a single rank. With a2a, ranks have
consecutive pieces of the pack, so tokens need not be reordered. If latents and text are separate
streams, each rank has a shard of every sample, and tokens are reordered to joint order
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
    """Permutations of W tokens between the order on ranks and the order of attention.

    The order on ranks is rank 0's tokens, then rank 1's, and so on. Both permutations are None if
    the orders are equal.
    """

    to_pack_W: Tensor | None  # attention's token i is token to_pack_W[i] in the order on ranks
    to_ranks_W: Tensor | None  # the inverse permutation

    @classmethod
    def of(
        cls, batch: TokenStream, *, rows: int, first: Sequence[tuple[int, int]] = ()
    ) -> TokenOrder:
        """The permutations for attention in the order of the pack.

        `rows` is the number of tokens of one rank, including padding at the end of the pack.
        `first` lists (first row, number of rows) in the order of the pack; these tokens are first
        in the order of attention.
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
        """The permutations from `to_pack_W`, a CPU tensor, moved to `device`.

        Attention's token i is token `to_pack_W[i]` in the order on ranks.
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
    """The indices `first`, then all other indices below `total` in ascending order, on the CPU."""
    others = torch.ones(total, dtype=torch.bool)
    others[first] = False
    return torch.cat((first, others.nonzero().flatten()))  # on the CPU: no wait for a GPU


def side_by_side(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(first row, number of rows) of each of `spans` in the concatenation of their rows."""
    ends = accumulate((number for _, number in spans), initial=0)
    return [(start, number) for start, (_, number) in zip(ends, spans, strict=False)]


def _permuted(x_WX: Tensor, there_W: Tensor | None, back_W: Tensor | None) -> Tensor:
    if there_W is None:
        return x_WX
    out_WX = _Permute.apply(x_WX, there_W, back_W)
    assert isinstance(out_WX, Tensor)
    return out_WX


class _Permute(torch.autograd.Function):
    """Autograd function that permutes rows; its backward pass uses the inverse permutation."""

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
    own: TokenOrder | None = None  # of this rank's tokens; None if they are in the right order
    all_ranks: TokenOrder | None = None  # of the tokens of all context ranks; None without exchange


@dataclass(frozen=True, kw_only=True, slots=True)
class RowExchange:
    """The exchange between context ranks for attention from one stream of tokens to another."""

    spans: Spans  # which queries attend to which keys, each in their order of attention
    queries: TokenOrder  # of queries of this rank with all_gather, else of all context ranks
    keys: TokenOrder  # of keys of all context ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The context-parallel group of this rank, and `comm`, how its ranks exchange tokens."""

    group: dist.ProcessGroup
    comm: ContextComm
    shares_samples: bool = True
    """Whether each rank must have an equal shard of every sample. If not, with a2a ranks have
    consecutive pieces of the pack."""

    def __post_init__(self) -> None:
        if self.comm is ContextComm.P2P:
            check_ring(self.group.size())

    @property
    def share(self) -> SequenceShard:
        """The rule by which this rank's shard is taken from a pack's tokens."""
        many = self.group.size() > 1
        return SequenceShard(
            index=self.group.rank(),
            count=self.group.size(),
            halves=many and self.comm is ContextComm.P2P,
            contiguous=many and self.comm is ContextComm.A2A and not self.shares_samples,
        )

    def exchange(self, batch: TokenStream, *, rows: int) -> TokenExchange:
        """The exchange for self-attention in the single stream `batch`.

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
        """The output [T, H, K] of attention of this rank's tokens to all tokens of their samples.

        `qkv` are queries, keys and values [T, H, K]; `attend` computes attention on a single rank.
        With a2a, or without context parallelism, `qkv` may have further tensors, such as gates,
        which are exchanged like queries and passed to `attend`.
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
        """The output [T, H, K] of attention from one stream of tokens to another.

        `kv_LHK` are keys and values. Context ranks divide both streams. Outputs of a sample without
        keys are zeros.
        """
        assert not self.share.halves, "ring attention is for a single stream of tokens"
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

        The result is [W, H / R, n * K]: the n tensors of `qkv`, concatenated.
        """
        ranks = self.group.size()
        by_rank = [x_THK.unflatten(1, (ranks, -1)).transpose(0, 1) for x_THK in qkv]
        x_RTHX = torch.cat(by_rank, dim=-1).contiguous()  # one copy transposes and concatenates
        return all_to_all(self.group, x_RTHX).flatten(0, 1)

    def _tokens_of_mine(self, x_WHK: Tensor) -> Tensor:
        """All-to-all from some heads of all tokens to all heads of this rank's tokens [T, H, K]."""
        x_RTHK = all_to_all(self.group, x_WHK.unflatten(0, (self.group.size(), -1)))
        return torch.cat(x_RTHK.unbind(), dim=1)


def _attend_here(
    attend: Callable[..., Tensor], qkv: tuple[Tensor, ...], exchange: TokenExchange
) -> Tensor:
    """The output [T, H, K] of attention on a rank that has all tokens."""
    if exchange.own is None:
        return attend(*qkv, exchange.spans)
    parts = exchange.own.arrange(torch.cat(qkv, dim=-1)).chunk(len(qkv), dim=-1)
    return exchange.own.restore(attend(*parts, exchange.spans))


def check_joint_context(comm: ContextComm, ranks: int) -> None:
    """Checks that `comm`, the exchange between context ranks, supports several streams of tokens.

    Raises:
        ValueError: `comm` is p2p (ring attention), and there are several `ranks`.
    """
    if comm is ContextComm.P2P and ranks > 1:
        raise ValueError(
            "model.cp_comm_type=p2p works for a single sequence of tokens, but this network has"
            " separate sequences, such as latents and text; set model.cp_comm_type=a2a or"
            " all_gather"
        )


def check_ring(ranks: int) -> None:
    """Checks that Transformer Engine's ring attention can run on this machine.

    Raises:
        ValueError: there are several `ranks`, and Transformer Engine or a GPU is missing.
    """
    if ranks > 1 and not (find_spec("transformer_engine") and torch.cuda.is_available()):
        raise ValueError(
            "model.cp_comm_type=p2p needs Transformer Engine and an NVIDIA GPU, and at least one of"
            " them is missing; install the extra `te` on a machine with a GPU, or set"
            " model.cp_comm_type=a2a or all_gather"
        )


def attend_in_ring(
    q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, spans: Spans, *, group: dist.ProcessGroup
) -> Tensor:
    """The output [T, H, K] of Transformer Engine's ring attention, for this rank's tokens.

    `spans` are those of the whole pack. A rank has two pieces of each sample
    (`SequenceShard.halves`), as Transformer Engine's THD layout requires.
    """
    heads, width = q_THK.shape[1:]
    length = spans.total // group.size()
    cu, cu_padded, longest = spans.once("ring", lambda: _offsets(spans))  # type: ignore[misc]
    # Padding at the end of the pack belongs to no sample, so the ring does not get it.
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
    # Zeros for the padding at the end of the pack.
    return pad(out.view(length, heads, width), (0, 0, 0, 0, 0, len(q_THK) - length))


def _offsets(spans: Spans) -> tuple[Tensor, Tensor, int]:
    """(offsets of samples without padding, offsets with padding, longest sample with padding).

    The offsets are int32 on the device. Empty samples at the end make the number of samples a
    multiple of `COUNT_MULTIPLE`, and the longest length is rounded up, so that many packs use the
    same cuDNN graph.
    """
    real = (0, *accumulate(spans.lengths))
    padded = (*spans.starts, spans.total)
    longest = few_lengths(max(stop - start for start, stop in pairwise(padded)))
    filled = [filled_up(each, COUNT_MULTIPLE) for each in (real, padded)]
    cu, cu_padded = to_device(torch.tensor(filled, dtype=torch.int32), spans.device)
    return cu, cu_padded, longest


@cache
def _ring(heads: int, width: int, group: dist.ProcessGroup) -> Any:
    """Transformer Engine's module of ring attention; all layers share it, as it has no weights."""
    return dot_product(
        heads,
        width,
        cp_group=group,
        cp_global_ranks=dist.get_process_group_ranks(group),
        cp_stream=torch.cuda.Stream(),
        cp_comm_type="p2p",
    )
