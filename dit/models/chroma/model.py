"""Chroma: double-stream layers, then single-stream ones, over latents and text."""

# M level rows, R rows of modulations, D model width

from __future__ import annotations

from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from dit.batch import PackedBatch
from dit.models.chroma.approximator import Approximator
from dit.models.chroma.config import ChromaConfig
from dit.models.chroma.family import chroma_stacks
from dit.models.layers.modulation import GivenAdaLN
from dit.models.stacks.double_single_transformer import DoubleSingleTransformer
from dit.models.stacks.joint_transformer import T_EMB
from dit.models.stacks.stacked_transformer import Shapes


class ChromaNetwork(DoubleSingleTransformer):
    """Noisy tokens, noise level and text of a pack -> velocity of each token.

    The arithmetic is that of Diffusers' `ChromaTransformer2DModel`. The first pipeline stage makes
    the modulations of all layers, which travel with the hidden states: R = 344 rows of a published
    network for each sample, of its 4,600 rows of tokens and more.
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
            # The last two rows.
            modulate_out=lambda context: GivenAdaLN(
                context.config, first=model.modulation_rows - 2, gated=False
            ),
        )

    def t_emb(self, level_M: Tensor, batch: PackedBatch) -> Tensor:  # noqa: ARG002
        return self.told(level_M)

    def condition_shapes(self, batch: PackedBatch) -> Shapes:
        return {T_EMB: (batch.num_levels, self.model.modulation_rows * self.config.hidden_size)}
