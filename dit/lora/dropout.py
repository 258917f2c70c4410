"""Dropout on the input of adapters, as PEFT has it, with the same numbers on every layout.

Whether a number is dropped is a hash of (seed of the pack at this step, name of the adapter, place
of the token in the pack, channel), in integer arithmetic. No generator has a state that would
depend on what a rank computed before, and recomputation finds the same numbers again. GPUs have a
kernel for it (`dit.models.kernels.adapter_dropout`), which gives the same bits.
"""

# T rows of the input on this rank, I channels of it on this rank

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dit.models.kernels import choice
from dit.models.kernels.adapter_dropout import adapter_dropout, adapter_dropout_add

_ROWS = 4096
"""Rows whose hashes are made at a time: they take eight bytes a number."""


def dropped(
    x_TI: Tensor, *, rate: float, key: int, place_T: Tensor, first: int, fused_kernels: bool = False
) -> tuple[Tensor, Tensor]:
    """The input for one other use, and with each number set to 0, or else divided by 1 - rate.

    `rate` is the probability of 0, `key` that of pack and adapter (`adapter_key`), `first` the
    number of the first channel. `fused_kernels` allows our kernel, which runs where `choice` says.

    To the gradient of the other use, which nothing else may have, that of this one is added.
    """
    fused = fused_kernels and choice.kernels_run_on(x_TI.device)
    masked, rest = _KERNELS if fused else _PLAIN, (place_T, rate, key, first)
    if not x_TI.requires_grad:  # what a function returns would
        return x_TI, masked.of(x_TI, *rest)
    both: Any = _Dropped.apply(x_TI, masked, *rest)
    return both


def adapter_key(seed: int, name: str) -> int:
    """62 bits for an adapter in a pack."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


class _Masked(NamedTuple):
    """One form of the arithmetic; both take x, place_T, rate, key and first."""

    of: Callable[..., Tensor]
    add: Callable[..., None]  # to a sum, which stands before them


class _Dropped(torch.autograd.Function):
    """Saves no mask: the way back makes it again."""

    @staticmethod
    def forward(
        ctx: Any, x_TI: Tensor, masked: _Masked, place_T: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(place_T)
        ctx.masked, ctx.rest = masked, rest
        return x_TI, masked.of(x_TI, place_T, *rest)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (place_T,), (to_x_TI, to_dropped_TI) = ctx.saved_tensors, gradients
        if to_dropped_TI is not None and to_x_TI is None:
            to_x_TI = ctx.masked.of(to_dropped_TI, place_T, *ctx.rest)
        elif to_dropped_TI is not None:
            ctx.masked.add(to_x_TI, to_dropped_TI, place_T, *ctx.rest)
        return to_x_TI, *[None] * 5


def _masked(x_TI: Tensor, place_T: Tensor, rate: float, key: int, first: int) -> Tensor:
    out_TI = torch.empty_like(x_TI)
    for at in range(0, len(x_TI), _ROWS):
        rows = slice(at, at + _ROWS)
        kept = _kept(place_T[rows], x_TI.shape[1], rate=rate, key=key, first=first)
        torch.mul(x_TI[rows], kept.to(x_TI.dtype) / (1 - rate), out=out_TI[rows])
    return out_TI


def _add_masked(sum_TI: Tensor, *arguments: Any) -> None:
    sum_TI.add_(_masked(*arguments))


_PLAIN, _KERNELS = _Masked(_masked, _add_masked), _Masked(adapter_dropout, adapter_dropout_add)


def _kept(place_T: Tensor, channels: int, *, rate: float, key: int, first: int) -> Tensor:
    """Which numbers [T, I] stay."""
    channel_I = torch.arange(first, first + channels, device=place_T.device)
    row_T = _mixed(_mixed(place_T ^ (key & _WORD)) ^ (key >> 31))
    hash_TI = _mixed(row_T[:, None] ^ _mixed(channel_I))
    return hash_TI >= round(rate * (_WORD + 1))


_WORD = 2**31 - 1


def _mixed(x: Tensor) -> Tensor:
    """A permutation of 31-bit words after which each bit depends on all; int64 in and out.

    The finaliser of MurmurHash3 (fmix32), on 31 bits, so that every product fits into 63.
    """
    x = x & _WORD
    x = ((x ^ (x >> 15)) * 0x05EBCA6B) & _WORD
    x = ((x ^ (x >> 13)) * 0x42B2AE35) & _WORD
    return x ^ (x >> 16)
