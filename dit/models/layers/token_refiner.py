"""The token refiner of the Hunyuan models: attention within captions, before all other layers.

HunyuanVideo, HunyuanVideo 1.5 and HunyuanImage 2.1 have it. The arithmetic is that of Diffusers'
`HunyuanVideoTokenRefiner` and `HunyuanVideo15ByT5TextProjection`; Diffusers has copies of them with
other names for each model. Every tensor rank computes all tokens and has the whole gradient of the
weights, so gradients are not summed under sequence parallelism.
"""

# N samples, L text tokens, G tokens of words in quotation marks
# D model width, E width of an encoder, H heads, K head width, X any width

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from dit.config import AttentionBackend
from dit.models.attention.choice import attention_for
from dit.models.attention.spans import Spans
from dit.models.layer_spec import LEVEL_WAVES, REFINER_RATIO
from dit.models.layers.modulation import sinusoid
from dit.models.layers.parallel_linear import HasPrecision, WholeLinear, dtype
from dit.models.layers.queries_and_keys import hold_key_bias


class WholeTwoLinears(nn.Module):
    """An MLP (linear, SiLU, linear) that embeds timesteps or pooled texts [N, X] as [N, D].

    Every tensor rank computes all rows.
    """

    def __init__(self, inputs: int, width: int, *, dtype: torch.dtype):
        super().__init__()
        self.linear_1 = WholeLinear(inputs, width, dtype=dtype)
        self.linear_2 = WholeLinear(width, width, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(silu(self.linear_1(x)))


class RefinesText(HasPrecision, Protocol):
    """A configuration of a network with a token refiner."""

    @property
    def crossattn_emb_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_refiner_layers(self) -> int: ...
    @property
    def attention_backend(self) -> AttentionBackend: ...


class EmbedsGlyphs(HasPrecision, Protocol):
    """A configuration of a network that embeds ByT5's states of words in quotation marks."""

    @property
    def glyph_embed_size(self) -> int: ...
    @property
    def glyph_hidden_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...


class GlyphEmbedding(nn.Module):
    """Maps ByT5's states of quoted words, [G, E], to text tokens [G, D]."""

    def __init__(self, model: EmbedsGlyphs):
        super().__init__()
        inputs, inside, made = model.glyph_embed_size, model.glyph_hidden_size, dtype(model)
        self.norm = nn.LayerNorm(inputs, eps=1e-5, dtype=made)
        self.linear_1 = WholeLinear(inputs, inside, dtype=made)
        self.linear_2 = WholeLinear(inside, inside, dtype=made)
        self.linear_3 = WholeLinear(inside, model.hidden_size, dtype=made)

    def forward(self, glyph_GE: Tensor) -> Tensor:
        x = gelu(self.linear_1(self.norm(glyph_GE)))
        return self.linear_3(gelu(self.linear_2(x)))


class TokenRefiner(nn.Module):
    """Maps text states [L, E] to text tokens [L, D], by layers of attention within each caption."""

    def __init__(self, model: RefinesText):
        super().__init__()
        inputs, width, made = model.crossattn_emb_size, model.hidden_size, dtype(model)
        self.level = WholeTwoLinears(LEVEL_WAVES, width, dtype=made)
        self.pooled = WholeTwoLinears(inputs, width, dtype=made)
        self.linear_in = WholeLinear(inputs, width, dtype=made)
        heads, backend = model.num_attention_heads, model.attention_backend
        layers = range(model.num_refiner_layers)
        blocks = (RefinerLayer(width, heads, dtype=made, backend=backend) for _ in layers)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, level_N: Tensor, text_LE: Tensor, starts: Sequence[int]) -> Tensor:
        lengths = [stop - start for start, stop in pairwise(starts)]
        rows = list(zip(starts, lengths, strict=False))
        spans = Spans.of(rows, rows, total=len(text_LE), device=text_LE.device)
        pooled_NE = torch.stack([own_LE.mean(0) for own_LE in text_LE.split(lengths)])
        t_emb_ND = self.level(sinusoid(level_N, LEVEL_WAVES).to(text_LE.dtype)) + self.pooled(
            pooled_NE
        )
        text_LD = self.linear_in(text_LE)
        for block in self.blocks:
            text_LD = block(text_LD, t_emb_ND, lengths, spans)
        return text_LD


class RefinerLayer(nn.Module):
    """A layer of attention and feed-forward, whose gates depend on timestep and mean text state."""

    def __init__(self, width: int, heads: int, *, dtype: torch.dtype, backend: AttentionBackend):
        super().__init__()
        self.heads, self.backend = heads, backend
        self.norm_1 = nn.LayerNorm(width, eps=1e-6, dtype=dtype)
        self.linear_qkv = WholeLinear(width, 3 * width, dtype=dtype)
        hold_key_bias(self.linear_qkv.bias, width // heads)
        self.linear_proj = WholeLinear(width, width, dtype=dtype)
        self.norm_2 = nn.LayerNorm(width, eps=1e-6, dtype=dtype)
        self.linear_fc1 = WholeLinear(width, REFINER_RATIO * width, dtype=dtype)
        self.linear_fc2 = WholeLinear(REFINER_RATIO * width, width, dtype=dtype)
        self.gates = WholeLinear(width, 2 * width, dtype=dtype)

    def forward(
        self, text_LD: Tensor, t_emb_ND: Tensor, lengths: Sequence[int], spans: Spans
    ) -> Tensor:
        gates_LX = torch.cat(
            [
                gate_X.expand(length, -1)
                for gate_X, length in zip(self.gates(silu(t_emb_ND)), lengths, strict=True)
            ]
        )
        attention_LD, mlp_LD = gates_LX.chunk(2, dim=-1)
        x_LHX = self.linear_qkv(self.norm_1(text_LD)).unflatten(-1, (self.heads, -1))
        q_LHK, k_LHK, v_LHK = x_LHX.chunk(3, dim=-1)
        attended_LHK = attention_for(self.backend, q_LHK)(q_LHK, k_LHK, v_LHK, spans)
        text_LD = text_LD + self.linear_proj(attended_LHK.flatten(1)) * attention_LD
        made_LD = self.linear_fc2(silu(self.linear_fc1(self.norm_2(text_LD))))
        return text_LD + made_LD * mlp_LD


def by_sample(rows: Sequence[Tensor], starts: Sequence[Sequence[int]]) -> Tensor:
    """Several texts, concatenated sample by sample: [L, X].

    `rows` has a tensor for each text, such as captions and quoted words. `starts` has, for each
    text, the first row of each sample, then the number of rows.
    """
    parts = [
        kind[first:last]
        for bounds in zip(*(pairwise(one) for one in starts), strict=True)
        for kind, (first, last) in zip(rows, bounds, strict=True)
    ]
    return torch.cat(parts)
