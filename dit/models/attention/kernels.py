"""The calls of each kernel of attention, by its name in `model.attention_backend`.

Their packages are imported at the first call. `tests/unit/models/test_kernel_calls.py` holds the
calls against the parameters that the packages have.
"""

# T query tokens, S key tokens, H heads, K head width

from __future__ import annotations

import os
from functools import cache, partial
from typing import Any

import torch
import torch.nn.attention as nn_attention
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dit.config import AttentionBackend
from dit.models.attention.by_runs import attend_by_runs
from dit.models.attention.fit import LONG
from dit.models.attention.packed import Offsets, attend_packed
from dit.models.attention.spans import Attend, Spans

COUNT_MULTIPLE = 16
"""Of sequences. From cuDNN 9.24 on Transformer Engine builds a graph for each number of them
(use_cu_seqlens_directly in its fused_attn_f16_arbitrary_seqlen.cu)."""
_LENGTH_MULTIPLE = 512
"""Of the longest sequence that it is told, which older cuDNN and sm_120 build a graph for."""


def flash_2_kernel(q_THK: Tensor, k_SHK: Tensor, v_SHK: Tensor, offsets: Offsets) -> Tensor:
    """FlashAttention 2, which torch brings."""
    return _torch_flash(None, q_THK, k_SHK, v_SHK, offsets)


def flash_3_kernel(q_THK: Tensor, k_SHK: Tensor, v_SHK: Tensor, offsets: Offsets) -> Tensor:
    """FlashAttention 3, which torch calls where its package is installed."""
    return _torch_flash("FA3", q_THK, k_SHK, v_SHK, offsets)


def _torch_flash(
    version: str | None, q_THK: Tensor, k_SHK: Tensor, v_SHK: Tensor, offsets: Offsets
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    if nn_attention.current_flash_attention_impl() != version:  # of the whole process
        if version is None:
            nn_attention.restore_flash_attention_impl()
        else:
            nn_attention.activate_flash_attention_impl(version)
    o = offsets
    out = varlen_attn(q_THK, k_SHK, v_SHK, o.cu, o.key_cu, o.longest, o.longest_key)
    assert isinstance(out, Tensor)
    return out


def flash_4_kernel(q_THK: Tensor, k_SHK: Tensor, v_SHK: Tensor, offsets: Offsets) -> Tensor:
    """FlashAttention 4, called directly: torch unpacks two of the five values that it returns."""
    from flash_attn.cute import flash_attn_varlen_func  # type: ignore[import-not-found]

    out = flash_attn_varlen_func(
        q_THK,
        k_SHK,
        v_SHK,
        cu_seqlens_q=offsets.cu,
        cu_seqlens_k=offsets.key_cu,
        max_seqlen_q=offsets.longest,
        max_seqlen_k=offsets.longest_key,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return out[0] if isinstance(out, tuple) else out


def engine_kernel(q_THK: Tensor, k_SHK: Tensor, v_SHK: Tensor, offsets: Offsets) -> Tensor:
    """Transformer Engine's, which takes cuDNN's on Hopper and later."""
    heads, width = q_THK.shape[1:]
    out_TX = _engine_module(heads, width)(
        q_THK.contiguous(),
        k_SHK.contiguous(),
        v_SHK.contiguous(),
        qkv_format="thd",
        attn_mask_type="padding",
        cu_seqlens_q=offsets.cu,
        cu_seqlens_kv=offsets.key_cu,
        max_seqlen_q=few_lengths(offsets.longest),
        max_seqlen_kv=few_lengths(offsets.longest_key),
    )
    return out_TX.view(len(q_THK), heads, width)


def few_lengths(longest: int) -> int:
    """An upper bound of the longest sequence that many packs have in common."""
    return -(-longest // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE


@cache
def _engine_module(heads: int, width: int) -> Any:
    """One for all layers, because it has no weights."""
    return dot_product(heads, width)


def dot_product(heads: int, width: int, **ring: Any) -> Any:
    """Transformer Engine's attention of packed samples; `ring`: its context-parallel options."""
    from transformer_engine.pytorch import DotProductAttention  # type: ignore[import-not-found]

    # Rather an error than the plain form, which keeps T x T numbers.
    os.environ.setdefault("NVTE_UNFUSED_ATTN", "0")
    options = {"attention_dropout": 0.0, "qkv_format": "thd", "attn_mask_type": "padding"}
    return DotProductAttention(heads, width, **options, **ring)


def attend_by_cudnn(q_THK: Tensor, k_SHK: Tensor, v_SHK: Tensor, spans: Spans) -> Tensor:
    """The kernel of cuDNN, a call for each sample, in packs of long ones; else FlashAttention 2.

    Texts are short and of any length, so that cross-attention to them stays with FlashAttention.
    """
    if min(*spans.lengths, *spans.key_lengths) < LONG:
        return attend_packed(q_THK, k_SHK, v_SHK, spans, kernel=flash_2_kernel)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return attend_by_runs(q_THK, k_SHK, v_SHK, spans, together=False)


ATTEND: dict[AttentionBackend, Attend] = {
    AttentionBackend.FLASH_4: partial(attend_packed, kernel=flash_4_kernel),
    AttentionBackend.FLASH_3: partial(attend_packed, kernel=flash_3_kernel),
    AttentionBackend.TRANSFORMER_ENGINE: partial(
        attend_packed, kernel=engine_kernel, count_multiple=COUNT_MULTIPLE
    ),
    AttentionBackend.CUDNN: attend_by_cudnn,
    AttentionBackend.FLASH_2: partial(attend_packed, kernel=flash_2_kernel),
    AttentionBackend.SDPA: attend_by_runs,
}
