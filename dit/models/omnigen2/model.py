"""OmniGen2: separate refiners of target, references and text, then joint layers."""

# T latent tokens, C patch features, P pictures of a sample, D model width

from __future__ import annotations

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from dit.batch import PackedBatch
from dit.models.layer_spec import TOKENS
from dit.models.layers.adaptable import sees_part_of_tokens
from dit.models.layers.parallel_linear import Replicated
from dit.models.omnigen2.family import FAMILY, MOST_REFERENCES, OmniGen2Config, omnigen2_stacks
from dit.models.stacks.refined_transformer import RefinedTransformer

_NUMBER = 3
"""Axis of positions with the index of a reference, from 1; it is 0 for the target."""


class OmniGen2Network(RefinedTransformer):
    """Denoiser of OmniGen2: predicts the velocity of each noisy token of a pack.

    The arithmetic is that of the public code's `OmniGen2Transformer2DModel`.
    """

    sign, tells_data_part = FAMILY.objective.sign, FAMILY.objective.tells_data_part
    theta = 10_000.0
    told_divisor = wave_scale = 1000.0  # divided, then multiplied: the rounding of the public code
    text_axes = 3
    refines_references = True

    def __init__(
        self, model: OmniGen2Config, groups: ProcessGroupCollection, vp_stage: int | None = None
    ):
        told = (model.told_width, model.told_width)
        super().__init__(model, groups, vp_stage, omnigen2_stacks(model), told=told)
        if self.pre_process:
            config, width = self.config, model.hidden_size
            self.reference_patches = Replicated(
                model.patch_features, width, config=config, bias=True, token_row=TOKENS
            )
            self.picture_number = nn.Embedding(MOST_REFERENCES, width, dtype=config.params_dtype)
            sees_part_of_tokens(self.picture_number, config)

    def parameters_without_gradient(self) -> list[str]:
        of_references = ["reference_refiner.*", "reference_patches.*", "picture_number.*"]
        none = [] if self.model.reference_latents else of_references
        return [*super().parameters_without_gradient(), *none]

    def embedded_patches(self, x_TC: Tensor, batch: PackedBatch) -> Tensor:
        number_T = self.my_tokens(batch.position_TA[:, _NUMBER]).long()
        numbered_TD = self.picture_number((number_T - 1).clamp(min=0))
        reference_TD = self.reference_patches(x_TC) + numbered_TD
        return torch.where(number_T[:, None] > 0, reference_TD, self.patches(x_TC))
