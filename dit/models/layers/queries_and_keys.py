"""Preparation of queries and keys before attention: RMSNorm, then rotary positions.

1. RMSNorm            of each head, or across all heads of a token; `CentredNorm`: also of tokens
2. RotaryTable        RoPE (arXiv:2104.09864) on any number of axes: cosines and sines of all tokens
   InterleavedRotary  one set of frequencies, each for one of the axes (MRoPE)
   WholeWidthRotary   angles over the width of a token, so that each head has its own
   rotate             rotates queries and keys by the angles of one of these tables

`hold_key_bias` is for keys without a norm. `fused_parts` computes the norm of each head and the
rotation in one kernel of `dit/models/kernels`, `fused_across_heads` the norm across heads, with or
without rotation.
"""

# T query tokens, S key tokens, A axes, H heads of this tensor rank, K head width, X numbers of a
# head in the product that makes queries and keys, F frequencies; P = 3 * H * K outputs of that
# product, or pairs of numbers of all heads

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn.functional import pad, rms_norm

from dit.models.layers.adaptable import mark_split


class HeadNorm(nn.RMSNorm):
    """RMSNorm (arXiv:1910.07467) over the width of a head, with one weight [K] for all heads.

    CUDA has a kernel for it. On a CPU torch composes it of small operations, whose backward pass
    reads all tokens twice as often as necessary, so an autograd function of ours computes it.
    """

    def __init__(self, width: int, *, dtype: torch.dtype, eps: float = 1e-5):
        super().__init__(width, eps=eps, dtype=dtype)

    def forward(self, x: Tensor | None) -> Tensor:
        """The normalised `x` [T, H, K]; without `x`, the weight [K], for a fused kernel.

        A call returns the weight, because only a call makes Megatron-Core's DDP wait until it has
        gathered the weight.
        """
        if x is None:
            return self.weight
        if x.device.type != "cpu":
            return super().forward(x)
        y_THK = _Normalised.apply(x, self.weight, self.eps)
        assert isinstance(y_THK, Tensor)
        return y_THK


class CentredNorm(nn.Module):
    """RMSNorm in float32 whose weights are stored minus 1, so that they start at 0.

    The norm is over the width of a token, or of a head.
    """

    def __init__(self, width: int, *, eps: float, dtype: torch.dtype):
        super().__init__()
        self.eps = eps
        self.offset = nn.Parameter(torch.zeros(width, dtype=dtype))

    def forward(self, x: Tensor | None) -> Tensor:
        """The normalised `x` [..., X]; without `x`, the norm's factors 1 + stored weight [X]."""
        weight_X = self.offset.float() + 1
        if x is None:
            return weight_X
        return rms_norm(x.float(), weight_X.shape, weight_X, self.eps).type_as(x)


class _Normalised(torch.autograd.Function):
    """Autograd function of y = n · w with n = x / rms(x), in float32."""

    @staticmethod
    def forward(ctx: Any, x_THK: Tensor, weight_K: Tensor, eps: float) -> Tensor:
        wide_THK = x_THK.float()
        pace_TH1 = (wide_THK.square().mean(-1, keepdim=True) + eps).rsqrt()
        n_THK = wide_THK * pace_TH1
        ctx.save_for_backward(n_THK, pace_TH1, weight_K)
        return (n_THK * weight_K).type_as(x_THK)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """Gradients: dL/dw = sum g · n, dL/dx = (g · w - n · mean(g · w · n)) / rms(x), g = dL/dy.

        g and dL/dx are [T, H, K], dL/dw is [K].
        """
        (n_THK, pace_TH1, weight_K), (gradient_THK,) = ctx.saved_tensors, gradients
        g_THK, w_K = gradient_THK.float(), weight_K.float()
        product_THK = g_THK * n_THK
        mean_TH1 = (product_THK @ w_K)[..., None] / len(w_K)
        to_x_THK = (g_THK * w_K).addcmul_(n_THK, mean_TH1, value=-1).mul_(pace_TH1)
        to_weight_K = product_THK.sum((0, 1))
        return to_x_THK.type_as(gradient_THK), to_weight_K.type_as(weight_K), None


class AcrossHeadsNorm(nn.Module):
    """RMSNorm of queries and keys over all heads of a token, which tensor ranks divide (Wan).

    Each rank normalises and scales its own heads, and needs only the other ranks' sums of squares
    for each token, by one all-reduce for queries and all keys together.

    Each rank holds the weights of its own heads and has their whole gradient. So they must not be
    named q_layernorm or k_layernorm: Megatron-Core sums gradients under these names over tensor
    ranks, which would mix those of different heads.
    """

    def __init__(
        self,
        width: int,
        *,
        eps: float,
        dtype: torch.dtype,
        group: dist.ProcessGroup,
        image: bool = False,
    ):
        """`image` adds a norm for keys of an image."""
        super().__init__()
        self.width, self.eps, self.group = width, eps, group
        part = width // group.size()
        self.query_scale = nn.Parameter(torch.ones(part, dtype=dtype))
        self.key_scale = nn.Parameter(torch.ones(part, dtype=dtype))
        if image:
            self.image_key_scale = nn.Parameter(torch.ones(part, dtype=dtype))
        for scale in self.parameters():
            mark_split(scale, axis=0)

    def forward(self, *heads: Tensor) -> tuple[Tensor, ...]:
        """Queries [T, H, K], keys [S, H, K], and image keys if `heads` has them, normalised.

        Without arguments it returns the weights, for a fused kernel, as `HeadNorm` does.
        """
        if not heads:
            return tuple(self.parameters())
        wide = [x_THK.float() for x_THK in heads]
        squares = torch.cat([x.square().sum((1, 2)) for x in wide])
        whole = _SumOverRanks.apply(squares, self.group)
        assert isinstance(whole, Tensor)
        inverse_rms = (whole / self.width + self.eps).rsqrt().split([len(x) for x in wide])
        return tuple(
            (x * rms[:, None, None] * scale.float().view(x.shape[1:])).type_as(heads[0])
            for x, rms, scale in zip(wide, inverse_rms, self.parameters(), strict=True)
        )

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> Any:
        """All weights as sharded tensors, divided by heads between tensor ranks."""
        scales = dict(self.named_parameters())
        return make_sharded_tensors_for_checkpoint(
            scales,
            prefix,
            dict.fromkeys(scales, 0),
            sharded_offsets,
            tp_group=self.group,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )


class _SumOverRanks(torch.autograd.Function):
    """Autograd function: sum over ranks of a number for each query and key, [T + S].

    Forward and backward both sum: one rank's sum of squares enters the norms of all ranks, so its
    gradient is the sum of their gradients.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _summed(gradients[0], ctx.group), None


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    # A copy, because the sum is made in place, and autograd forbids to change what it hands over.
    total = x.clone(memory_format=torch.contiguous_format)
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    return total


def hold_key_bias(bias_P: Tensor, head_width: int) -> None:
    """Makes the gradient of the keys' bias zero, in the flattened bias [H, 3, K] of q, k and v.

    It is for keys without a norm. Their bias adds the same number to all scores of a query, which
    softmax ignores, so its true gradient is zero. Rounding makes it a little noise, which AdamW
    would turn into full steps that differ between layouts.
    """

    def without_keys(gradient_P: Tensor) -> Tensor:
        held = gradient_P.clone()
        held.view(-1, 3, head_width)[:, 1] = 0
        return held

    bias_P.register_hook(without_keys)


class RotaryTable(nn.Module):
    """Cosines and sines of each token's angles, from its position on each axis.

    The axes divide the width of a head: `widths` add up to it. Frequencies are computed, so any
    position is valid.
    """

    def __init__(
        self,
        widths: Sequence[int],
        thetas: Sequence[float],
        *,
        dtype: torch.dtype = torch.float32,
        rounded: bool = False,
        twisted: bool = False,
    ):
        """`dtype` is that of the angles; Wan, FLUX, Lumina and HiDream use float64.

        In float32 the cosine at position 1024 is off by 4e-5. With `rounded`, angles of `dtype` are
        rounded to float32 before their cosines are taken, as in Z-Image. With `twisted`, the
        numbers 2i and 2i + 1 of a head have angle i. As `rotate` pairs numbers half a head apart,
        the two numbers of a pair then have different angles, which is no rotation.
        """
        super().__init__()
        self.axes, self.rounded, self.twisted = len(widths), rounded, twisted
        for axis, (width, theta) in enumerate(zip(widths, thetas, strict=True)):
            exponent = torch.arange(0, width, 2, dtype=dtype) / width
            # Not in checkpoints: it follows from the configuration.
            self.register_buffer(f"frequency_{axis}", 1.0 / theta**exponent, persistent=False)

    def forward(self, position_TA: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, K], float32, at the positions [T, A]."""
        frequencies = [self.get_buffer(f"frequency_{axis}") for axis in range(self.axes)]
        parts = [
            torch.outer(position_TA[:, axis].to(frequency.dtype), frequency)
            for axis, frequency in enumerate(frequencies)
        ]
        # Twice: the two numbers of a pair, which lie half a head apart, turn by one angle.
        angle_TK = torch.cat(parts * 2, dim=-1)
        if self.twisted:
            angle_TK = torch.cat(parts, dim=-1).repeat_interleave(2, dim=-1)
        angle_TK = angle_TK.float() if self.rounded else angle_TK
        return angle_TK.cos().float(), angle_TK.sin().float()


class InterleavedRotary(nn.Module):
    """Cosines and sines of one set of frequencies, divided among several axes (MRoPE).

    With A axes, every axis a but the first has `sections[a]` frequencies, which are number a, a +
    A, a + 2 A and so on; the first axis has all others. Angles are float32: positions beyond 65536
    were trained so. Source: the interleaved MRoPE of Qwen3-VL (arXiv:2511.21631).
    """

    def __init__(self, width: int, sections: Sequence[int], theta: float):
        """`width` is that of a head; `sections` has the number of frequencies of each axis."""
        super().__init__()
        exponent_F = torch.arange(0, width, 2, dtype=torch.float32) / width
        axis_F, axes = torch.zeros(width // 2, dtype=torch.int64), len(sections)
        for axis in range(1, axes):
            axis_F[axis : axes * sections[axis] : axes] = axis
        # Not in checkpoints: both follow from the configuration.
        self.register_buffer("frequency_F", 1.0 / theta**exponent_F, persistent=False)
        self.register_buffer("axis_F", axis_F, persistent=False)

    def forward(self, position_TA: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, K], float32, at the positions [T, A]."""
        angle_TF = position_TA[:, self.get_buffer("axis_F")] * self.get_buffer("frequency_F")
        angle_TK = torch.cat((angle_TF, angle_TF), dim=-1)
        return angle_TK.cos().float(), angle_TK.sin().float()


class WholeWidthRotary(nn.Module):
    """Cosines and sines of angles over the width of all heads, so that each head has its own.

    Pair f * axes + a of a token has the f-th frequency of axis a; the pairs left over come first
    and are not rotated. Angles are float32, by the operations of Diffusers'
    `LTXVideoRotaryPosEmbed` in their order: they reach 15,700, so rounding is part of the
    arithmetic.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        group: dist.ProcessGroup,
        *,
        axes: int = 3,
        dtype: torch.dtype = torch.float32,
    ):
        """`width` is the width of all heads, which tensor ranks of `group` divide.

        Frequencies are computed in `dtype` and rounded to float32; LTX-2's are float64.
        """
        super().__init__()
        exponent_F = torch.linspace(0, 1, width // (2 * axes), dtype=dtype)
        frequency_F = (10_000.0**exponent_F * math.pi / 2).float()
        # Not in checkpoints: it follows from the configuration.
        self.register_buffer("frequency_F", frequency_F, persistent=False)
        self.still = width // 2 - axes * len(exponent_F)
        here = heads // group.size()
        self.heads, self.here = heads, slice(group.rank() * here, (group.rank() + 1) * here)

    def forward(self, position_TA: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, H, K], float32; positions [T, A] were trained within [0, 1]."""
        angle_TAF = self.get_buffer("frequency_F") * (position_TA[..., None] * 2 - 1)
        angle_TP = pad(angle_TAF.transpose(1, 2).flatten(1), (self.still, 0))
        angle_THP = angle_TP.unflatten(1, (self.heads, -1))[:, self.here]
        angle_THK = torch.cat((angle_THP, angle_THP), dim=-1)
        return angle_THK.cos(), angle_THK.sin()


class _Rotate(torch.autograd.Function):
    """Autograd function of the rotation, which saves only angles: gradients are rotated back.

    x and its gradient are [T, H, K], cosines and sines [T, K] or [T, H, K].
    """

    @staticmethod
    def forward(ctx: Any, x_THK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x_THK, cos, sin.chunk(2, dim=-1), sign=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        low, high = sin.chunk(2, dim=-1)
        (gradient_THK,) = gradients
        return _turned(gradient_THK, cos, (high, low), sign=-1), None, None


def _turned(x_THK: Tensor, cos: Tensor, sines: Sequence[Tensor], *, sign: int) -> Tensor:
    """`x_THK` rotated; with `sign` -1, rotated back.

    `cos` is [T, K] or [T, H, K]; each of `sines` is half as wide.
    """
    half, wide_THK = x_THK.shape[-1] // 2, x_THK.float()
    cos, low, high = (x if x.dim() == 3 else x[:, None] for x in (cos, *sines))
    out_THK = wide_THK * cos
    out_THK[..., :half].addcmul_(wide_THK[..., half:], low, value=-sign)
    out_THK[..., half:].addcmul_(wide_THK[..., :half], high, value=sign)
    return out_THK.type_as(x_THK)


def rotate(x_THK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x_THK` with each pair (i, i + K/2) of a head rotated by the token's angles, in float32.

    Cosines and sines are [T, K], or [T, H, K] if heads differ; (a, b) becomes (a cos - b sin, b
    cos' + a sin'), where cos' and sin' of the second half may differ.
    """
    turned_THK = _Rotate.apply(x_THK, cos, sin)
    assert isinstance(turned_THK, Tensor)
    return turned_THK


def fused_parts(
    x_THX: Tensor,
    widths: Sequence[int],
    norms: tuple[HeadNorm | CentredNorm, HeadNorm | CentredNorm],
    angles_TK: tuple[Tensor, Tensor],
) -> tuple[Tensor, ...]:
    """`x_THX` cut into `widths`: queries and keys, normalised and rotated; others unchanged.

    One kernel does both. `norms` are those of queries and of keys, with equal epsilons.
    """
    from dit.models.kernels import rotated_heads

    weights_K = norms[0](None), norms[1](None)
    eps, others = norms[0].eps, widths[2:]
    assert eps is not None
    return rotated_heads.queries_and_keys(x_THX, weights_K, angles_TK, eps=eps, others=others)


def fused_across_heads(
    norm: AcrossHeadsNorm,
    rows: Sequence[tuple[Tensor, int, Sequence[int]]],
    angles: tuple[Tensor, Tensor] | None,
    *,
    twisted: bool = False,
) -> tuple[Tensor, ...]:
    """Slices of the heads of all `rows`, the first ones normalised and, with `angles`, rotated.

    A row is (tensor [T, H, X], number of slices to normalise in each head, widths of the slices
    after them). The result has each row's normalised slices, then its other slices, row after row.
    With `twisted` the two halves of a head have separate angles.
    """
    from dit.models.kernels import across_heads

    given = [across_heads.NormedRow(x_THX=x, parts=n, widths=tuple(rest)) for x, n, rest in rows]
    how = across_heads.Across(
        eps=norm.eps,
        numbers=norm.width,
        summed=lambda sums: _summed(sums, norm.group),
        twisted=twisted,
    )
    return across_heads.normalised(given, norm(), angles, how)
