"""Lumina Image 2.0: separate refiners of latents and of text, then joint layers."""

from __future__ import annotations

from megatron.core.process_groups_config import ProcessGroupCollection

from dit.models.lumina2.family import FAMILY, Lumina2Config, lumina2_stacks
from dit.models.stacks.refined_transformer import RefinedTransformer


class Lumina2Network(RefinedTransformer):
    """Denoiser of Lumina Image 2.0: predicts the velocity of each noisy token of a pack.

    The arithmetic is that of Diffusers' `Lumina2Transformer2DModel`.
    """

    sign, tells_data_part = FAMILY.objective.sign, FAMILY.objective.tells_data_part
    theta = 10_000.0
    told_divisor = 1000.0  # the network's timestep is in [0, 1]

    def __init__(
        self, model: Lumina2Config, groups: ProcessGroupCollection, vp_stage: int | None = None
    ):
        told = (model.told_width, model.told_width)
        super().__init__(model, groups, vp_stage, lumina2_stacks(model), told=told)
