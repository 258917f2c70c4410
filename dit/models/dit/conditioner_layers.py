"""Anima's conditioner, which computes caption states from ids of a second tokenizer.

It runs before all other layers. The arithmetic is that of Diffusers' `AnimaTextConditioner`. Every
tensor rank computes all tokens, also with sequence parallelism. So each rank has the whole gradient
of the conditioner's weights, and gradients are not summed over ranks.
"""

# L tokens of T5, S states of the text encoder, Q rows of queries, H heads, K head width
# D hidden size, E width of the embeddings and of the output, I width of the states

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from dit.config import AttentionBackend
from dit.models.attention.choice import attention_for
from dit.models.attention.spans import Spans
from dit.models.dit.family import DitConfig
from dit.models.layers.parallel_linear import WholeLinear, dtype
from dit.models.layers.queries_and_keys import HeadNorm, RotaryTable, rotate
from dit.pack_wire import to_device
from dit.token_ids import as_ids

_EPS = 1e-6  # of every norm, in Diffusers


@dataclass(frozen=True, slots=True)
class CaptionRows:
    """The rows of each sample in a pack, and the rotary angles of each row."""

    spans: Sequence[tuple[int, int]]  # (first row, number of rows) of each sample
    angles: tuple[Tensor, Tensor]  # cosines and sines [L, K], by the index within the sample


class Conditioner(nn.Module):
    """Maps token ids [L] and text states [S, I] to caption states [L, E] for cross-attention.

    The tokens of a sample attend to each other and to the sample's text states.
    """

    def __init__(self, model: DitConfig):
        super().__init__()
        width, made = model.conditioner_size, dtype(model)
        inputs, states = model.text_width, model.crossattn_emb_size
        heads, backend = model.conditioner_heads, model.attention_backend
        inside = int(width * model.conditioner_mlp_ratio)
        self.embed = nn.Embedding(model.conditioner_vocabulary, inputs, dtype=made)
        self.linear_in = WholeLinear(inputs, width, dtype=made) if inputs != width else None
        self.rotary = RotaryTable((width // heads,), (10_000.0,))
        self.blocks = nn.ModuleList(
            ConditionerLayer(width, states, inside, heads=heads, dtype=made, backend=backend)
            for _ in range(model.conditioner_layers)
        )
        self.linear_out = WholeLinear(width, inputs, dtype=made)
        self.norm = nn.RMSNorm(inputs, eps=_EPS, dtype=made)

    def forward(
        self,
        states_SI: Tensor,
        digits_L2: Tensor,
        state_starts: Sequence[int],
        token_starts: Sequence[int],
    ) -> Tensor:
        """The caption states [L, E], one for each token.

        `digits_L2` are token ids as pairs of digits (`dit.token_ids`). `state_starts` and
        `token_starts` are the N + 1 offsets of the samples among states and among tokens.
        """
        tokens, states = (self._placed(s, states_SI) for s in (token_starts, state_starts))
        made: Any = {"total": len(digits_L2), "device": states_SI.device}
        among = Spans.of(tokens.spans, tokens.spans, **made)
        across = Spans.of(tokens.spans, states.spans, **made)
        h_LD = self.embed(as_ids(digits_L2))
        if self.linear_in is not None:
            h_LD = self.linear_in(h_LD)
        for block in self.blocks:
            h_LD = block(h_LD, states_SI, (tokens, states), (among, across))
        return self.norm(self.linear_out(h_LD))

    def _placed(self, starts: Sequence[int], like: Tensor) -> CaptionRows:
        spans = [(first, stop - first) for first, stop in pairwise(starts)]
        places = torch.cat([torch.arange(rows) for _, rows in spans]).float()[:, None]
        return CaptionRows(spans, self.rotary(to_device(places, like.device)))


class ConditionerLayer(nn.Module):
    """A layer of self-attention, cross-attention to states, and an MLP, each after an RMSNorm."""

    def __init__(
        self,
        width: int,
        states: int,
        inside: int,
        *,
        heads: int,
        dtype: torch.dtype,
        backend: AttentionBackend,
    ):
        super().__init__()
        options: Any = {"heads": heads, "dtype": dtype, "backend": backend}
        self.norm_self = nn.RMSNorm(width, eps=_EPS, dtype=dtype)
        self.self_attn = PlacedAttention(width, width, **options)
        self.norm_cross = nn.RMSNorm(width, eps=_EPS, dtype=dtype)
        self.cross_attn = PlacedAttention(width, states, **options)
        self.norm_mlp = nn.RMSNorm(width, eps=_EPS, dtype=dtype)
        self.linear_fc1 = WholeLinear(width, inside, dtype=dtype)
        self.linear_fc2 = WholeLinear(inside, width, dtype=dtype)

    def forward(
        self,
        h_LD: Tensor,
        states_SI: Tensor,
        placed: tuple[CaptionRows, CaptionRows],
        spans: tuple[Spans, Spans],
    ) -> Tensor:
        """The hidden states [L, D] after the layer.

        `placed` has the rows of tokens, then of states; `spans` are for self-attention, then for
        cross-attention.
        """
        (tokens, states), (among, across) = placed, spans
        x_LD = self.norm_self(h_LD)
        h_LD = h_LD + self.self_attn(x_LD, x_LD, (tokens, tokens), among)
        x_LD = self.norm_cross(h_LD)
        h_LD = h_LD + self.cross_attn(x_LD, states_SI, (tokens, states), across)
        return h_LD + self.linear_fc2(gelu(self.linear_fc1(self.norm_mlp(h_LD))))


class PlacedAttention(nn.Module):
    """Attention with normalised queries and keys, which have separate rotary positions."""

    def __init__(
        self, width: int, keys: int, *, heads: int, dtype: torch.dtype, backend: AttentionBackend
    ):
        """Creates the linears; `keys` is the width of the inputs of keys and values."""
        super().__init__()
        self.heads, self.backend = heads, backend
        self.linear_q = WholeLinear(width, width, bias=False, dtype=dtype)
        self.linear_k = WholeLinear(keys, width, bias=False, dtype=dtype)
        self.linear_v = WholeLinear(keys, width, bias=False, dtype=dtype)
        self.linear_proj = WholeLinear(width, width, bias=False, dtype=dtype)
        self.norm_q = HeadNorm(width // heads, dtype=dtype, eps=_EPS)
        self.norm_k = HeadNorm(width // heads, dtype=dtype, eps=_EPS)

    def forward(
        self, x_QD: Tensor, y_SI: Tensor, placed: tuple[CaptionRows, CaptionRows], spans: Spans
    ) -> Tensor:
        """The output [Q, D] of attention of `x_QD` to `y_SI`.

        `placed` has the rows of `x_QD`, then of `y_SI`.
        """
        of_queries, of_keys = placed
        q_QHK = rotate(self.norm_q(self._by_head(self.linear_q(x_QD))), *of_queries.angles)
        k_SHK = rotate(self.norm_k(self._by_head(self.linear_k(y_SI))), *of_keys.angles)
        v_SHK = self._by_head(self.linear_v(y_SI))
        made_QHK = attention_for(self.backend, q_QHK)(q_QHK, k_SHK, v_SHK, spans)
        return self.linear_proj(made_QHK.flatten(1))

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1))
