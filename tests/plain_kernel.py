"""What a GPU's attention kernels compute, in a loop: for the paths that only they take."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from dit.models.attention.kernels import Offsets, attend_packed
from dit.models.attention.spans import Spans


def plain_kernel(q_THK: Tensor, k_SHK: Tensor, v_SHK: Tensor, offsets: Offsets) -> Tensor:
    """Each sequence attends to itself; there must be no token outside of them, and no empty one."""
    assert offsets.cu.dtype == offsets.key_cu.dtype == torch.int32
    lengths, key_lengths = offsets.cu.diff().tolist(), offsets.key_cu.diff().tolist()
    assert (sum(lengths), sum(key_lengths)) == (len(q_THK), len(k_SHK))
    assert min(lengths) > 0 and min(key_lengths) > 0
    assert (max(lengths), max(key_lengths)) == (offsets.longest, offsets.longest_key)
    parts = [
        scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in qkv))[0].transpose(0, 1)
        for qkv in zip(
            *(q_THK.split(lengths), k_SHK.split(key_lengths), v_SHK.split(key_lengths)),
            strict=True,
        )
    ]
    return torch.cat(parts)


def attend_as_a_gpu(q_THK: Tensor, k_SHK: Tensor, v_SHK: Tensor, spans: Spans) -> Tensor:
    """`attend_packed` on a CPU. What it gives for padding is moved away: nothing may read it."""
    out_THK = attend_packed(q_THK, k_SHK, v_SHK, spans, kernel=plain_kernel)
    padding_T = torch.ones(spans.total, dtype=torch.bool)
    for start, length in (
        *zip(spans.starts, spans.lengths, strict=True),
        *spans.without_keys,
    ):
        padding_T[start : start + length] = False
    return out_THK + 3.0 * padding_T[:, None, None]
