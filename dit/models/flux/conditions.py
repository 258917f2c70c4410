"""What FLUX is told beside tokens: the noise level, a guidance scale, pooled text.

The arithmetic is that of `CombinedTimestepGuidanceTextProjEmbeddings` in Diffusers.
"""

# M level rows, N samples, D model width, P width of pooled text

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import silu

from dit.models.flux.config import FluxConfig
from dit.models.layers.modulation import sinusoid
from dit.models.layers.parallel_linear import Replicated

WAVES = 256
"""Cosines and sines of a number that is told; fixed in Diffusers."""
SCALE = 1000
"""Of the guidance scale, as of t, before its sinusoid."""


class ConditionEmbedding(nn.Module):
    """Levels [M], guidance and pooled text [N, P] -> the sum of their embeddings [M, D]."""

    def __init__(self, model: FluxConfig, config: TransformerConfig):
        super().__init__()
        self.level = TwoLinears(WAVES, config)
        self.guidance = TwoLinears(WAVES, config) if model.guidance_embed else None
        self.pooled = TwoLinears(model.pooled_size, config)

    def forward(self, level_M: Tensor, pooled_NP: Tensor, guidance: float | None) -> Tensor:
        dtype, levels = pooled_NP.dtype, len(level_M) // len(pooled_NP)
        t_emb_MD = self.level(sinusoid(level_M, WAVES).to(dtype))
        if self.guidance is not None:
            assert guidance is not None, "the network is told a guidance scale"
            told_1 = torch.full_like(level_M[:1], SCALE * guidance)
            t_emb_MD = t_emb_MD + self.guidance(sinusoid(told_1, WAVES).to(dtype))
        return t_emb_MD + self.pooled(pooled_NP).repeat(levels, 1)


class TwoLinears(nn.Module):
    """Linear, SiLU, linear, of level rows."""

    def __init__(self, inputs: int, config: TransformerConfig):
        super().__init__()
        width = config.hidden_size
        self.linear_1 = Replicated(inputs, width, config=config, bias=True)
        self.linear_2 = Replicated(width, width, config=config, bias=True)

    def forward(self, x_MX: Tensor) -> Tensor:
        return self.linear_2(silu(self.linear_1(x_MX)))
