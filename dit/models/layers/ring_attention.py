"""Ring attention of Transformer Engine: context ranks pass keys and values on to each other."""

# T tokens of this rank, H heads of this rank, K head width

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from dit.models.layers.attention import Spans
from dit.models.layers.transformer_engine import dot_product


def check_ring(group: dist.ProcessGroup) -> None:
    """Checks that Transformer Engine's ring attention can run here.

    Raises:
        ValueError: Transformer Engine, or a GPU, is missing.
    """
    if group.size() > 1 and not (find_spec("transformer_engine") and torch.cuda.is_available()):
        raise ValueError(
            "model.cp_comm_type=p2p is Transformer Engine's, which needs a GPU and is not installed"
            " here; install the extra `te`, or use a2a or all_gather"
        )


def attend_in_ring(
    q_THK: Tensor, k_THK: Tensor, v_THK: Tensor, spans: Spans, *, group: dist.ProcessGroup
) -> Tensor:
    """Attention [T, H, K] of this rank's tokens to all tokens of their samples.

    `spans` are those of the whole pack. A rank holds two pieces of each sample (`Share.halves`),
    which is what Transformer Engine's THD layout prescribes.
    """
    heads, width = q_THK.shape[1:]
    length = spans.total // group.size()
    cu, cu_padded, longest = spans.once("ring", lambda: _offsets(spans))  # type: ignore[misc]
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
    """Offsets of the samples of a whole pack without and with their padding, and the longest."""
    real = torch.tensor((0, *spans.lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    padded = torch.tensor((*spans.starts, spans.total), dtype=torch.int32)
    longest = int(padded.diff().max())
    cu, cu_padded = (ends.to(spans.device, non_blocking=True) for ends in (real, padded))
    return cu, cu_padded, longest


@cache
def _ring(heads: int, width: int, group: dist.ProcessGroup) -> Any:
    """One module for all layers, because it has no weights."""
    return dot_product(
        heads,
        width,
        cp_group=group,
        cp_global_ranks=dist.get_process_group_ranks(group),
        cp_stream=torch.cuda.Stream(),
        cp_comm_type="p2p",
    )
