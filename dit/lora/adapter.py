"""Low-rank adapters of linears: y = W x + alpha / r · B A x (LoRA, arXiv:2106.09685, Eq. 3).

A linear that fuses several of Diffusers' linears (queries, keys and values) has an A and a B for
each of them, as in PEFT, so that adapters can be exchanged.

| linear     | A                   | B                    | sent between tensor ranks         |
|------------|---------------------|----------------------|-----------------------------------|
| column     | whole               | split as the outputs | rows of width r before B          |
| row        | split as the inputs | whole                | rows of width r, summed, before B |
| replicated | whole               | whole                | nothing                           |

So the number of tensor ranks need not divide the rank r.

The two products of an adapter add to the linear's results in place: `narrowed` (A x, whose part of
dL/dx is added in the backward pass) and `widened` (the output of the linear plus B h). Such
products read and write [T, O] and [T, I] once each. Separate additions, with a factor alpha / r,
would move them six and four times.
"""

# T rows, I inputs, O outputs (of this tensor rank), R rank, of all parts together in products

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from dit.models.layers import per_sample
from dit.models.layers.adaptable import (
    DOWN,
    UP,
    TensorSharing,
    dropout_rows,
    is_adapter,
    mark_split,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterShape:
    """Rank and alpha of one adapter, as PEFT defines them."""

    rank: PositiveInt
    alpha: PositiveFloat

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputParts:
    """Output widths of the Diffusers linears, such as q, k and v, that one linear fuses."""

    parts: Sequence[int]  # outputs of each, on all tensor ranks together
    groups: int  # groups of outputs on this rank, such as heads, each with outputs of every part


class Factors(nn.Module):
    """The matrices A [R, I] and B [O, R] of one adapter."""

    def __init__(self, shape: AdapterShape, *, inputs: int, outputs: int, dtype: torch.dtype):
        super().__init__()
        self.A = nn.Parameter(torch.zeros(shape.rank, inputs, dtype=dtype))
        self.B = nn.Parameter(torch.zeros(outputs, shape.rank, dtype=dtype))
        self.scale = shape.scale

    def forward(self) -> tuple[Tensor, Tensor]:
        """Returns (A, B).

        The adapter calls this module instead of reading its weights, because Megatron-Core's DDP
        waits, when a module is called, for weights that are still being gathered. Reading them
        directly would, with ddp.overlap_param_gather, compute with the weights of the previous
        step.
        """
        return self.A, self.B


class Adapter(nn.Module):
    """The adapters of one linear: one for each part (such as q, k, v) of its outputs."""

    def __init__(
        self,
        weight: Tensor,
        shapes: Sequence[AdapterShape | None],
        *,
        name: str,
        outputs: OutputParts,
        sharing: TensorSharing,
        dtype: torch.dtype,
        dropout: float = 0.0,
    ):
        """Creates the adapters of the linear with the weight `weight`, all zero, in `dtype`.

        `shapes` are rank and alpha for each part of the outputs; None for no adapter. `outputs` are
        the widths of these parts. `sharing` says how tensor ranks divide the linear. `name` is the
        name of the linear in the whole network, plus that of the adapter if there are several; it
        seeds the dropout. `dropout` is the dropout rate.
        """
        super().__init__()
        here, inputs = weight.shape
        self.name, self.groups, self.sharing = name, outputs.groups, sharing
        self.parts = [here * part // sum(outputs.parts) for part in outputs.parts]
        self.dropout = dropout
        self.enabled = True  # see `adapters_off`
        # Children are named by the number of their part: inside modules that are not its own,
        # Megatron-Core takes names in a checkpoint from these, not from `sharded_state_dict`.
        for number, shape in enumerate(shapes):
            if shape is not None:
                made = {"inputs": inputs, "outputs": self.parts[number], "dtype": dtype}
                self.add_module(str(number), Factors(shape, **made))
        self.to(weight.device)
        for factors in self.factors:
            self._mark(factors, weight)

    @property
    def factors(self) -> list[Factors]:
        """Matrices A and B of each part that has an adapter."""
        return [one for _, one in self._named()]

    def _mark(self, factors: Factors, weight: Tensor) -> None:
        """Marks gradients that are partial sums, and weights that are shards, for Megatron-Core."""
        sharing = self.sharing
        down: Any = factors.A
        up: Any = factors.B
        if sharing.axis is None:
            down.sequence_parallel = up.sequence_parallel = getattr(
                weight, "sequence_parallel", False
            )
        elif sharing.axis == 0:
            mark_split(up, axis=0)
            down.sequence_parallel = sharing.sequence or sharing.partial
        else:
            mark_split(down, axis=1)
            up.sequence_parallel = sharing.sequence

    def forward(self, x_TI: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
        """Output of the linear `product` for `x_TI`, plus the outputs of the adapters."""
        downs, ups = zip(*(one() for one in self.factors), strict=True)
        x_TI, h_TR = self._down(x_TI, downs)
        out_TO = product(x_TI)
        up_OR, scale = self._up(ups)
        return widened(out_TO, self.sharing.exchanged(h_TR), up_OR, scale=scale)

    def _up(self, ups: Sequence[Tensor]) -> tuple[Tensor, float]:
        """Returns (the B of all parts as one matrix [O, R], factor of its product).

        The columns are in the order of the parts in `_down`. With several parts, the rows are in
        the order of the linear's outputs and are zero outside the columns of their part, so that
        one product reads and writes all outputs. The matrix then contains the parts' scales, and
        the factor is 1.
        """
        named = self._named()
        if len(self.parts) == 1:
            return ups[0], named[0][1].scale
        ranks = [up.shape[1] for up in ups]
        every = [ups[0].new_zeros(outputs, sum(ranks)) for outputs in self.parts]
        for at, ((name, one), up) in enumerate(zip(named, ups, strict=True)):
            beside = sum(ranks[:at]), sum(ranks[at + 1 :])
            every[int(name)] = pad(up * one.scale, beside)
        by_group = [part.unflatten(0, (self.groups, -1)) for part in every]
        return torch.cat(by_group, dim=1).flatten(0, 1), 1.0

    def _down(self, x_TI: Tensor, downs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Returns (input for the linear, A x [T, R]), where A x has the columns of all parts.

        In training, each part has its own dropout mask for x.
        """
        rows = dropout_rows()
        if not (self.training and self.dropout and rows is not None):
            return narrowed(x_TI, torch.cat([*downs]) if len(downs) > 1 else downs[0])
        sharing, width = self.sharing, x_TI.shape[-1]
        split = sharing.axis == 1 and sharing.group is not None
        where = {
            "place_T": rows.places_of(x_TI, token_row=sharing.token_row),
            "first": sharing.group.rank() * width if split and sharing.group else 0,
            "fused_kernels": rows.fused_kernels,
        }
        every = []
        for (part, _), down in zip(self._named(), downs, strict=True):
            key = adapter_key(rows.seed, f"{self.name}/{part}")
            x_TI, dropped_TI = dropped(x_TI, rate=self.dropout, key=key, **where)
            every.append(linear(dropped_TI.to(down.dtype), down))
        return x_TI, torch.cat(every, dim=-1)

    def _named(self) -> list[tuple[str, Factors]]:
        return list(self.named_children())  # type: ignore[arg-type]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> ShardedStateDict:
        """Tensors named lora.LAYER.PART.A (or B), not stacked, because layers may differ in rank.

        `sharded_offsets`, from Megatron-Core, has the layer's index in its stack.
        """
        prefix += "".join(f"{offset}." for _, offset, _ in sharded_offsets)
        tensors, axes = {}, {}
        for name, factors in self._named():
            tensors |= {f"{name}.{DOWN}": factors.A, f"{name}.{UP}": factors.B}
            if self.sharing.axis is not None:
                axes[f"{name}.{UP if self.sharing.axis == 0 else DOWN}"] = self.sharing.axis
        return make_sharded_tensors_for_checkpoint(
            tensors,
            prefix,
            axes,
            (),
            tp_group=self.sharing.group,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )


def freeze(network: nn.Module, *, trained: Callable[[str], bool] = is_adapter) -> None:
    """Makes the weights trainable whose names `trained` accepts, and freezes all others."""
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(trained(name))


def narrowed(x_TI: Tensor, down_RI: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (`x_TI`, A x), where A x is [T, R] in the dtype of A.

    The frozen linear must take the returned `x_TI`, and nothing else may: in the backward pass the
    adapter's gradient is added in place to that of the linear.
    """
    if not x_TI.requires_grad:  # the outputs of an autograd function would
        return x_TI, linear(x_TI.to(down_RI.dtype), down_RI)
    both: Any = _Narrowed.apply(x_TI, down_RI)
    return both


def widened(out_TO: Tensor, h_TR: Tensor, up_OR: Tensor, *, scale: float) -> Tensor:
    """Adds scale · B h to `out_TO` in place and returns it; nothing else may use `out_TO`."""
    out = _Widened.apply(out_TO, h_TR, up_OR, scale)
    assert isinstance(out, Tensor)
    return out


class _Narrowed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, down_RI: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x_TI, down_RI)
        return x_TI, linear(x_TI.to(down_RI.dtype), down_RI)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x_TI, down_RI), (to_x_TI, to_h_TR) = ctx.saved_tensors, gradients
        # The linear has just made this gradient, and nothing else has it.
        to_x_TI.addmm_(to_h_TR.to(to_x_TI.dtype), down_RI.to(to_x_TI.dtype))
        of_down = ctx.needs_input_grad[1]
        return to_x_TI, to_h_TR.t().matmul(x_TI.to(to_h_TR.dtype)) if of_down else None


class _Widened(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out_TO: Tensor, h_TR: Tensor, up_OR: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(h_TR, up_OR)
        ctx.scale = scale
        h_TR, up_OR = h_TR.to(out_TO.dtype), up_OR.to(out_TO.dtype)
        # Detached, because autograd refuses to change in place what another function returned
        # unchanged, as a sum over one rank does.
        return out_TO.detach().addmm_(h_TR, up_OR.t(), alpha=scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (h_TR, up_OR), (to_out_TO,) = ctx.saved_tensors, gradients
        narrow_TO, (_, of_h, of_up, _) = to_out_TO.to(h_TR.dtype), ctx.needs_input_grad
        return (
            to_out_TO,
            narrow_TO.matmul(up_OR).mul_(ctx.scale) if of_h else None,
            narrow_TO.t().matmul(h_TR).mul_(ctx.scale) if of_up else None,
            None,
        )


_ROWS = 4096
"""Number of rows that are hashed at a time: hashes take eight bytes for each number."""


def dropped(
    x_TI: Tensor, *, rate: float, key: int, place_T: Tensor, first: int, fused_kernels: bool = False
) -> tuple[Tensor, Tensor]:
    """`x_TI` unchanged, and `x_TI` after dropout: numbers set to 0 or divided by 1 - rate.

    The dropout is PEFT's, with the same mask on every layout: an integer hash of (seed of the pack
    at this step, name of the adapter, position of the token in the pack, channel) decides whether a
    number is dropped. No generator has a state that depends on a rank's earlier work, and
    recomputation repeats the mask. GPUs have a kernel for it (`dit.models.kernels.adapter_dropout`)
    with equal bits.

    `rate` is the probability of 0, `key` belongs to pack and adapter (`adapter_key`), `place_T` has
    the positions of the tokens in the pack, and `first` is the index of the first channel.
    `fused_kernels` allows the kernel, if `kernels_run_on` this device. The backward pass adds the
    dropped input's gradient in place to the other gradient, which must have no other reference.
    """
    fused = fused_kernels and per_sample.kernels_run_on(x_TI.device)
    masked, rest = _kernels() if fused else _PLAIN, (place_T, rate, key, first)
    if not x_TI.requires_grad:  # the outputs of an autograd function would
        return x_TI, masked.of(x_TI, *rest)
    both: Any = _Dropped.apply(x_TI, masked, *rest)
    return both


def adapter_key(seed: int, name: str) -> int:
    """A 62-bit number for the adapter `name` in the pack with `seed`, which dropout hashes."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


class _Masked(NamedTuple):
    """Interface of both dropout implementations; arguments are (x, place_T, rate, key, first)."""

    of: Callable[..., Tensor]
    add: Callable[..., None]  # adds the result in place to one more tensor, its first argument


class _Dropped(torch.autograd.Function):
    """Dropout that saves no mask for the backward pass, but computes it again."""

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


_PLAIN = _Masked(_masked, _add_masked)


@cache
def _kernels() -> _Masked:
    from dit.models.kernels.adapter_dropout import adapter_dropout, adapter_dropout_add

    return _Masked(adapter_dropout, adapter_dropout_add)


def _kept(place_T: Tensor, channels: int, *, rate: float, key: int, first: int) -> Tensor:
    """Boolean mask [T, I] of the numbers that dropout keeps."""
    channel_I = torch.arange(first, first + channels, device=place_T.device)
    row_T = _mixed(_mixed(place_T ^ (key & _WORD)) ^ (key >> 31))
    hash_TI = _mixed(row_T[:, None] ^ _mixed(channel_I))
    return hash_TI >= round(rate * (_WORD + 1))


_WORD = 2**31 - 1


def _mixed(x: Tensor) -> Tensor:
    """Permutes the 31-bit words `x` so that every output bit depends on all input bits.

    It is the finaliser of MurmurHash3 (fmix32) on 31 bits, so that each product fits into 63 bits.
    """
    x = x & _WORD
    x = ((x ^ (x >> 15)) * 0x05EBCA6B) & _WORD
    x = ((x ^ (x >> 13)) * 0x42B2AE35) & _WORD
    return x ^ (x >> 16)
