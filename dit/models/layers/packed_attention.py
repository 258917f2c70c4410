"""Attention modules for packed tokens: self-attention, cross-attention and joint attention."""

# T packed tokens, L text tokens, S key tokens, J tokens of the joint row, E text width
# D model width, H heads, G key heads, K head width, X numbers of a head, or any width

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from dit.config import Recompute
from dit.models.attention.block_causal import attend_block_causal, masked_attention
from dit.models.attention.choice import attention_for
from dit.models.attention.spans import Spans
from dit.models.layer_spec import AttentionSpec, QkNorm
from dit.models.layers.context_parallel import Context, TokenExchange
from dit.models.layers.parallel_linear import BuildContext, ColumnLinear, split_linear
from dit.models.layers.per_sample import PerSample, compiled
from dit.models.layers.queries_and_keys import (
    AcrossHeadsNorm,
    CentredNorm,
    HeadNorm,
    fused_across_heads,
    fused_parts,
    rotate,
)

Angles = tuple[Tensor, Tensor]
"""Cosines and sines [T, K], or [T, H, K] if each head has its own; float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowConditions:
    """Inputs of layers for one stream of tokens, besides the tokens."""

    per_sample: PerSample  # timesteps of the tokens of this tensor rank
    angles_TK: Angles | None  # rotary angles of the tokens of this context rank; None: no rotation
    has_key_T: Tensor | None = None  # bool; keys of tokens with False are zeros; None: all True


QKV = tuple[Tensor, Tensor, Tensor]


class PackedAttention(MegatronModule):
    """Base of attention modules: norms, rotary positions, gates and context parallelism.

    The norms are called q_layernorm and k_layernorm, because Megatron-Core sums the gradients of
    weights with these names over tensor ranks.
    """

    head_norm: ClassVar[type[HeadNorm | CentredNorm]] = HeadNorm
    """Class of the norm of the queries and keys of each head."""

    def __init__(
        self,
        context: BuildContext,
        spec: AttentionSpec,
        *,
        image: bool = False,
        output: bool = True,
        in_one_kernel: bool = True,
    ):
        """Creates the norms, the gate and the output linear.

        `image` adds a norm for keys of an image; `output` adds the output linear `linear_proj`.
        `in_one_kernel` allows a kernel that both normalises and rotates queries and keys.
        """
        super().__init__(config=context.config)
        model, width = context.model, spec.width
        self.head_width = spec.head_width
        self.recomputed = model.recompute_granularity is Recompute.SELECTIVE
        self.backend = model.attention_backend
        self.in_one_kernel = in_one_kernel
        self.context = Context(group=context.groups.cp, comm=model.cp_comm_type)
        if output:
            self.linear_proj = split_linear(width, width, axis=1, context=context, bias=spec.bias)
        self.linear_heads = None
        if spec.head_gate:
            self.linear_heads = split_linear(width, spec.heads, axis=0, context=context, bias=True)
        self.q_layernorm = self.k_layernorm = self.across_heads = None
        dtype, eps = context.config.params_dtype, spec.eps
        if spec.norm is QkNorm.PER_HEAD:
            self.q_layernorm = self.head_norm(self.head_width, dtype=dtype, eps=eps)
            self.k_layernorm = self.head_norm(self.head_width, dtype=dtype, eps=eps)
        if spec.norm is QkNorm.ACROSS_HEADS:
            group = context.groups.tp
            self.across_heads = AcrossHeadsNorm(
                width, eps=eps, dtype=dtype, group=group, image=image
            )

    def normalised(self, *heads: Tensor) -> tuple[Tensor, ...]:
        """Applies the norms of queries [T, H, K] and keys [S, H, K] in `heads`, before rotation.

        A norm across heads also takes a third tensor, keys of an image.
        """
        if self.across_heads is not None:
            return self.across_heads(*heads)
        if self.q_layernorm is None or self.k_layernorm is None:
            return heads
        q_THK, k_SHK = heads
        return self.q_layernorm(q_THK), self.k_layernorm(k_SHK)

    def positioned(self, q_THK: Tensor, k_THK: Tensor, row: RowConditions) -> tuple[Tensor, Tensor]:
        """Queries and keys [T, H, K], normalised and rotated."""
        if self.q_layernorm is None:  # outside of `turn`, because collectives cannot be compiled
            q_THK, k_THK = self.normalised(q_THK, k_THK)
        if row.angles_TK is None:
            if self.q_layernorm is not None:
                q_THK, k_THK = self.normalised(q_THK, k_THK)
            return q_THK, k_THK
        turn = compiled(_turn) if row.per_sample.compiled else _turn
        angles = row.angles_TK
        return turn(q_THK, self.q_layernorm, *angles), turn(k_THK, self.k_layernorm, *angles)

    def positioned_parts(
        self, x_THX: Tensor, widths: Sequence[int], row: RowConditions
    ) -> tuple[Tensor, ...]:
        """The slices of each head of `x_THX`: normalised and rotated queries and keys, then others.

        `widths` are the widths of the slices.
        """
        norms, angles = (self.q_layernorm, self.k_layernorm), row.angles_TK
        if row.per_sample.fused and self.across_heads is not None:
            return fused_across_heads(self.across_heads, [(x_THX, 2, widths[2:])], angles)
        # Heads without norms or rotation are computed in plain torch.
        fused = row.per_sample.fused and self.in_one_kernel
        if fused and angles and norms[0] is not None and norms[1] is not None:
            return fused_parts(x_THX, widths, (norms[0], norms[1]), angles)
        q_THK, k_THK, *others = x_THX.split(list(widths), dim=-1)
        return *self.positioned(q_THK, k_THK, row), *others

    def attend(self, q_THK: Tensor, k_SHK: Tensor, v_SHK: Tensor, spans: Spans) -> Tensor:
        """The output [T, H, K] of attention within each sample; undefined for padding.

        With `model.recompute_granularity=selective` it is recomputed in the backward pass.
        """
        if not spans.lengths:
            # All tokens of this rank are padding. Gradients must be zeros and not missing, because
            # other ranks wait for them.
            return q_THK * 0 + (k_SHK.sum() + v_SHK.sum()) * 0
        attend = attention_for(self.backend, q_THK)
        if spans.block_causal is not None:
            kinds: Any = {"attend": attend, "attend_masked": masked_attention}
            attend = partial(attend_block_causal, **kinds)
        return self.attended(attend, q_THK, k_SHK, v_SHK, spans)

    def attended(self, attend: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """The result of `attend(*inputs)`, recomputed in the backward pass if configured."""
        if self.training and self.recomputed:
            return checkpoint(attend, *inputs, use_reentrant=False)
        return attend(*inputs)

    def gated(self, out_THK: Tensor, x_TD: Tensor) -> Tensor:
        """`out_THK`, with each head multiplied by its gate 2 * sigmoid(linear_heads(x)).

        It is unchanged if the specification has no `head_gate`.
        """
        if self.linear_heads is None:
            return out_THK
        return out_THK * (2 * self.linear_heads(x_TD).sigmoid())[..., None]

    def exchanged(self, qkv: QKV, exchange: TokenExchange) -> Tensor:
        """The output [T, H, K] of attention of this context rank's tokens within their samples."""
        return self.context.attend(self.attend, qkv, exchange)


def _turn(
    x_THK: Tensor, norm: HeadNorm | CentredNorm | None, cos_TK: Tensor, sin_TK: Tensor
) -> Tensor:
    return rotate(x_THK if norm is None else norm(x_THK), cos_TK, sin_TK)


class SelfAttention(PackedAttention):
    """Self-attention within each sample."""

    gates: ClassVar[int] = 0
    """Number of output gates that `linear_qkv` computes for each query head."""

    def __init__(
        self,
        context: BuildContext,
        spec: AttentionSpec,
        *,
        output: bool = True,
        in_one_kernel: bool = True,
    ):
        super().__init__(context, spec, output=output, in_one_kernel=in_one_kernel)
        self.readers = spec.heads // spec.key_heads  # query heads for each key head
        made = spec.width * (1 + self.gates) + 2 * spec.key_heads * spec.head_width
        parts: Any = {"axis": 0, "parts": 3 + self.gates}
        self.linear_qkv = split_linear(spec.width, made, context=context, bias=spec.bias, **parts)

    def qkv(self, x_TD: Tensor, row: RowConditions) -> QKV:
        """(queries, keys, values), [T, H, K] each, of the tokens `x_TD`.

        T is the number of tokens of this context rank, also with sequence parallelism.
        """
        q, k, v, *_ = self.made(x_TD, row)
        return q, k, v

    def made(self, x_TD: Tensor, row: RowConditions) -> tuple[Tensor, ...]:
        """(queries, keys, values, gates if there are any), [T, H, K] each, of the tokens `x_TD`."""
        width, readers, gates = self.head_width, self.readers, self.gates
        x_TGX = self.linear_qkv(x_TD).unflatten(-1, (-1, (readers * (1 + gates) + 2) * width))
        if readers == 1:
            q, k, *others = self.positioned_parts(x_TGX, (width,) * (3 + gates), row)
            if row.has_key_T is not None:
                k = k * row.has_key_T[:, None, None]
            return q, k, *others
        assert row.has_key_T is None
        widths = (readers * width, width, width, *(readers * width,) * gates)
        q_TGX, k_TGK, v_TGK, *gate_TGX = x_TGX.split(widths, dim=-1)
        q_THK, *gate_THK = (
            one.unflatten(-1, (readers, width)).flatten(1, 2) for one in (q_TGX, *gate_TGX)
        )
        q_THK, k_TGK = self.positioned(q_THK, k_TGK, row)
        # Repeated, because not all kernels and exchanges support fewer key heads.
        k_THK, v_THK = (x.repeat_interleave(readers, dim=1) for x in (k_TGK, v_TGK))
        return q_THK, k_THK, v_THK, *gate_THK

    def forward(self, x_TD: Tensor, row: RowConditions, exchange: TokenExchange) -> Tensor:
        out_THK = self.exchanged(self.qkv(x_TD, row), exchange)
        return self.linear_proj(self.gated(out_THK, x_TD).flatten(1))

    def of_values(self, x_TD: Tensor, row: RowConditions) -> Tensor:
        """The output [T, D] if each token attends to itself alone."""
        return self.linear_proj(self.gated(self.qkv(x_TD, row)[2], x_TD).flatten(1))


@dataclass(frozen=True, kw_only=True, slots=True)
class AttendedRows:
    """Encoder states from which cross-attention computes keys and values, whole on each rank."""

    rows_LE: Tensor  # states of a text encoder or an image encoder
    spans: Spans  # queries: tokens of this context rank; keys: the states of their samples


class CrossAttention(PackedAttention):
    """Cross-attention of a sample's tokens to its caption.

    With `image`, the same queries also attend to an image encoder's states, and the two outputs are
    added (Wan 2.1's image-to-video).
    """

    def __init__(
        self, context: BuildContext, spec: AttentionSpec, *, text_width: int, image: bool = False
    ):
        super().__init__(context, spec, image=image)
        assert not image or spec.norm is QkNorm.ACROSS_HEADS, "image keys need a norm across heads"
        width = spec.width
        self.linear_q = split_linear(width, width, axis=0, context=context, bias=spec.bias)
        # Every tensor rank has the whole text, so there is nothing to gather. Not Transformer
        # Engine's linear: 8-bit products do not take text of any length.
        whole = copy(context.config)
        whole.sequence_parallel = False

        def keys_and_values() -> ColumnLinear:
            made = ColumnLinear(
                text_width, 2 * width, config=whole, groups=context.groups, bias=spec.bias
            )
            made.parts = 2
            return made

        self.linear_kv = keys_and_values()
        self.linear_image_kv = keys_and_values() if image else None

    def forward(
        self,
        x_TD: Tensor,
        text: AttendedRows,
        image: AttendedRows | None = None,
        *,
        fused: bool = False,
    ) -> Tensor:
        """The output [T, D] of cross-attention of `x_TD` to `text`, plus that to `image` if given.

        `fused` allows the kernel for norms across heads.
        """
        text_LE = text.rows_LE
        empty = not len(text_LE)
        if empty:
            # By padding, so that the modules that computed the text get gradients of zeros.
            text_LE = pad(text_LE, (0, 0, 0, 1))
        products = [self.linear_q(x_TD), self.linear_kv(text_LE)]
        if image is not None:
            assert self.linear_image_kv is not None
            products.append(self.linear_image_kv(image.rows_LE))
        q, k, v, *of_image = self._normalised(products, fused=fused)
        # If no sample of the pack has text: zeros that depend on all weights, because
        # Megatron-Core's DDP waits for the gradient of each weight.
        attended = 0 * (q + k + v) if empty else self.attend(q, k, v, text.spans)
        if image is not None:  # every sample has image states
            image_k, image_v = of_image
            attended = attended + self.attend(q, image_k, image_v, image.spans)
        return self.linear_proj(self.gated(attended, x_TD).flatten(1))

    def _normalised(self, products: Sequence[Tensor], *, fused: bool) -> Sequence[Tensor]:
        """The normed queries [T, H, K], then keys and values [L, H, K] of text and of an image.

        Keys are normalised, too. `products` are the outputs of linears: [T, H * K] for queries,
        then [L, H * 2 * K] for text and, if there is one, for an image.
        """
        heads = products[0].shape[-1] // self.head_width
        q, *both = (x_TX.unflatten(-1, (heads, -1)) for x_TX in products)
        if fused and self.across_heads is not None:
            rows = [(q, 1, ()), *((x_LHX, 1, (self.head_width,)) for x_LHX in both)]
            return fused_across_heads(self.across_heads, rows, None)
        keys, values = zip(*(x_LHX.chunk(2, dim=-1) for x_LHX in both), strict=True)
        q, *keys = self.normalised(q, *keys)
        return [q, *(x for pair in zip(keys, values, strict=True) for x in pair)]


def joint_attention(
    first: tuple[SelfAttention, Tensor, RowConditions],
    second: tuple[SelfAttention, Tensor, RowConditions],
    exchange: TokenExchange,
) -> tuple[Tensor, Tensor]:
    """The outputs of joint attention of two streams of tokens with separate weights.

    `first` and `second` are (module, normalised tokens, conditions) of a stream. The result for
    each stream is [T, H * K], the input of its own `linear_proj`.
    """
    each = [attention.qkv(x_TD, row) for attention, x_TD, row in (first, second)]
    q, k, v = (torch.cat(pair) for pair in zip(*each, strict=True))
    out_JHK = first[0].exchanged((q, k, v), exchange)
    one, other = out_JHK.flatten(1).split([len(qkv[0]) for qkv in each])
    return one, other
