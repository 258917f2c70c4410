"""How the noise level steers the network: its embedding, and adaLN."""

# N samples in a pack, T packed tokens, D model width, R rank of a modulation

from __future__ import annotations

import math

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from dit.models.layers.parallel_linear import Replicated, sees_part_of_tokens
from dit.models.layers.per_sample import Owners


def sinusoid(level_N: Tensor, width: int) -> Tensor:
    """Cosines then sines of the level at `width` / 2 frequencies, [N, width], float32.

    Source: arXiv:1706.03762, Sec. 3.5, with frequencies 10000^(-i / half).
    """
    half = width // 2
    index = torch.arange(half, dtype=torch.float32, device=level_N.device)
    angle = level_N.float()[:, None] * torch.exp(-math.log(10_000.0) * index / half)
    return nn.functional.pad(torch.cat((angle.cos(), angle.sin()), dim=-1), (0, width % 2))


class LevelEmbedding(nn.Module):
    """Level [N] -> normalised sinusoid [N, D] and the offset [N, 3 D] shared by all modulations."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        width = config.hidden_size
        self.linear_1 = Replicated(width, width, config=config)
        self.linear_2 = Replicated(width, 3 * width, config=config)
        self.norm = nn.RMSNorm(width, eps=1e-6, dtype=config.params_dtype)
        sees_part_of_tokens(self.norm, config)

    def forward(self, level_N: Tensor) -> tuple[Tensor, Tensor]:
        wave_ND = sinusoid(level_N, self.linear_1.in_features).type_as(self.linear_1.weight)
        return self.norm(wave_ND), self.linear_2(nn.functional.silu(self.linear_1(wave_ND)))


class Modulation(nn.Module):
    """adaLN of low rank (arXiv:2212.09748, Sec. 3.2; Cosmos): norm, scale and shift, and a gate.

    The last layer's has no gate. Computed once per sample.
    """

    def __init__(self, config: TransformerConfig, *, rank: int, gated: bool):
        super().__init__()
        width, self.parts = config.hidden_size, 3 if gated else 2
        self.linear_1 = Replicated(width, rank, config=config)
        self.linear_2 = Replicated(rank, self.parts * width, config=config)

    def forward(
        self, h_TD: Tensor, wave_ND: Tensor, offset_NX: Tensor, owners: Owners
    ) -> tuple[Tensor, Tensor | None]:
        """Modulated tokens [T, D], and the gate of each sample [N, D]."""
        steer_NX = self.linear_2(self.linear_1(nn.functional.silu(wave_ND)))
        steer_NX = steer_NX + offset_NX[:, : steer_NX.shape[-1]]
        shift_ND, scale_ND, *gate = steer_NX.chunk(self.parts, dim=-1)
        x_TD = owners.modulate(h_TD, scale_ND=1 + scale_ND, shift_ND=shift_ND)
        return x_TD, gate[0] if gate else None
