"""FLUX.2: double-stream layers, then single-stream ones; layers of a stack share a modulation."""
# M timesteps, L text tokens

from __future__ import annotations

from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from dit.batch import PackedBatch
from dit.models.flux2.family import (
    ALL_VECTORS,
    FIRST_OF_HEAD,
    THETA,
    VECTORS,
    Flux2Config,
    flux2_stacks,
)
from dit.models.layers.modulation import ConditionEmbedding, PrecomputedAdaLN, SharedModulations
from dit.models.layers.parallel_linear import BuildContext
from dit.models.positions import TimeOffsetPositions
from dit.models.stacks.double_single_transformer import DoubleSingleTransformer
from dit.models.stacks.joint_transformer import T_EMB
from dit.models.stacks.stacked_transformer import Shapes


class Flux2Network(DoubleSingleTransformer):
    """Denoiser of FLUX.2: predicts the velocity of each noisy token of a pack.

    The arithmetic is that of Diffusers' `Flux2Transformer2DModel`. The first pipeline stage
    computes all modulations, 17 vectors per sample, and sends them with the hidden states.
    """

    theta = THETA

    has_biases = False

    def __init__(
        self, model: Flux2Config, groups: ProcessGroupCollection, vp_stage: int | None = None
    ):
        super().__init__(
            model,
            groups,
            vp_stage,
            flux2_stacks(model),
            told=lambda config: ConditionEmbedding(
                config, guidance=model.guidance_embed, bias=False
            ),
            modulate_out=lambda context: PrecomputedAdaLN(
                context.config, first=FIRST_OF_HEAD, gated=False
            ),
        )
        if self.pre_process:
            context = BuildContext(model=model, config=self.config, groups=groups)
            self.modulations = SharedModulations(context, model.hidden_size, VECTORS)

    def t_emb(self, level_M: Tensor, batch: PackedBatch) -> Tensor:
        return self.modulations(self.told(level_M, guidance=batch.guidance))

    def condition_shapes(self, batch: PackedBatch) -> Shapes:
        return {T_EMB: (batch.num_levels, ALL_VECTORS * self.config.hidden_size)}

    def text_positions(self, batch: PackedBatch) -> Tensor:
        rows_LA = TimeOffsetPositions.of_text(self.text_lengths(batch))
        return rows_LA.to(batch.position_TA.device)
