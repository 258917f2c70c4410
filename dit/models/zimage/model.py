"""Z-Image: latents and text, padded with learned tokens, refined separately, then in one row."""

from __future__ import annotations

from megatron.core.process_groups_config import ProcessGroupCollection

from dit.models.stacks.refined_transformer import RefinedTransformer
from dit.models.zimage.family import FAMILY, INSIDE_OF_TOLD, THETA, ZImageConfig, zimage_stacks


class ZImageNetwork(RefinedTransformer):
    """Noisy tokens, timesteps and text of a pack -> velocity of each token.

    The arithmetic is that of Diffusers' `ZImageTransformer2DModel`.
    """

    sign, tells_data_part = FAMILY.objective.sign, FAMILY.objective.tells_data_part
    theta = THETA
    told_divisor = 1.0
    rounds_angles = True
    first_place = 1

    def __init__(
        self, model: ZImageConfig, groups: ProcessGroupCollection, vp_stage: int | None = None
    ):
        told = (INSIDE_OF_TOLD, model.told_width)
        super().__init__(model, groups, vp_stage, zimage_stacks(model), told=told)
