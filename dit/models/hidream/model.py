"""HiDream-I1: double-stream layers, then sequential ones.

Each layer sees another state of the text.
"""

from __future__ import annotations

from megatron.core.process_groups_config import ProcessGroupCollection

from dit.models.family import POOLED
from dit.models.hidream.family import FAMILY, STATES, HiDreamConfig, hidream_stacks
from dit.models.stacks.layered_transformer import LayeredTransformer


class HiDreamNetwork(LayeredTransformer):
    """Noisy tokens, timesteps and texts of a pack -> velocity of each token.

    The arithmetic is that of Diffusers' `HiDreamImageTransformer2DModel` in training.
    """

    sign, states, pooled = FAMILY.objective.sign, STATES, POOLED

    def __init__(
        self, model: HiDreamConfig, groups: ProcessGroupCollection, vp_stage: int | None = None
    ):
        super().__init__(model, groups, vp_stage, hidream_stacks(model))
