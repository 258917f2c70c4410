"""Preparation of queries and keys before attention: RMSNorm, then rotary positions.

1. HeadNorm           RMSNorm of each head
   AcrossHeadsNorm    RMSNorm over all heads of a token
   CentredNorm        RMSNorm of each head, or of tokens, that stores weight - 1
2. RotaryTable        RoPE (arXiv:2104.09864) on any number of axes: cosines and sines of tokens
   InterleavedRotary  one set of frequencies, divided among the axes (MRoPE)
   WholeWidthRotary   frequencies over the width of a token, so that heads have different angles
   rotate             rotates queries or keys by the cosines and sines of one of these modules

`fused_parts` computes the norm of each head and the rotation in one kernel of `dit/models/kernels`;
`fused_across_heads` computes the norm across heads, with or without rotation. `hold_key_bias` is
for keys without a norm.
"""

# T query tokens, S key tokens, A axes, H heads of this tensor rank, K head width, X numbers of a
# head in the linear of queries and keys, F frequencies; P = 3 * H * K outputs of that linear, or
# pairs of numbers of all heads

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

    On a GPU torch has a kernel for it. On a CPU torch uses several operations, whose backward pass
    reads all tokens twice as often as necessary; there we use our own autograd function.
    """

    def __init__(self, width: int, *, dtype: torch.dtype, eps: float = 1e-5):
        super().__init__(width, eps=eps, dtype=dtype)

    def forward(self, x: Tensor | None) -> Tensor:
        """The normalised `x` [T, H, K]; if `x` is None, the weight [K], for a fused kernel.

        The fused kernel gets the weight by this call, because Megatron-Core's DDP waits in the call
        until the weight is gathered.
        """
        if x is None:
            return self.weight
        if x.device.type != "cpu":
            return super().forward(x)
        y_THK = _Normalised.apply(x, self.weight, self.eps)
        assert isinstance(y_THK, Tensor)
        return y_THK


class CentredNorm(nn.Module):
    """RMSNorm in float32 that stores weight - 1, so that parameters start at 0.

    The norm is over the width of a token, or of a head.
    """

    def __init__(self, width: int, *, eps: float, dtype: torch.dtype):
        super().__init__()
        self.eps = eps
        self.offset = nn.Parameter(torch.zeros(width, dtype=dtype))

    def forward(self, x: Tensor | None) -> Tensor:
        """The normalised `x` [..., X]; if `x` is None, the weight 1 + `offset`, [X], float32."""
        weight_X = self.offset.float() + 1
        if x is None:
            return weight_X
        return rms_norm(x.float(), weight_X.shape, weight_X, self.eps).type_as(x)


class _Normalised(torch.autograd.Function):
    """Autograd function of y = n · w, with n = x / rms(x); it computes in float32."""

    @staticmethod
    def forward(ctx: Any, x_THK: Tensor, weight_K: Tensor, eps: float) -> Tensor:
        wide_THK = x_THK.float()
        pace_TH1 = (wide_THK.square().mean(-1, keepdim=True) + eps).rsqrt()
        n_THK = wide_THK * pace_TH1
        ctx.save_for_backward(n_THK, pace_TH1, weight_K)
        return (n_THK * weight_K).type_as(x_THK)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """Gradients of x [T, H, K] and of w [K].

        With g = dL/dy: dL/dx = (g · w - n · mean(g · w · n)) / rms(x), and dL/dw = sum of g · n.
        """
        (n_THK, pace_TH1, weight_K), (gradient_THK,) = ctx.saved_tensors, gradients
        g_THK, w_K = gradient_THK.float(), weight_K.float()
        product_THK = g_THK * n_THK
        mean_TH1 = (product_THK @ w_K)[..., None] / len(w_K)
        to_x_THK = (g_THK * w_K).addcmul_(n_THK, mean_TH1, value=-1).mul_(pace_TH1)
        to_weight_K = product_THK.sum((0, 1))
        return to_x_THK.type_as(gradient_THK), to_weight_K.type_as(weight_K), None


class AcrossHeadsNorm(nn.Module):
    """RMSNorm of queries and keys over all heads of a token (Wan); tensor ranks divide the heads.

    Each rank normalises its own heads. One all-reduce, for queries and keys together, gives it the
    sum of squares of each token over all heads.

    Each rank has the weights of its own heads and their whole gradient. So the weights must not be
    named q_layernorm or k_layernorm: Megatron-Core sums gradients under these names over tensor
    ranks, which would add gradients of different heads.
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
        """Creates the weights; `image` adds a weight for keys of an image."""
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
        """The normalised `heads`: queries [T, H, K], keys [S, H, K], and image keys if given.

        Without arguments it returns the weights, for a fused kernel, like `HeadNorm.forward`.
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
        """All weights as sharded tensors; each tensor rank has the weights of its heads."""
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
    """Autograd function of the sum over ranks of a tensor [T + S].

    The backward pass sums over ranks, too: a rank's input affects the norms on all ranks, so its
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
    # A copy, because all_reduce is in place, and autograd's tensors must not be changed.
    total = x.clone(memory_format=torch.contiguous_format)
    if group.size() > 1:
        dist.all_reduce(total, group=group)
    return total


def hold_key_bias(bias_P: Tensor, head_width: int) -> None:
    """Sets the gradient of the keys' bias to zero, in `bias_P`, the flattened bias [H, 3, K].

    It is for attention without norms of queries and keys. There a bias of keys adds the same number
    to all scores of a query, which softmax ignores, so the exact gradient is zero. Rounding makes
    it a small noise, from which AdamW would make full steps that differ between layouts.
    """

    def without_keys(gradient_P: Tensor) -> Tensor:
        held = gradient_P.clone()
        held.view(-1, 3, head_width)[:, 1] = 0
        return held

    bias_P.register_hook(without_keys)


class RotaryTable(nn.Module):
    """Rotary embedding: cosines and sines of each token's angles, from its position on each axis.

    The axes divide the width of a head: the sum of `widths` is the head width. Angles are computed,
    not looked up, so any position is valid.
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
        """Computes the frequencies; `thetas` has their base for each axis.

        `dtype` is the dtype of angles; Wan, FLUX, Lumina and HiDream use float64, because in
        float32 the cosine at position 1024 is off by 4e-5. With `rounded`, angles are rounded to
        float32 before their cosines are computed, as in Z-Image. With `twisted`, numbers 2i and
        2i + 1 of a head have angle i: because `rotate` pairs numbers half a head
        apart, the two numbers of a pair then have different angles.
        """
        super().__init__()
        self.axes, self.rounded, self.twisted = len(widths), rounded, twisted
        for axis, (width, theta) in enumerate(zip(widths, thetas, strict=True)):
            exponent = torch.arange(0, width, 2, dtype=dtype) / width
            # Not in checkpoints: it follows from the configuration.
            self.register_buffer(f"frequency_{axis}", 1.0 / theta**exponent, persistent=False)

    def forward(self, position_TA: Tensor) -> tuple[Tensor, Tensor]:
        """(cosines, sines), [T, K] each, float32, of the positions `position_TA`."""
        frequencies = [self.get_buffer(f"frequency_{axis}") for axis in range(self.axes)]
        parts = [
            torch.outer(position_TA[:, axis].to(frequency.dtype), frequency)
            for axis, frequency in enumerate(frequencies)
        ]
        # Twice, because the two numbers of a pair, half a head apart, have the same angle.
        angle_TK = torch.cat(parts * 2, dim=-1)
        if self.twisted:
            angle_TK = torch.cat(parts, dim=-1).repeat_interleave(2, dim=-1)
        angle_TK = angle_TK.float() if self.rounded else angle_TK
        return angle_TK.cos().float(), angle_TK.sin().float()


class InterleavedRotary(nn.Module):
    """Rotary embedding with one set of frequencies, divided among several axes (MRoPE).

    With A axes, each axis a > 0 has `sections[a]` frequencies: number a, a + A, a + 2 A and so on;
    axis 0 has all others. Angles are float32, because published weights were trained with rounded
    angles at positions beyond 65536. Source: interleaved MRoPE of Qwen3-VL (arXiv:2511.21631).
    """

    def __init__(self, width: int, sections: Sequence[int], theta: float):
        """Computes the frequencies.

        `width` is the head width, `sections` has the number of frequencies of each axis, and
        `theta` is the base of frequencies.
        """
        super().__init__()
        exponent_F = torch.arange(0, width, 2, dtype=torch.float32) / width
        axis_F, axes = torch.zeros(width // 2, dtype=torch.int64), len(sections)
        for axis in range(1, axes):
            axis_F[axis : axes * sections[axis] : axes] = axis
        # Not in checkpoints: both follow from the configuration.
        self.register_buffer("frequency_F", 1.0 / theta**exponent_F, persistent=False)
        self.register_buffer("axis_F", axis_F, persistent=False)

    def forward(self, position_TA: Tensor) -> tuple[Tensor, Tensor]:
        """(cosines, sines), [T, K] each, float32, of the positions `position_TA`."""
        angle_TF = position_TA[:, self.get_buffer("axis_F")] * self.get_buffer("frequency_F")
        angle_TK = torch.cat((angle_TF, angle_TF), dim=-1)
        return angle_TK.cos().float(), angle_TK.sin().float()


class WholeWidthRotary(nn.Module):
    """Rotary embedding with frequencies over the width of all heads, so heads differ in angles.

    Pair f * axes + a of a token has frequency f of axis a; if pairs are left over, they come first
    and are not rotated. Angles are float32 and reach 15,700, so their rounding matters: operations
    have the order of Diffusers' `LTXVideoRotaryPosEmbed`.
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
        """Computes the frequencies in `dtype` (float64 for LTX-2), rounded to float32.

        `width` is the width of all heads together, and `heads` is their number; tensor ranks of
        `group` divide the heads.
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
        """(cosines, sines), [T, H, K] each, float32, of the positions `position_TA`.

        Positions in training were in [0, 1].
        """
        angle_TAF = self.get_buffer("frequency_F") * (position_TA[..., None] * 2 - 1)
        angle_TP = pad(angle_TAF.transpose(1, 2).flatten(1), (self.still, 0))
        angle_THP = angle_TP.unflatten(1, (self.heads, -1))[:, self.here]
        angle_THK = torch.cat((angle_THP, angle_THP), dim=-1)
        return angle_THK.cos(), angle_THK.sin()


class _Rotate(torch.autograd.Function):
    """Autograd function of `rotate`, which saves only cosines and sines.

    The backward pass rotates gradients back. x is [T, H, K], cosines and sines [T, K] or [T, H, K].
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
    """`x_THK`, rotated if `sign` is 1, rotated back if it is -1.

    `cos` is [T, K] or [T, H, K]. `sines` are those of the first and second half of a head.
    """
    half, wide_THK = x_THK.shape[-1] // 2, x_THK.float()
    cos, low, high = (x if x.dim() == 3 else x[:, None] for x in (cos, *sines))
    out_THK = wide_THK * cos
    out_THK[..., :half].addcmul_(wide_THK[..., half:], low, value=-sign)
    out_THK[..., half:].addcmul_(wide_THK[..., :half], high, value=sign)
    return out_THK.type_as(x_THK)


def rotate(x_THK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x_THK` with each pair of numbers (i, i + K/2) of a head rotated; computed in float32.

    `cos` and `sin` are [T, K], or [T, H, K] if heads have different angles. With j = i + K/2, the
    pair (x_i, x_j) becomes (x_i cos_i - x_j sin_i, x_j cos_j + x_i sin_j).
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
    """The slices of each head of `x_THX`: normalised and rotated queries and keys, then others.

    `widths` are the widths of the slices. One kernel computes norm and rotation. `norms` are those
    of queries and of keys, which must have the same epsilon.
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
    """The slices of the heads of all `rows`: normalised and rotated ones, then others, row by row.

    A row is (tensor [T, H, X], number of slices of each head to normalise, widths of the slices
    after them). If `angles` is None, nothing is rotated. `twisted` says whether the two numbers of
    a rotary pair have different angles.
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
