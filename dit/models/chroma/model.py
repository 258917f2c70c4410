"""Chroma: double-stream layers, then single-stream ones, over latents and text."""

# M timesteps, R modulation vectors, D model width
# C inputs of the approximator for each vector, H its hidden size, X = M * R

from __future__ import annotations

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import silu

from dit.batch import PackedBatch
from dit.models.chroma.family import ChromaConfig, chroma_stacks
from dit.models.layers.adaptable import sees_part_of_tokens
from dit.models.layers.modulation import PrecomputedAdaLN, sinusoid
from dit.models.layers.parallel_linear import Replicated
from dit.models.stacks.double_single_transformer import DoubleSingleTransformer
from dit.models.stacks.joint_transformer import T_EMB
from dit.models.stacks.stacked_transformer import Shapes

_SCALE = 1000  # the indices of vectors are multiplied by this before their sinusoid


class ChromaNetwork(DoubleSingleTransformer):
    """Denoiser of Chroma: predicts the velocity of each noisy token of a pack.

    The arithmetic is that of Diffusers' `ChromaTransformer2DModel`. The first pipeline stage
    computes the modulation vectors of all layers and sends them with the hidden states. In the
    published network there are R = 344 vectors for each sample of 4,600 tokens or more.
    """

    def __init__(
        self, model: ChromaConfig, groups: ProcessGroupCollection, vp_stage: int | None = None
    ):
        super().__init__(
            model,
            groups,
            vp_stage,
            chroma_stacks(model),
            told=lambda config: Approximator(model, config),
            # The last two vectors.
            modulate_out=lambda context: PrecomputedAdaLN(
                context.config, first=model.modulation_rows - 2, gated=False
            ),
        )

    def t_emb(self, level_M: Tensor, batch: PackedBatch) -> Tensor:  # noqa: ARG002
        return self.told(level_M)

    def condition_shapes(self, batch: PackedBatch) -> Shapes:
        return {T_EMB: (batch.num_levels, self.model.modulation_rows * self.config.hidden_size)}


class ApproximatorBlock(nn.Module):
    """A residual block of the approximator: x + linear(SiLU(linear(norm(x))))."""

    def __init__(self, width: int, config: TransformerConfig):
        super().__init__()
        # No eps is given, as in Diffusers: torch's default depends on the dtype.
        self.norm = nn.RMSNorm(width, dtype=config.params_dtype)
        sees_part_of_tokens(self.norm, config)
        self.linear_1 = Replicated(width, width, config=config, bias=True)
        self.linear_2 = Replicated(width, width, config=config, bias=True)

    def forward(self, x_XH: Tensor) -> Tensor:
        return x_XH + self.linear_2(silu(self.linear_1(self.norm(x_XH))))


class Approximator(nn.Module):
    """Maps timesteps [M] to the modulation vectors of all layers, concatenated: [M, R * D].

    Each vector is computed from the timestep, a guidance scale that is always 0, and the vector's
    index. The arithmetic is that of Diffusers' `ChromaApproximator` and its embeddings.
    """

    def __init__(self, model: ChromaConfig, config: TransformerConfig):
        super().__init__()
        channels, width = model.approximator_channels, model.approximator_hidden_size
        self.linear_in = Replicated(channels, width, config=config, bias=True)
        layers = (ApproximatorBlock(width, config) for _ in range(model.approximator_layers))
        self.blocks = nn.ModuleList(layers)
        self.linear_out = Replicated(width, model.hidden_size, config=config, bias=True)
        # On a CPU: with angles up to 343,000, another device's rounding of frequencies moves
        # cosines by 1e-2.
        number_R = torch.arange(model.modulation_rows, device="cpu")
        number_RC = sinusoid(_SCALE * number_R, channels // 2)
        self.register_buffer("number_RC", number_RC, persistent=False)

    def forward(self, level_M: Tensor) -> Tensor:
        channels = self.linear_in.in_features
        number_RC = self.get_buffer("number_RC")
        told = (level_M, torch.zeros_like(level_M))
        told_MC = torch.cat([sinusoid(one_M, channels // 4) for one_M in told], dim=-1)
        told_XC = told_MC.repeat_interleave(len(number_RC), dim=0)
        x_XC = torch.cat((told_XC, number_RC.repeat(len(level_M), 1)), dim=-1)
        x_XH = self.linear_in(x_XC.to(self.linear_in.weight.dtype))
        for block in self.blocks:
            x_XH = block(x_XH)
        return self.linear_out(x_XH).view(len(level_M), -1)
