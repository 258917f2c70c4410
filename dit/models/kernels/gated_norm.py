"""Kernels for gated residual, norm, scale and shift of tokens by their timestep, with gradients.

1. sum = h + gate · y              adds the output of a sublayer (attention, feed-forward)
2. x = norm(sum) · scale + shift   the input of the next sublayer; LayerNorm or RMSNorm

A call may have either step or both. `sum`, `y` and two numbers for each token are saved for the
backward pass, whose kernel also adds the two gradients of `sum`.

Scale, shift and gate are tables with a row for each timestep in the pack. Samples, conditioning
frames and reference latents have separate timesteps, so the tokens of a table row may be anywhere
in the pack. The gradient of a table row is a sum over its tokens. To add them in a fixed order,
`RowChunks` sorts tokens stably by table row and cuts them into pieces, after each CHUNK tokens and
after each table row. One program processes one piece: it holds the row's scale and shift in
registers and writes a partial sum to a separate slot. A second kernel adds the partial sums of a
row in order, so the result does not depend on the order of programs.

The piece of row r in chunk c has slot c + r. From a piece to the next, c or r increases, so no two
pieces have the same slot. The number of slots is known without waiting for the device.
"""

# T packed tokens, N timesteps (table rows), D model width, S slots, each of a piece or empty
# P number of tables with gradients: shift, scale, gate, or some of them

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK = 32
"""Largest number of tokens of a piece. 32k tokens need 1024 programs; a partial sum (float32) has
1/16 of the bytes of a piece's tokens (bfloat16)."""


@dataclass(frozen=True, slots=True)
class RowChunks:
    """Tokens sorted by timestep and cut into pieces, one for each program of the kernel.

    The tensors are computed on the device, once for all layers of a pass.
    """

    order_T: Tensor  # int32, indices of tokens, sorted by table row, then by index
    slots_S3: Tensor  # int32: table row, begin and end of the slot's tokens in `order_T`
    rows_N2: Tensor  # int32: first slot of a table row, number of its slots

    @classmethod
    def of(cls, level_row_T: Tensor, rows: int) -> RowChunks:
        """The pieces of T tokens; `level_row_T` is the table row of each token's timestep.

        `rows` is the number of rows of the tables; a row may have no tokens.
        """
        device, tokens = level_row_T.device, len(level_row_T)
        sorted_T, order_T = level_row_T.sort(stable=True)
        row_N = torch.arange(rows, device=device)
        start_N = torch.searchsorted(sorted_T, row_N)
        stop_N = torch.searchsorted(sorted_T, row_N, right=True)
        first_N = start_N // CHUNK + row_N
        count_N = ((stop_N - 1) // CHUNK - start_N // CHUNK + 1) * (stop_N > start_N)
        slot_S = torch.arange(slots_of(tokens, rows), device=device)
        row_S = torch.searchsorted(first_N, slot_S, right=True) - 1
        chunk_S = slot_S - row_S
        begin_S = torch.maximum(chunk_S * CHUNK, start_N[row_S])
        end_S = torch.minimum((chunk_S + 1) * CHUNK, stop_N[row_S])
        return cls(
            order_T=order_T.int(),
            slots_S3=torch.stack((row_S, begin_S, end_S), dim=1).int(),
            rows_N2=torch.stack((first_N, count_N), dim=1).int(),
        )


def slots_of(tokens: int, rows: int) -> int:
    """The number of slots that suffices for any division of `tokens` among `rows` table rows."""
    return -(-tokens // CHUNK) + rows - 1


EPS = 1e-6
"""Epsilon of the norm, as in every published adaLN."""
PARTS_BLOCK = 128
"""Number of columns of a program of the second kernel, which adds partial sums."""


def modulate(
    h_TD: Tensor, *, scale_ND: Tensor, shift_ND: Tensor, chunks: RowChunks, rms: bool = False
) -> tuple[Tensor, Tensor]:
    """(h, norm(h) * scale + shift), with the scale and shift of each token's timestep.

    The residual must use the returned h: then the backward kernel adds both gradients of h. The
    norm is RMSNorm if `rms` is set, else LayerNorm.
    """
    return _GatedNorm.apply(h_TD, None, None, scale_ND, shift_ND, chunks, rms)  # type: ignore[return-value]


def add(h_TD: Tensor, y_TD: Tensor, *, gate_ND: Tensor, chunks: RowChunks) -> Tensor:
    """The gated residual h + gate * y, with the gate of each token's timestep."""
    return _GatedNorm.apply(h_TD, y_TD, gate_ND, None, None, chunks, False)[0]  # type: ignore[index]


def add_and_modulate(
    h_TD: Tensor,
    y_TD: Tensor,
    *,
    gate_ND: Tensor,
    scale_ND: Tensor,
    shift_ND: Tensor,
    chunks: RowChunks,
    rms: bool = False,
) -> tuple[Tensor, Tensor]:
    """(sum, norm(sum) * scale + shift), with sum = h + gate * y, in one kernel.

    It is `add`, then `modulate`.
    """
    return _GatedNorm.apply(h_TD, y_TD, gate_ND, scale_ND, shift_ND, chunks, rms)  # type: ignore[return-value]


class _GatedNorm(torch.autograd.Function):
    """Autograd function of the kernels, which returns (`sum`, `x`).

    Without a gate, `sum` is the input itself. A custom operator must not return its input, so the
    gradient is defined here and not for the operator.
    """

    @staticmethod
    def forward(  # noqa: PLR0913  # what an operator takes is flat
        ctx: Any,
        h_TD: Tensor,
        y_TD: Tensor | None,
        gate_ND: Tensor | None,
        scale_ND: Tensor | None,
        shift_ND: Tensor | None,
        chunks: RowChunks,
        rms: bool,
    ) -> tuple[Tensor, Tensor | None]:
        rows = (gate_ND, scale_ND, shift_ND)
        made = gated_norm(h_TD, y_TD, *rows, chunks.order_T, chunks.slots_S3, rms)
        sum_TD = h_TD if gate_ND is None else made.pop(0)
        x_TD, stats_T2 = made or (None, None)
        kept_TD = None if scale_ND is None else sum_TD
        ctx.save_for_backward(kept_TD, y_TD, gate_ND, scale_ND, stats_T2)
        # Not as saved tensors: all layers share the chunks, and offloading would copy them.
        ctx.chunks, ctx.rms = chunks, rms
        # The gradient of an unused result is None, not zeros that the kernel would add.
        ctx.set_materialize_grads(False)
        return sum_TD, x_TD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs of `forward`.

        `gradients` are the gradients [T, D] of `sum` and of `x`; None for an unused result.
        """
        to_sum_TD, to_x_TD = gradients
        h_TD, y_TD, gate_ND, scale_ND, stats_T2 = ctx.saved_tensors
        if h_TD is not None and to_x_TD is None:
            to_x_TD = torch.zeros_like(h_TD)
        if h_TD is None and to_sum_TD is None:
            return (None,) * 7
        c = ctx.chunks
        kept = (h_TD, y_TD, gate_ND, scale_ND, stats_T2)
        *made, to_rows_PND = gated_norm_backward(
            to_x_TD, to_sum_TD, *kept, c.order_T, c.slots_S3, c.rows_N2, ctx.rms
        )
        to_h_TD = to_sum_TD if h_TD is None else made.pop(0)
        to_y_TD = made.pop(0) if made else None
        to_rows = list(to_rows_PND)
        to_gate_ND = None if gate_ND is None else to_rows.pop()
        to_shift_ND, to_scale_ND = to_rows or (None, None)
        return to_h_TD, to_y_TD, to_gate_ND, to_scale_ND, to_shift_ND, None, None


@torch.library.custom_op(
    "dit::gated_norm",
    mutates_args=(),
    schema="(Tensor h, Tensor? y, Tensor? gate, Tensor? scale, Tensor? shift, Tensor order,"
    " Tensor slots, bool rms=False) -> Tensor[]",
)
def gated_norm(  # noqa: PLR0913  # what an operator takes is flat
    h_TD: Tensor,
    y_TD: Tensor | None,
    gate_ND: Tensor | None,
    scale_ND: Tensor | None,
    shift_ND: Tensor | None,
    order_T: Tensor,
    slots_S3: Tensor,
    rms: bool = False,
) -> list[Tensor]:
    """The forward pass: returns `sum` if there is a gate, then `x` and statistics if a scale.

    `sum` is h + gate * y, and `x` is norm(sum) * scale + shift, both [T, D]; without a gate, `sum`
    is h. The statistics of each token, [T, 2] in float32, are its mean (0 for RMSNorm) and
    1 / standard deviation (1 / root mean square for RMSNorm).
    """
    h_TD, y_TD = h_TD.contiguous(), None if y_TD is None else y_TD.contiguous()
    gated, norm = gate_ND is not None, scale_ND is not None
    rows = [one if one is None else _columns(one) for one in (gate_ND, scale_ND, shift_ND)]
    sum_TD, x_TD = _like(h_TD) if gated else None, _like(h_TD) if norm else None
    stats_T2 = h_TD.new_empty(len(h_TD), 2, dtype=torch.float32) if norm else None
    if len(h_TD):
        _kernels().gated_norm_forward[(len(slots_S3),)](
            *(h_TD, y_TD, *rows, order_T, slots_S3, sum_TD, x_TD, stats_T2),
            *(0 if one is None else one.stride(0) for one in rows),
            EPS=EPS,
            **_sizes(h_TD),
            GATED=gated,
            NORM=norm,
            RMS=rms,
        )
    return [one for one in (sum_TD, x_TD, stats_T2) if one is not None]


@gated_norm.register_fake
def _(
    h_TD: Tensor,
    y_TD: Tensor | None,  # noqa: ARG001
    gate_ND: Tensor | None,
    scale_ND: Tensor | None,
    *_others: Any,
) -> list[Tensor]:
    made = [_like(h_TD) for rows in (gate_ND, scale_ND) if rows is not None]
    stats = [] if scale_ND is None else [h_TD.new_empty(len(h_TD), 2, dtype=torch.float32)]
    return made + stats


@torch.library.custom_op(
    "dit::gated_norm_backward",
    mutates_args=(),
    schema="(Tensor? to_x, Tensor? to_sum, Tensor? h, Tensor? y, Tensor? gate, Tensor? scale,"
    " Tensor? stats, Tensor order, Tensor slots, Tensor rows, bool rms=False) -> Tensor[]",
)
def gated_norm_backward(  # noqa: PLR0913  # what an operator takes is flat
    to_x_TD: Tensor | None,
    to_sum_TD: Tensor | None,
    h_TD: Tensor | None,
    y_TD: Tensor | None,
    gate_ND: Tensor | None,
    scale_ND: Tensor | None,
    stats_T2: Tensor | None,
    order_T: Tensor,
    slots_S3: Tensor,
    rows_N2: Tensor,
    rms: bool = False,
) -> list[Tensor]:
    """Gradients of h [T, D] if there is a scale, of y [T, D] if there is a gate, and of the tables.

    `to_x_TD` and `to_sum_TD` are the gradients of `x` and of `sum`. `h_TD` is the `sum` that the
    forward pass saved. The gradients of the tables are one tensor [P, N, D]: shift and scale if
    there is a scale, then gate if there is a gate.
    """
    gated, norm = gate_ND is not None, scale_ND is not None
    g_TD = to_x_TD if norm else to_sum_TD
    assert g_TD is not None
    tokens = [x if x is None else x.contiguous() for x in (to_x_TD, to_sum_TD, h_TD, y_TD)]
    rows = [one if one is None else _columns(one) for one in (gate_ND, scale_ND)]
    to_h_TD, to_y_TD = (None if x is None else _like(x) for x in (h_TD, y_TD))
    kinds, sizes = 2 * norm + gated, _backward_sizes(g_TD)
    to_rows_PND = _to_rows(gate_ND, scale_ND)
    if not len(order_T):
        return [*_given(to_h_TD, to_y_TD), to_rows_PND.zero_()]
    parts_SPD = g_TD.new_empty(len(slots_S3), kinds, sizes["D"], dtype=torch.float32)
    _kernels().gated_norm_backward[(len(slots_S3),)](
        *(*tokens, *rows, stats_T2, order_T, slots_S3, to_h_TD, to_y_TD, parts_SPD),
        *(0 if one is None else one.stride(0) for one in rows),
        **sizes,
        GATED=gated,
        NORM=norm,
        RESIDUAL=to_sum_TD is not None,
        RMS=rms,
    )
    grid, block = (len(rows_N2), kinds, -(-sizes["D"] // PARTS_BLOCK)), PARTS_BLOCK
    _kernels().gated_norm_add_row_parts[grid](
        parts_SPD, rows_N2, to_rows_PND, D=sizes["D"], BLOCK=block, SLOTS=16
    )
    return [*_given(to_h_TD, to_y_TD), to_rows_PND]


@gated_norm_backward.register_fake
def _(
    to_x_TD: Tensor | None,  # noqa: ARG001
    to_sum_TD: Tensor | None,  # noqa: ARG001
    h_TD: Tensor | None,
    y_TD: Tensor | None,
    gate_ND: Tensor | None,
    scale_ND: Tensor | None,
    *_others: Any,
) -> list[Tensor]:
    return [*(_like(x) for x in _given(h_TD, y_TD)), _to_rows(gate_ND, scale_ND)]


def _to_rows(gate_ND: Tensor | None, scale_ND: Tensor | None) -> Tensor:
    """Empty memory [P, N, D] for the gradients of the tables that are not None.

    The order is shift and scale, then gate.
    """
    given = _given(gate_ND, scale_ND)
    kinds = 2 * (scale_ND is not None) + (gate_ND is not None)
    return given[0].new_empty(kinds, *given[0].shape)


def _like(x_TD: Tensor) -> Tensor:
    return torch.empty_like(x_TD, memory_format=torch.contiguous_format)


def _given(*tensors: Tensor | None) -> list[Tensor]:
    return [one for one in tensors if one is not None]


def _columns(rows_ND: Tensor) -> Tensor:
    """`rows_ND`, copied if the numbers of a row are not contiguous."""
    return rows_ND if rows_ND.stride(-1) == 1 else rows_ND.contiguous()


def _kernels() -> Any:
    from dit.models.kernels import gated_norm_triton

    return gated_norm_triton


def _sizes(h_TD: Tensor) -> dict[str, int]:
    """Launch parameters of the forward kernel: each thread loads 8 numbers of a tensor at once."""
    width = h_TD.shape[-1]
    block = _power_of_two(width)
    tokens = min(max(2048 // block, 1), 16)
    warps = min(max(block * tokens // 256, 1), 32)
    return {"D": width, "BLOCK": block, "TOKENS": tokens, **_threads(warps)}


def _backward_sizes(h_TD: Tensor) -> dict[str, int]:
    """Launch parameters of the backward kernel: each thread has 4 numbers of a tile.

    If the width is not a power of two, the columns beyond the largest power of two form a second,
    smaller tile (`TAIL`), so that registers suffice and few threads are idle. 64 registers do not
    hold 6 numbers of each tensor: at 3072 columns, Triton 3.6 spills 32 bytes in each thread.
    """
    width = h_TD.shape[-1]
    block, tail = _power_of_two(width), 0
    tokens = min(max(2048 // block, 1), 16)
    if block > width and tokens == 1 and (rest := _power_of_two(width - block // 2)) < block // 2:
        block, tail = block // 2, rest
    warps = min(max(block * tokens // 128, 1), 32)
    if tail and warps > 8:
        warps = 32
    # For wider tokens, registers do not suffice for the addresses of the next tokens.
    sizes = {"TAIL": tail, "TOKENS": tokens, "STAGES": 2 if width <= 2048 else 1}
    return {"D": width, "BLOCK": block, **sizes, **_threads(warps)}


def _power_of_two(width: int) -> int:
    return 1 << max(width - 1, 1).bit_length()


def _threads(warps: int) -> dict[str, int]:
    """`num_warps`, and the `maxnreg` with which a multiprocessor runs 768 or 1024 threads."""
    return {"num_warps": warps, "maxnreg": 64 if warps > 8 else 80}
