"""What HunyuanVideo 1.5 is told beside latents: one row of text, of three encoders.

The arithmetic is that of `HunyuanVideo15TokenRefiner`, `HunyuanVideo15ByT5TextProjection`
(`dit.models.layers.token_refiner`) and `HunyuanVideo15ImageProjection` in Diffusers. Every tensor
rank has all rows, and the whole gradient of them, so that the weights have no mark for sequence
parallelism.
"""

# N samples, L rows of text, G of words in quotation marks, I of pictures
# D model width, E width of an encoder

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from dit.models.hunyuan_video_15.config import HunyuanVideo15Config
from dit.models.layers.parallel_linear import WholeLinear, dtype
from dit.models.layers.token_refiner import GlyphEmbedding, TokenRefiner, by_sample


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


class TextRows(nn.Module):
    """Captions, words in quotation marks and pictures -> one row of text [L, D].

    A sample's rows follow each other; those of each kind bear its mark.
    """

    def __init__(self, model: HunyuanVideo15Config):
        super().__init__()
        self.refiner, self.glyphs = TokenRefiner(model), GlyphEmbedding(model)
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
        return by_sample(marked, starts)
