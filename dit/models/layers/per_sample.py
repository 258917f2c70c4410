"""Scale, shift and gate of tokens [T, D], by vectors [N, D] of the pack's timesteps.

On a CPU, adjacent samples of equal length form a rectangle, to which the vectors are broadcast
without a copy; for a small model this saves 5 to 7% of the CPU time of a step. On other devices the
kernel that uses the vectors looks them up: a kernel of `dit/models/kernels` if these run, or one of
torch.compile with `model.compile=true`. Without either, vectors are first copied to tokens by
`look_up`, which is also used for other small tables.
"""

# N timesteps of a pack (`PackedBatch.num_levels`), T tokens of a stream on this rank, D any width
# G samples of a rectangle, S tokens of each; R rows of a table, X any width

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm

from dit.models.compilation import compile_here

if TYPE_CHECKING:
    from dit.models.kernels.gated_norm import RowChunks


def kernels_run_on(device: torch.device) -> bool:
    """Whether tensors on `device` use the Triton kernels.

    They do on CUDA GPUs from Ampere on, if Triton is installed. They also do on `meta`, where
    tensors serve to count the saved activations of a GPU.
    """
    return device.type == "meta" or (device.type == "cuda" and _usable(device))


@cache
def _usable(device: torch.device) -> bool:
    """Whether Triton is installed and `device` has bfloat16: GPUs from Ampere (8.0) on."""
    return find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (8, 0)


@cache
def compiled(
    function: Callable[..., Tensor], *, backend: str | Callable[..., Any] = "inductor"
) -> Callable[..., Tensor]:
    """`function`, compiled by `backend` to a fused kernel at its first call.

    The kernel takes any number of rows, so packs of all sizes use the same kernel. Widths are
    constants of the kernel, so a norm over the width is computed in one pass.
    """
    made: Any = compile_here(function, dynamic=False, backend=backend)

    def call(*arguments: Any) -> Tensor:
        most = max(len(x) for x in arguments if isinstance(x, Tensor))
        return made(*(_with_any_rows(x, most) for x in arguments))

    return call


def _with_any_rows(x: Any, most: int) -> Any:
    if not isinstance(x, Tensor) or most == 1:
        return x
    if len(x) < most:
        # A table of vectors (one row per timestep) is a slice of a wider matrix. Torch would
        # compile again for other strides and for a single row, so tables are copied to contiguous
        # memory, and a single row twice.
        x = torch.cat((x, x)) if len(x) == 1 else x.contiguous()
    torch._dynamo.mark_dynamic(x, 0)
    return x


@dataclass(frozen=True, slots=True)
class Run:
    """A rectangle of tokens: G adjacent samples of equal length, S tokens each."""

    sample: int  # index of the first sample
    count: int  # G
    row: int  # index of the first token
    length: int  # S

    def tokens(self, x_TD: Tensor) -> Tensor:
        """The tokens of the rectangle in `x_TD`, as a view [G, S, D]."""
        rows = slice(self.row, self.row + self.count * self.length)
        return x_TD[rows].unflatten(0, (self.count, self.length))

    def samples(self, x_ND: Tensor) -> Tensor:
        """The rows of `x_ND` for the samples of the rectangle, as a view [G, 1, D]."""
        return x_ND[self.sample : self.sample + self.count, None]


@dataclass(frozen=True, slots=True)
class PerSample:
    """Applies scales, shifts and gates to tokens by each token's timestep.

    Scales, shifts and gates are tables with a row for each timestep (`PackedBatch.num_levels`). If
    tables are float32 and tokens bfloat16, sums are float32 and rounded once, at the end.
    """

    level_row_T: Tensor  # int64, table row of each token
    runs: tuple[Run, ...] | None  # rectangles of all tokens; None if they are not used
    compiled: bool = False  # whether torch.compile's kernels are used
    fused: bool = False  # whether our own kernels are used
    rms: bool = False  # whether the norm of tokens is RMSNorm (LTX) instead of LayerNorm
    # By number of table rows
    _chunks: dict[int, RowChunks] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(
        cls, level_row_T: Tensor, *, compiled: bool = False, fused_kernels: bool = False
    ) -> PerSample:
        """A `PerSample` for tokens whose table rows are `level_row_T` [T].

        `compiled` selects torch.compile's kernels. `fused_kernels` allows our own kernels, which
        are used if they run on this device and `compiled` is False.
        """
        device = level_row_T.device
        fused = fused_kernels and not compiled and kernels_run_on(device)
        rectangles = device.type == "cpu" and not (compiled or fused)
        return cls(level_row_T, _runs(level_row_T) if rectangles else None, compiled, fused)

    def modulate(self, h_TD: Tensor, *, scale_ND: Tensor, shift_ND: Tensor) -> Tensor:
        """norm(h) * scale + shift, [T, D], by a LayerNorm or RMSNorm without weights."""
        if self.fused:
            return self.branch(h_TD, scale_ND=scale_ND, shift_ND=shift_ND)[1]
        wide_TD = h_TD.to(scale_ND.dtype)
        if self.runs is not None:
            normed_TD = _norm(wide_TD, self.rms)
            x_TD = _on_rectangles(shift_ND, normed_TD, scale_ND, self.runs, shifts=True)
        else:
            x_TD = self._made(_modulate)(wide_TD, scale_ND, shift_ND, self.level_row_T, self.rms)
        return x_TD.type_as(h_TD)

    def branch(self, h_TD: Tensor, *, scale_ND: Tensor, shift_ND: Tensor) -> tuple[Tensor, Tensor]:
        """(`h_TD` for the residual sum, `modulate` of `h_TD`).

        Layers must use the returned `h_TD` in the residual sum: then the kernel of `modulate` also
        gets its gradient, and adds both gradients.
        """
        if not self.fused:
            return h_TD, self.modulate(h_TD, scale_ND=scale_ND, shift_ND=shift_ND)
        how = {"chunks": self._row_chunks(len(scale_ND)), "rms": self.rms}
        return _kernels().modulate(h_TD, scale_ND=scale_ND, shift_ND=shift_ND, **how)

    def add(self, h_TD: Tensor, x_TD: Tensor, *, gate_ND: Tensor) -> Tensor:
        """The gated residual h + gate * x, [T, D], with the gate of each token's timestep."""
        if self.fused:
            chunks = self._row_chunks(len(gate_ND))
            return _kernels().add(h_TD, x_TD, gate_ND=gate_ND, chunks=chunks)
        wide = h_TD.to(gate_ND.dtype), x_TD.to(gate_ND.dtype)
        if self.runs is not None:
            sum_TD = _on_rectangles(*wide, gate_ND, self.runs, shifts=False)
        else:
            sum_TD = self._made(_add)(*wide, gate_ND, self.level_row_T)
        return sum_TD.type_as(h_TD)

    def add_and_branch(
        self,
        h_TD: Tensor,
        x_TD: Tensor,
        *,
        gate_ND: Tensor,
        scale_ND: Tensor,
        shift_ND: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """`branch` of the gated residual h + gate * x; one kernel computes both if `fused`."""
        next_rows = {"scale_ND": scale_ND, "shift_ND": shift_ND}
        if not self.fused:
            return self.branch(self.add(h_TD, x_TD, gate_ND=gate_ND), **next_rows)
        how = {"chunks": self._row_chunks(len(gate_ND)), "rms": self.rms}
        return _kernels().add_and_modulate(h_TD, x_TD, gate_ND=gate_ND, **next_rows, **how)

    def _row_chunks(self, rows: int) -> RowChunks:
        """The chunks of tokens for tables with `rows` rows, computed once for all layers."""
        if rows not in self._chunks:
            self._chunks[rows] = _kernels().RowChunks.of(self.level_row_T, rows)
        return self._chunks[rows]

    def _made(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return compiled(function) if self.compiled else function


def _kernels() -> ModuleType:
    from dit.models.kernels import gated_norm

    return gated_norm


def _norm(h_TD: Tensor, rms: bool) -> Tensor:
    return (rms_norm if rms else layer_norm)(h_TD, h_TD.shape[-1:], eps=1e-6)


def _modulate(
    h_TD: Tensor, scale_ND: Tensor, shift_ND: Tensor, level_row_T: Tensor, rms: bool
) -> Tensor:
    rows_TD = look_up(shift_ND, level_row_T)
    return torch.addcmul(rows_TD, _norm(h_TD, rms), look_up(scale_ND, level_row_T))


def _add(h_TD: Tensor, x_TD: Tensor, gate_ND: Tensor, level_row_T: Tensor) -> Tensor:
    return torch.addcmul(h_TD, x_TD, look_up(gate_ND, level_row_T))


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
    """Autograd function of base + x * scale, with the scale of each token's timestep.

    `base` is a table [N, D] if `shifts`, else [T, D].
    """

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


def look_up(table_RX: Tensor, index_T: Tensor) -> Tensor:
    """`table_RX[index_T]`, fast for tables of a few hundred rows."""
    rows_TX = _LookUp.apply(table_RX, index_T)
    assert isinstance(rows_TX, Tensor)
    return rows_TX


class _LookUp(torch.autograd.Function):
    """Autograd function of a look-up in a small table [R, X], with a result [T, X].

    Its backward pass is a matrix product, which needs no sorting of rows.
    """

    @staticmethod
    def forward(ctx: Any, table_RX: Tensor, index_T: Tensor) -> Tensor:
        ctx.save_for_backward(index_T)
        ctx.rows = len(table_RX)
        return table_RX[index_T]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (index_T,), (gradient_TX,) = ctx.saved_tensors, gradients
        row_R1 = torch.arange(ctx.rows, device=index_T.device)[:, None]
        # A matrix product accumulates in float32, always in the same order.
        return (index_T == row_R1).to(gradient_TX.dtype) @ gradient_TX, None
