"""What tokens take from the samples that they belong to: a row of their sample's own.

On a CPU neighbours with as many tokens are one rectangle, over which the rows are spread without
being copied; on other devices tokens look their rows up, and `model.compile` does so inside of the
kernel that needs them.
"""

# T packed tokens, N samples, D any width, G samples of one rectangle, S tokens of each

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from dit.models.layers.compile import region


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Neighbours with as many tokens."""

    sample: int  # the first
    count: int
    row: int  # of its first token
    length: int  # tokens of each sample

    def tokens(self, x_TD: Tensor) -> Tensor:
        """View [G, S, D]."""
        rows = slice(self.row, self.row + self.count * self.length)
        return x_TD[rows].unflatten(0, (self.count, self.length))

    def samples(self, x_ND: Tensor) -> Tensor:
        """View [G, 1, D]."""
        return x_ND[self.sample : self.sample + self.count, None]


@dataclass(frozen=True, slots=True)
class Owners:
    """The sample of each token."""

    segment_T: Tensor  # int64
    runs: tuple[Rectangle, ...] | None  # None where one kernel for all tokens is faster
    compiled: bool = False

    @classmethod
    def of(cls, segment_T: Tensor, *, compiled: bool = False) -> Owners:
        rectangles = segment_T.device.type == "cpu" and not compiled
        return cls(segment_T, _runs(segment_T) if rectangles else None, compiled)

    def modulate(self, h_TD: Tensor, *, scale_ND: Tensor, shift_ND: Tensor) -> Tensor:
        """Normalised tokens (LayerNorm without weights) times `scale`, plus `shift`."""
        if self.runs is not None:
            return _taken(_Rectangles.apply(shift_ND, _norm(h_TD), scale_ND, self.runs, True))
        return self._made(_modulate)(h_TD, scale_ND, shift_ND, self.segment_T)

    def add(self, h_TD: Tensor, x_TD: Tensor, *, gate_ND: Tensor) -> Tensor:
        """Tokens of `h_TD`, plus those of `x_TD` times `gate`."""
        if self.runs is not None:
            return _taken(_Rectangles.apply(h_TD, x_TD, gate_ND, self.runs, False))
        return self._made(_add)(h_TD, x_TD, gate_ND, self.segment_T)

    def _made(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return region(function) if self.compiled else function


def _norm(h_TD: Tensor) -> Tensor:
    return layer_norm(h_TD, h_TD.shape[-1:], eps=1e-6)


def _modulate(h_TD: Tensor, scale_ND: Tensor, shift_ND: Tensor, segment_T: Tensor) -> Tensor:
    rows_TD = _taken(_Rows.apply(shift_ND, segment_T))
    return torch.addcmul(rows_TD, _norm(h_TD), _taken(_Rows.apply(scale_ND, segment_T)))


def _add(h_TD: Tensor, x_TD: Tensor, gate_ND: Tensor, segment_T: Tensor) -> Tensor:
    return torch.addcmul(h_TD, x_TD, _taken(_Rows.apply(gate_ND, segment_T)))


def _runs(segment_T: Tensor) -> tuple[Rectangle, ...]:
    samples, lengths = torch.unique_consecutive(segment_T, return_counts=True)
    runs: list[Rectangle] = []
    row = 0
    for sample, length in zip(samples.tolist(), lengths.tolist(), strict=True):
        last = runs[-1] if runs else None
        if last and (last.length, last.sample + last.count) == (length, sample):
            runs[-1] = replace(last, count=last.count + 1)
        else:
            runs.append(Rectangle(sample, 1, row, length))
        row += length
    return tuple(runs)


def _taken(result: Any) -> Tensor:
    assert isinstance(result, Tensor)
    return result


class _Rectangles(torch.autograd.Function):
    """base + x · scale; `base` has the rows of samples (`shifts`) or of tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        base: Tensor,
        x_TD: Tensor,
        scale_ND: Tensor,
        runs: tuple[Rectangle, ...],
        shifts: bool,
    ) -> Tensor:
        ctx.save_for_backward(x_TD, scale_ND)
        ctx.runs, ctx.shifts = runs, shifts
        out_TD = torch.empty_like(x_TD)
        for run in runs:
            base_GSD = run.samples(base) if shifts else run.tokens(base)
            x_GSD, out_GSD = run.tokens(x_TD), run.tokens(out_TD)
            torch.addcmul(base_GSD, x_GSD, run.samples(scale_ND), out=out_GSD)
        return out_TD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x_TD, scale_ND), (gradient_TD,) = ctx.saved_tensors, gradients
        to_x_TD, to_scale_ND = torch.empty_like(x_TD), torch.zeros_like(scale_ND)
        to_base = torch.zeros_like(scale_ND) if ctx.shifts else gradient_TD
        for run in ctx.runs:
            gradient_GSD, scale_G1D = run.tokens(gradient_TD), run.samples(scale_ND)
            torch.mul(gradient_GSD, scale_G1D, out=run.tokens(to_x_TD))
            product_GSD = gradient_GSD * run.tokens(x_TD)
            run.samples(to_scale_ND).add_(product_GSD.sum(1, keepdim=True))
            if ctx.shifts:
                run.samples(to_base).add_(gradient_GSD.sum(1, keepdim=True))
        return to_base, to_x_TD, to_scale_ND, None, None


class _Rows(torch.autograd.Function):
    """Plain indexing, whose own backward pass adds row after row."""

    @staticmethod
    def forward(ctx: Any, values_ND: Tensor, segment_T: Tensor) -> Tensor:
        ctx.save_for_backward(segment_T)
        ctx.samples = len(values_ND)
        return values_ND[segment_T]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (segment_T,), (gradient_TD,) = ctx.saved_tensors, gradients
        sample_N1 = torch.arange(ctx.samples, device=segment_T.device)[:, None]
        # A product of matrices sums in float32, in an order that is always the same.
        return (segment_T == sample_N1).to(gradient_TD.dtype) @ gradient_TD, None
