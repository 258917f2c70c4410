"""Operations that are one kernel on CUDA, and that torch composes of several on other devices.

Meta tensors take the path of a GPU through the network. In the context `CudaKernels` these
operations are one kernel for them, too, so the bytes that are read, written and saved for backward
are those of a GPU.
"""

# T tokens, S key tokens, H heads, K head width

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn.functional import rms_norm, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

META = torch.device("meta")


class CudaKernels(TorchFunctionMode):
    """A context in which operations that torch composes on `meta` are one kernel, as on CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is rms_norm and args[0].device == META:
            return _FusedNorm.apply(args[0], kwargs["weight"])
        if func is scaled_dot_product_attention and args[0].device == META:
            return FusedAttention.apply(*args[:3])
        return func(*args, **kwargs)


class _FusedNorm(torch.autograd.Function):
    """RMS norm of meta tensors `x` [..., K] as the one kernel `aten::_fused_rms_norm` of CUDA.

    The kernel makes `x` contiguous.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_K: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight_K)
        return _fused_rms_norm(x, weight_K)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight_K = ctx.saved_tensors
        return _fused_rms_norm_backward(gradients[0].contiguous(), x, weight_K)


class FusedAttention(torch.autograd.Function):
    """Attention that saves q, k, v, its output and a log-sum-exp for each query, but no scores.

    Queries are [..., T, K], keys and values [..., S, K].
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, sums = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


class RingAttention(torch.autograd.Function):
    """Attention in Transformer Engine's ring: `AttnFuncWithCPAndKVP2P`.

    Queries are [T, H, K], keys and values [S, H, K] of this rank. For backward it saves the
    queries, one buffer with the keys and values that arrived last, the output, and a log-sum-exp
    per query.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, sums = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, torch.cat((k, v)), out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:
        q, kv = ctx.saved_tensors[:2]
        k, v = torch.empty_like(kv).chunk(2)
        return torch.empty_like(q), k, v


def _like_input(x: Tensor, weight_K: Tensor) -> Tensor:  # noqa: ARG001
    return torch.empty_like(x)


def _like_inputs(
    gradient: Tensor,  # noqa: ARG001
    x: Tensor,
    weight_K: Tensor,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight_K)


def _on_meta(name: str, function: Callable[..., Any]) -> Any:
    """`function` as the custom operator `name`, which meta tensors can pass, too.

    torch 2.11 has no `device_types="meta"`.
    """
    made = custom_op(name, function, mutates_args=())
    made.register_fake(function)
    return made


_fused_rms_norm = _on_meta("sizing::fused_rms_norm", _like_input)
_fused_rms_norm_backward = _on_meta("sizing::fused_rms_norm_backward", _like_inputs)
