"""FLUX.1: double-stream layers, then single-stream ones, over latents and text."""

# M timesteps, D model width, N samples, P width of the pooled text

from __future__ import annotations

from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from dit.batch import PackedBatch
from dit.models.family import POOLED
from dit.models.flux.family import FluxConfig
from dit.models.joint.family import double_then_single
from dit.models.layers.modulation import ConditionEmbedding
from dit.models.stacks.double_single_transformer import DoubleSingleTransformer


class FluxNetwork(DoubleSingleTransformer):
    """Denoiser of FLUX.1: predicts the velocity of each noisy token of a pack.

    The arithmetic is that of Diffusers' `FluxTransformer2DModel`.
    """

    def __init__(
        self, model: FluxConfig, groups: ProcessGroupCollection, vp_stage: int | None = None
    ):
        super().__init__(
            model,
            groups,
            vp_stage,
            double_then_single(model),
            told=lambda config: ConditionEmbedding(
                config, pooled=model.pooled_size, guidance=model.guidance_embed
            ),
        )

    def t_emb(self, level_M: Tensor, batch: PackedBatch) -> Tensor:
        pooled_NP = batch.vectors[POOLED].to(self.config.params_dtype)
        return self.told(level_M, pooled_NP, batch.guidance)
