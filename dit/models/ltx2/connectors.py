"""LTX-2's connectors: layers that process captions, padded with learned rows, before the network.

The arithmetic is that of Diffusers' `LTX2ConnectorTransformer1d`. Tensor ranks divide the weights
of linears, but every rank has all tokens, also with sequence parallelism. So each rank has the
whole gradient of the learned rows, and gradients are not summed over ranks.
"""

# L rows of the captions of a pack, R learned rows, E width of a row

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from dit.models.attention.spans import Spans
from dit.models.layer_spec import Activation, AttentionSpec, FeedForwardSpec, QkNorm
from dit.models.layers.context_parallel import TokenExchange
from dit.models.layers.packed_attention import RowConditions, SelfAttention
from dit.models.layers.parallel_linear import BuildContext, FeedForward
from dit.models.layers.per_sample import PerSample
from dit.models.layers.queries_and_keys import WholeWidthRotary
from dit.models.ltx2.family import CONNECTOR_MLP_RATIO, Ltx2Config
from dit.pack_wire import to_device

_EPS = 1e-6
_LONGEST = 4096
"""Divisor of the positions in a caption, as in Diffusers."""


class Connector(MegatronModule):
    """Maps captions [L, E] to `model.connector_rows` rows of width E for each sample."""

    def __init__(self, model: Ltx2Config, context: BuildContext, width: int):
        whole = copy(context.config)
        whole.sequence_parallel = False  # every tensor rank has all tokens
        super().__init__(config=whole)
        context, heads = replace(context, config=whole), model.heads_of_connectors
        self.rows, self.count = model.connector_rows, model.layers_of_connectors
        registers = torch.zeros(model.connector_registers, width, dtype=whole.params_dtype)
        self.registers = nn.Parameter(registers)
        of_heads: Any = {"axes": 1, "dtype": torch.float64}
        self.rotary = WholeWidthRotary(width, heads, context.groups.tp, **of_heads)
        attention = AttentionSpec(
            width=width,
            heads=heads,
            bias=True,
            norm=QkNorm.ACROSS_HEADS,
            eps=_EPS,
            head_gate=model.head_gates,
        )
        feed_forward = FeedForwardSpec(
            width=width,
            hidden=CONNECTOR_MLP_RATIO * width,
            activation=Activation.GELU_TANH,
            bias=True,
        )
        for number in range(self.count):
            self.add_module(f"attention_{number}", SelfAttention(context, attention))
            self.add_module(f"mlp_{number}", FeedForward(context, feed_forward))

    def forward(self, text_LE: Tensor, starts: Sequence[int], per_sample: PerSample) -> Tensor:
        """The processed captions of all samples, [N * `connector_rows`, E].

        `starts` are the N + 1 offsets of the samples in `text_LE`; `per_sample` says which kernels
        may be used.


        Raises:
            ValueError: a caption has more than `connector_rows` tokens.
        """
        h_LE, samples = self._filled_up(text_LE, starts), len(starts) - 1
        place_L = torch.arange(self.rows, dtype=torch.float32).repeat(samples)
        place_L1 = to_device(place_L / _LONGEST, text_LE.device)[:, None]
        spans = [(sample * self.rows, self.rows) for sample in range(samples)]
        meeting = Spans.of(spans, spans, total=len(h_LE), device=text_LE.device)
        row = RowConditions(per_sample=per_sample, angles_TK=self.rotary(place_L1))
        for number in range(self.count):
            attention = self.get_submodule(f"attention_{number}")
            mlp = self.get_submodule(f"mlp_{number}")
            h_LE = h_LE + attention(_normed(h_LE), row, TokenExchange(spans=meeting))
            h_LE = h_LE + mlp(_normed(h_LE))
        return _normed(h_LE)

    def _filled_up(self, text_LE: Tensor, starts: Sequence[int]) -> Tensor:
        """All captions, each padded with learned rows to `connector_rows` rows."""
        repeated_LE = self.registers.repeat(self.rows // len(self.registers), 1)
        parts = list[Tensor]()
        for first, stop in pairwise(starts):
            if stop - first > self.rows:
                raise ValueError(
                    f"a caption has {stop - first} tokens, but model.connector_rows={self.rows}"
                    " allows no more than that number; shorten the caption"
                )
            parts += [text_LE[first:stop], repeated_LE[stop - first :]]
        return torch.cat(parts)


def _normed(h_LE: Tensor) -> Tensor:
    return rms_norm(h_LE, h_LE.shape[-1:], eps=_EPS)
