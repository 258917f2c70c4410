"""Attention from one stream of tokens to another of another width, such as latents to sound."""
# T tokens of queries and S tokens of keys on this rank, D any width
# H heads, K head width

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from dit.models.layer_spec import AttendAcross
from dit.models.layers.context_parallel import RowExchange
from dit.models.layers.packed_attention import Angles, PackedAttention
from dit.models.layers.parallel_linear import BuildContext, split_linear
from dit.models.layers.queries_and_keys import rotate


@dataclass(frozen=True, kw_only=True, slots=True)
class Crossing:
    """The inputs of `AcrossAttention` besides tokens, such as the exchange and rotary angles."""

    exchange: RowExchange
    angles_TK: Angles
    """Rotary angles of the queries."""
    key_angles_SK: Angles
    """Rotary angles of the keys."""
    has_keys_T1: Tensor | None = None
    """Factor of the output, float32 [T, 1]: 1 for tokens of samples with keys, 0 for tokens of
    other samples. None if linears have no biases, because the output is 0 without keys."""


class AcrossAttention(PackedAttention):
    """Attention from one stream of tokens to another, which may have another width."""

    def __init__(self, context: BuildContext, part: AttendAcross):
        spec, (width, key_width) = part.attention, part.widths
        # The head gate is created below: its input has the width of the tokens, not of the heads.
        super().__init__(context, replace(spec, head_gate=False), output=False)
        options: Any = {"context": context, "bias": spec.bias}
        of_keys: Any = {"context": replace(context, token_row=part.keys.row), "bias": spec.bias}
        self.linear_q = split_linear(width, spec.width, axis=0, **options)
        self.linear_kv = split_linear(key_width, 2 * spec.width, axis=0, parts=2, **of_keys)
        self.linear_proj = split_linear(spec.width, width, axis=1, **options)
        if spec.head_gate:
            self.linear_heads = split_linear(width, spec.heads, axis=0, **options)

    def forward(self, x_TD: Tensor, y_SD: Tensor, crossing: Crossing) -> Tensor:
        """The output [T, D] for the tokens `x_TD`, which attend to `y_SD` of the same sample."""
        q_THK = self.linear_q(x_TD).unflatten(-1, (-1, self.head_width))
        kv_SHX = self.linear_kv(y_SD).unflatten(-1, (-1, 2 * self.head_width))
        k_SHK, v_SHK = kv_SHX.chunk(2, dim=-1)
        q_THK, k_SHK = self.normalised(q_THK, k_SHK)
        q_THK = rotate(q_THK, *crossing.angles_TK)
        k_SHK = rotate(k_SHK, *crossing.key_angles_SK)
        out_THK = self.context.attend_across(self.attend, q_THK, (k_SHK, v_SHK), crossing.exchange)
        out_TD = self.linear_proj(self.gated(out_THK, x_TD).flatten(1))
        if crossing.has_keys_T1 is None:
            return out_TD
        return out_TD * crossing.has_keys_T1.to(out_TD.dtype)
