"""What HunyuanVideo 1.5 is told beside latents: one row of text, of three encoders.

The arithmetic is that of `HunyuanVideo15TokenRefiner`, `HunyuanVideo15ByT5TextProjection` and
`HunyuanVideo15ImageProjection` in Diffusers. Every tensor rank has all rows, and the whole gradient
of them, so that the weights have no mark for sequence parallelism.
"""

# M level rows, N samples, L rows of text, G of words in quotation marks, I of pictures
# D model width, E width of an encoder, H heads, K head width

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, silu

from dit.models.hunyuan_video_15.config import HunyuanVideo15Config
from dit.models.layers.attention import Spans, attention_for
from dit.models.layers.modulation import sinusoid
from dit.models.layers.parallel_linear import WholeLinear, dtype

WAVES = 256
"""Cosines and sines of the noise level that its embeddings are made of; fixed in Diffusers."""
REFINER_RATIO = 4
"""Width of the refiner's MLPs over the hidden size; fixed in Diffusers."""


class WholeTwoLinears(nn.Module):
    """Linear, SiLU, linear."""

    def __init__(self, inputs: int, model: HunyuanVideo15Config):
        super().__init__()
        self.linear_1 = WholeLinear(inputs, model.hidden_size, dtype=dtype(model))
        self.linear_2 = WholeLinear(model.hidden_size, model.hidden_size, dtype=dtype(model))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(silu(self.linear_1(x)))


class GlyphEmbedding(nn.Module):
    """Rows of ByT5 [G, E] -> [G, D]."""

    def __init__(self, model: HunyuanVideo15Config):
        super().__init__()
        made, inputs, inside = dtype(model), model.glyph_embed_size, model.glyph_hidden_size
        self.norm = nn.LayerNorm(inputs, eps=1e-5, dtype=made)
        self.linear_1 = WholeLinear(inputs, inside, dtype=made)
        self.linear_2 = WholeLinear(inside, inside, dtype=made)
        self.linear_3 = WholeLinear(inside, model.hidden_size, dtype=made)

    def forward(self, glyph_GE: Tensor) -> Tensor:
        x = gelu(self.linear_1(self.norm(glyph_GE)))
        return self.linear_3(gelu(self.linear_2(x)))


class PictureEmbedding(nn.Module):
    """Rows of the image encoder [I, E] -> [I, D]."""

    def __init__(self, model: HunyuanVideo15Config):
        super().__init__()
        made, inputs, width = dtype(model), model.image_embed_size, model.hidden_size
        self.norm_in = nn.LayerNorm(inputs, eps=1e-5, dtype=made)
        self.linear_1 = WholeLinear(inputs, inputs, dtype=made)
        self.linear_2 = WholeLinear(inputs, width, dtype=made)
        self.norm_out = nn.LayerNorm(width, eps=1e-5, dtype=made)

    def forward(self, image_IE: Tensor) -> Tensor:
        return self.norm_out(self.linear_2(gelu(self.linear_1(self.norm_in(image_IE)))))


class TokenRefiner(nn.Module):
    """Captions [L, E] -> [L, D], by attention among the tokens of each."""

    def __init__(self, model: HunyuanVideo15Config):
        super().__init__()
        made, text = dtype(model), model.crossattn_emb_size
        self.level = WholeTwoLinears(WAVES, model)
        self.pooled = WholeTwoLinears(text, model)
        self.linear_in = WholeLinear(text, model.hidden_size, dtype=made)
        self.blocks = nn.ModuleList(RefinerLayer(model) for _ in range(model.num_refiner_layers))

    def forward(self, level_N: Tensor, text_LE: Tensor, starts: Sequence[int]) -> Tensor:
        lengths = [stop - start for start, stop in pairwise(starts)]
        rows = list(zip(starts, lengths, strict=False))
        spans = Spans.of(rows, rows, total=len(text_LE), device=text_LE.device)
        pooled_NE = torch.stack([own_LE.mean(0) for own_LE in text_LE.split(lengths)])
        t_emb_ND = self.level(sinusoid(level_N, WAVES).to(text_LE.dtype)) + self.pooled(pooled_NE)
        text_LD = self.linear_in(text_LE)
        for block in self.blocks:
            text_LD = block(text_LD, t_emb_ND, lengths, spans)
        return text_LD


class QkvLinear(WholeLinear):
    """Queries, keys and values of plain attention, head by head.

    A bias of keys adds the same number to all scores of a query, which softmax does not see: its
    gradient is zero. Rounding makes noise of it, of which AdamW would make whole steps, on each
    layout others; here it is zero.
    """

    def __init__(self, width: int, heads: int, *, dtype: torch.dtype):
        super().__init__(width, 3 * width, dtype=dtype)
        self.heads = heads

    def product(self, x: Tensor) -> Tensor:
        q_HK, k_HK, v_HK = self.bias.view(self.heads, 3, -1).unbind(1)
        bias_X = torch.stack((q_HK, k_HK.detach(), v_HK), dim=1).flatten()
        return linear(x, self.weight, bias_X)


class RefinerLayer(nn.Module):
    """Attention and feed-forward, each gated by level and caption."""

    def __init__(self, model: HunyuanVideo15Config):
        super().__init__()
        made, width = dtype(model), model.hidden_size
        self.heads = model.num_attention_heads
        self.norm_1 = nn.LayerNorm(width, eps=1e-6, dtype=made)
        self.linear_qkv = QkvLinear(width, self.heads, dtype=made)
        self.linear_proj = WholeLinear(width, width, dtype=made)
        self.norm_2 = nn.LayerNorm(width, eps=1e-6, dtype=made)
        self.linear_fc1 = WholeLinear(width, REFINER_RATIO * width, dtype=made)
        self.linear_fc2 = WholeLinear(REFINER_RATIO * width, width, dtype=made)
        self.gates = WholeLinear(width, 2 * width, dtype=made)

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
        attend = attention_for(text_LD.device, text_LD.dtype)
        q_LHK, k_LHK, v_LHK = x_LHX.chunk(3, dim=-1)
        attended_LHK = attend(q_LHK, k_LHK, v_LHK, spans)
        text_LD = text_LD + self.linear_proj(attended_LHK.flatten(1)) * attention_LD
        made_LD = self.linear_fc2(silu(self.linear_fc1(self.norm_2(text_LD))))
        return text_LD + made_LD * mlp_LD


class TextRows(nn.Module):
    """Captions, words in quotation marks and pictures -> one row of text [L, D].

    A sample's rows follow each other; those of each kind bear its mark.
    """

    def __init__(self, model: HunyuanVideo15Config):
        super().__init__()
        self.refiner = TokenRefiner(model)
        self.glyphs = GlyphEmbedding(model)
        self.image = PictureEmbedding(model)
        self.kind = nn.Parameter(torch.zeros(3, model.hidden_size, dtype=dtype(model)))

    def forward(
        self,
        level_N: Tensor,
        rows: tuple[Tensor, Tensor, Tensor],
        starts: tuple[Sequence[int], Sequence[int], Sequence[int]],
    ) -> Tensor:
        """`rows` of captions, words and pictures [L, E], of samples that begin at `starts`."""
        text_LE, glyph_GE, image_IE = rows
        made = (
            self.refiner(level_N, text_LE, starts[0]),
            self.glyphs(glyph_GE),
            self.image(image_IE),
        )
        marked = [x + mark for x, mark in zip(made, self.kind, strict=True)]
        parts = [
            part[first:last]
            for bounds in zip(*(pairwise(one) for one in starts), strict=True)
            for part, (first, last) in zip(marked, bounds, strict=True)
        ]
        return torch.cat(parts)
