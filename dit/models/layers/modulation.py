"""How the noise level steers the network: its embedding, adaLN, and its way to the tokens.

1. TimestepEmbedding  noise level -> embedding
2. AdaLN              embedding -> shift, scale and gate [N, D] of samples, in their published forms
3. PerSample          these broadcast to tokens [T, D]

On a CPU neighbouring samples of equal length form a rectangle, to which the rows are broadcast
without a copy. On other devices each token looks its row up; with `model.compile` this happens
inside the kernel that uses the row.
"""

# N level rows of a pack (one for each sample, two where it has clean tokens), T packed tokens,
# D model width, R rank of a modulation, X any width
# G samples of one rectangle, S tokens of each

from __future__ import annotations

import math
import os
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import layer_norm, pad, silu

from dit.models.layer_spec import (
    LowRankModulation,
    ModulationSpec,
    PerBlockModulation,
)
from dit.models.layers.parallel_linear import (
    BuildContext,
    GatheredLinear,
    Replicated,
    sees_part_of_tokens,
)


def sinusoid(level_N: Tensor, width: int) -> Tensor:
    """Cosines then sines of the level at `width` / 2 frequencies, [N, width], float32.

    Source: arXiv:1706.03762, Sec. 3.5, with frequencies 10000^(-i / half).
    """
    half = width // 2
    index = torch.arange(half, dtype=torch.float32, device=level_N.device)
    angle = level_N.float()[:, None] * torch.exp(-math.log(10_000.0) * index / half)
    return pad(torch.cat((angle.cos(), angle.sin()), dim=-1), (0, width % 2))


class TimestepEmbedding(nn.Module):
    """Level [N] -> normalised sinusoid [N, D] and the shift [N, 3 D] that all modulations share."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        width = config.hidden_size
        self.linear_1 = Replicated(width, width, config=config)
        self.linear_2 = Replicated(width, 3 * width, config=config)
        self.norm = nn.RMSNorm(width, eps=1e-6, dtype=config.params_dtype)
        sees_part_of_tokens(self.norm, config)

    def forward(self, level_N: Tensor) -> tuple[Tensor, Tensor]:
        wave_ND = sinusoid(level_N, self.linear_1.in_features).type_as(self.linear_1.weight)
        return self.norm(wave_ND), self.linear_2(silu(self.linear_1(wave_ND)))


@dataclass(frozen=True, kw_only=True, slots=True)
class TimestepConditioning:
    """What every modulation is computed from."""

    t_emb_ND: Tensor  # timestep embedding, with what a family adds to it (pooled text, guidance)
    adaln_shift_NX: Tensor | None = None
    """Rows that all layers share: added by low-rank and table modulations, unknown to per-block."""


@dataclass(frozen=True, slots=True)
class AdaLN:
    """What one part of a layer takes from the level (arXiv:2212.09748, Sec. 3.2)."""

    shift_ND: Tensor
    scale_ND: Tensor  # 1 is added to it
    gate_ND: Tensor | None  # of the part's output; None where it has none

    def modulate(self, h_TD: Tensor, per_sample: PerSample) -> Tensor:
        """LayerNorm of the tokens, scaled and shifted: the input of the part."""
        return per_sample.modulate(h_TD, scale_ND=1 + self.scale_ND, shift_ND=self.shift_ND)

    def add(self, h_TD: Tensor, x_TD: Tensor, per_sample: PerSample) -> Tensor:
        """The tokens, plus the gated output of the part."""
        assert self.gate_ND is not None
        return per_sample.add(h_TD, x_TD, gate_ND=self.gate_ND)


class AdaLNModule(MegatronModule):
    """Conditioning -> the `AdaLN` of each of `parts` parts of a layer, computed per level row.

    A module of Megatron-Core, because torch's own would store a split weight as a replicated one.
    """

    def __init__(self, config: TransformerConfig, *, parts: int, gated: bool = True):
        super().__init__(config=config)
        self.parts, self.each = parts, 3 if gated else 2

    def rows(self, timestep: TimestepConditioning) -> Tensor:
        """Shift, scale and gate of the parts, one after the other: [N, parts * each * D]."""
        raise NotImplementedError

    def forward(self, timestep: TimestepConditioning) -> tuple[AdaLN, ...]:
        rows = self.rows(timestep).chunk(self.parts * self.each, dim=-1)
        return tuple(
            AdaLN(rows[at], rows[at + 1], rows[at + 2] if self.each == 3 else None)
            for at in range(0, len(rows), self.each)
        )


class LowRankAdaLN(AdaLNModule):
    """Two linears through a low rank, plus the shared shift (Cosmos)."""

    def __init__(self, config: TransformerConfig, *, rank: int, parts: int = 1, gated: bool = True):
        super().__init__(config, parts=parts, gated=gated)
        width = config.hidden_size
        self.linear_1 = Replicated(width, rank, config=config)
        self.linear_2 = Replicated(rank, self.parts * self.each * width, config=config)

    def rows(self, timestep: TimestepConditioning) -> Tensor:
        assert timestep.adaln_shift_NX is not None
        rows_NX = self.linear_2(self.linear_1(silu(timestep.t_emb_ND)))
        return rows_NX + timestep.adaln_shift_NX[:, : rows_NX.shape[-1]]


class PerBlockAdaLN(AdaLNModule):
    """One linear of the embedding (FLUX, Qwen-Image, HunyuanVideo), split over tensor ranks."""

    def __init__(
        self, context: BuildContext, width: int, *, bias: bool, parts: int, gated: bool = True
    ):
        super().__init__(context.config, parts=parts, gated=gated)
        self.linear = GatheredLinear(
            width,
            self.parts * self.each * width,
            config=context.config,
            groups=context.groups,
            bias=bias,
        )

    def rows(self, timestep: TimestepConditioning) -> Tensor:
        return self.linear(silu(timestep.t_emb_ND))


class TableAdaLN(AdaLNModule):
    """A learned row for each vector, plus the rows that all layers share, in float32 (Wan, LTX)."""

    def __init__(self, config: TransformerConfig, width: int, *, parts: int, gated: bool = True):
        super().__init__(config, parts=parts, gated=gated)
        rows = torch.zeros(self.parts * self.each, width, dtype=config.params_dtype)
        self.table = nn.Parameter(rows)
        sees_part_of_tokens(self, config)

    def rows(self, timestep: TimestepConditioning) -> Tensor:
        assert timestep.adaln_shift_NX is not None
        return timestep.adaln_shift_NX.float() + self.table.float().flatten()


def make_modulation(
    spec: ModulationSpec, context: BuildContext, width: int, *, parts: int, gated: bool = True
) -> AdaLNModule:
    """The module of a choice, for `parts` parts of one layer."""
    shared = {"parts": parts, "gated": gated}
    if isinstance(spec, LowRankModulation):
        return LowRankAdaLN(context.config, rank=spec.rank, **shared)
    if isinstance(spec, PerBlockModulation):
        return PerBlockAdaLN(context, width, bias=spec.bias, **shared)
    return TableAdaLN(context.config, width, **shared)


@cache
def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function` as a fused kernel, compiled once for packs of all sizes."""
    made: Any = torch.compile(function, dynamic=True)
    return made


def check_compiler() -> None:
    """Checks that torch.compile can make kernels on this machine.

    Raises:
        ValueError: there is no C++ compiler or no Python.h, which kernels of CPUs and of GPUs need.
    """
    if missing := missing_for_compilation():
        raise ValueError(
            "model.compile=true needs a C++ compiler and Python's headers, and there is no"
            f" {missing} here; install it (Debian: g++ and python3-dev), or set model.compile=false"
        )


def missing_for_compilation() -> str:
    """What torch.compile needs and this machine lacks; empty where it lacks nothing."""
    wanted = [os.environ.get("CXX", ""), "g++", "clang++"]
    if not any(shutil.which(name) for name in wanted if name):
        return "g++, clang++ or $CXX"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return "" if header.is_file() else str(header)


@dataclass(frozen=True, slots=True)
class Run:
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
class PerSample:
    """Which row of scales, shifts and gates each token takes.

    There is one row for each sample, or two where a sample has clean tokens beside noisy ones.
    Rows may be float32 where tokens are bfloat16: then the sums are float32, too, and the tokens
    are rounded once, at the end.
    """

    level_row_T: Tensor  # int64
    runs: tuple[Run, ...] | None  # None where one kernel for all tokens is faster
    compiled: bool = False

    @classmethod
    def of(cls, level_row_T: Tensor, *, compiled: bool = False) -> PerSample:
        rectangles = level_row_T.device.type == "cpu" and not compiled
        return cls(level_row_T, _runs(level_row_T) if rectangles else None, compiled)

    def modulate(self, h_TD: Tensor, *, scale_ND: Tensor, shift_ND: Tensor) -> Tensor:
        """Normalised tokens (LayerNorm without weights) times `scale`, plus `shift`."""
        wide_TD = h_TD.to(scale_ND.dtype)
        if self.runs is not None:
            x_TD = _on_rectangles(shift_ND, _norm(wide_TD), scale_ND, self.runs, shifts=True)
        else:
            x_TD = self._made(_modulate)(wide_TD, scale_ND, shift_ND, self.level_row_T)
        return x_TD.type_as(h_TD)

    def add(self, h_TD: Tensor, x_TD: Tensor, *, gate_ND: Tensor) -> Tensor:
        """Tokens of `h_TD`, plus those of `x_TD` times `gate`."""
        wide = h_TD.to(gate_ND.dtype), x_TD.to(gate_ND.dtype)
        if self.runs is not None:
            sum_TD = _on_rectangles(*wide, gate_ND, self.runs, shifts=False)
        else:
            sum_TD = self._made(_add)(*wide, gate_ND, self.level_row_T)
        return sum_TD.type_as(h_TD)

    def _made(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return compiled(function) if self.compiled else function


def _norm(h_TD: Tensor) -> Tensor:
    return layer_norm(h_TD, h_TD.shape[-1:], eps=1e-6)


def _modulate(h_TD: Tensor, scale_ND: Tensor, shift_ND: Tensor, level_row_T: Tensor) -> Tensor:
    rows_TD = _taken(_Rows.apply(shift_ND, level_row_T))
    return torch.addcmul(rows_TD, _norm(h_TD), _taken(_Rows.apply(scale_ND, level_row_T)))


def _add(h_TD: Tensor, x_TD: Tensor, gate_ND: Tensor, level_row_T: Tensor) -> Tensor:
    return torch.addcmul(h_TD, x_TD, _taken(_Rows.apply(gate_ND, level_row_T)))


def _runs(segment_T: Tensor) -> tuple[Run, ...]:
    samples, lengths = torch.unique_consecutive(segment_T, return_counts=True)
    runs: list[Run] = []
    row = 0
    for sample, length in zip(samples.tolist(), lengths.tolist(), strict=True):
        last = runs[-1] if runs else None
        if last and (last.length, last.sample + last.count) == (length, sample):
            runs[-1] = replace(last, count=last.count + 1)
        else:
            runs.append(Run(sample, 1, row, length))
        row += length
    return tuple(runs)


def _taken(result: Any) -> Tensor:
    assert isinstance(result, Tensor)
    return result


def _on_rectangles(
    base: Tensor, x_TD: Tensor, scale_ND: Tensor, runs: tuple[Run, ...], *, shifts: bool
) -> Tensor:
    return _taken(_Rectangles.apply(base, x_TD, scale_ND, runs, shifts))


class _Rectangles(torch.autograd.Function):
    """base + x · scale; `base` has the rows of samples (`shifts`) or of tokens."""

    @staticmethod
    def forward(
        ctx: Any, base: Tensor, x_TD: Tensor, scale_ND: Tensor, runs: tuple[Run, ...], shifts: bool
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
    def forward(ctx: Any, values_ND: Tensor, level_row_T: Tensor) -> Tensor:
        ctx.save_for_backward(level_row_T)
        ctx.samples = len(values_ND)
        return values_ND[level_row_T]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (level_row_T,), (gradient_TD,) = ctx.saved_tensors, gradients
        sample_N1 = torch.arange(ctx.samples, device=level_row_T.device)[:, None]
        # A product of matrices sums in float32, in an order that is always the same.
        return (level_row_T == sample_N1).to(gradient_TD.dtype) @ gradient_TD, None
