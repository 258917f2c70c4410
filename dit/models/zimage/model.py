"""Z-Image: separate refiners of latents and of text, padded with learned tokens; joint layers."""

from __future__ import annotations

from megatron.core.process_groups_config import ProcessGroupCollection

from dit.models.stacks.refined_transformer import RefinedTransformer
from dit.models.zimage.family import FAMILY, INSIDE_OF_TOLD, THETA, ZImageConfig, zimage_stacks


class ZImageNetwork(RefinedTransformer):
    """Denoiser of Z-Image: predicts the velocity of each noisy token of a pack.

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
