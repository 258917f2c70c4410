"""Attention with an output gate, among tokens or among the hidden states of a token."""

# T packed tokens, D model width, H heads, K head width

from __future__ import annotations

from torch import Tensor

from dit.models.attention import spans
from dit.models.krea2.family import AttendGated
from dit.models.layer_spec import AttentionSpec
from dit.models.layers.context_parallel import TokenExchange
from dit.models.layers.packed_attention import RowConditions, SelfAttention
from dit.models.layers.parallel_linear import BuildContext
from dit.models.layers.queries_and_keys import CentredNorm
from dit.models.stacks.parts import SelfAttending


class GatedAttention(SelfAttention):
    """Attention whose output is multiplied by sigmoid(linear(x)) of its input x.

    If `states` is given, each token has that many adjacent rows (its hidden states), which attend
    only to each other.
    """

    head_norm, gates = CentredNorm, 1

    def __init__(
        self, context: BuildContext, spec: AttentionSpec, *, output: bool, states: int | None
    ):
        super().__init__(context, spec, output=output)
        self.states = states

    def forward(self, x_TD: Tensor, row: RowConditions, exchange: TokenExchange) -> Tensor:
        q, k, v, gate_THK = self.made(x_TD, row)
        if self.states is None:
            out_THK = self.exchanged((q, k, v), exchange)
        else:
            out_THK = spans.attend_in_groups(q, k, v, self.states)
        return self.linear_proj((out_THK * gate_THK.sigmoid()).flatten(1))


class AttendingGated(SelfAttending):
    """Runs attention with an output gate."""

    def attention(self, context: BuildContext, *, output: bool) -> SelfAttention:
        part = self.part
        assert isinstance(part, AttendGated)
        return GatedAttention(context, part.attention, output=output, states=part.states)
