"""Ideogram 4: layers over concatenated text and picture, with three interleaved rotary axes."""
# T packed tokens, M timesteps, C patch features, D model width, L text tokens, A axes
# X width of the timestep embedding of modulations

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn
from torch.nn.functional import silu

from dit.batch import PackedBatch
from dit.models.ideogram4.family import (
    FAMILY,
    THETA,
    Ideogram4Config,
    ideogram4_stack,
)
from dit.models.layer_spec import ALL_NOISE, JOINT_TOKENS, TEXT_TOKENS, TOKENS, PerBlockModulation
from dit.models.layers.adaptable import sees_part_of_tokens
from dit.models.layers.modulation import PerBlockAdaLN, TwoLinears
from dit.models.layers.parallel_linear import BuildContext, Replicated, transformer_config
from dit.models.layers.queries_and_keys import InterleavedRotary
from dit.models.positions import FarPicturePositions
from dit.models.stacks.joint_transformer import T_EMB, JointLayout, JointTransformer
from dit.models.stacks.stacked_transformer import Blocks, Shapes
from dit.pack_wire import to_device

_EPS_OF_TEXT = 1e-6
_TEXT, _PICTURE = 0, 1
"""Rows of `row_kind`, the embedding that distinguishes text and picture tokens."""


class Ideogram4Network(JointTransformer):
    """Denoiser of Ideogram 4: predicts the velocity of each noisy token of a pack.

    The arithmetic is that of Diffusers' `Ideogram4Transformer2DModel`. The first pipeline stage
    computes a narrow timestep embedding, from which each layer computes its modulation.
    """

    sign, tells_data_part = FAMILY.objective.sign, FAMILY.objective.tells_data_part

    def __init__(
        self, model: Ideogram4Config, groups: ProcessGroupCollection, vp_stage: int | None = None
    ):
        config, width = transformer_config(model), model.hidden_size
        super().__init__(config, model, groups, vp_stage, (ideogram4_stack(model),))
        head = width // model.num_attention_heads
        self.rotary = InterleavedRotary(head, model.mrope_section, THETA)
        if self.pre_process:
            biased: Any = {"config": config, "bias": True}
            text = model.crossattn_emb_size
            self.patches = Replicated(model.patch_features, width, **biased, token_row=TOKENS)
            self.text_norm = nn.RMSNorm(text, eps=_EPS_OF_TEXT, dtype=config.params_dtype)
            self.text_embedder = Replicated(text, width, **biased, token_row=TEXT_TOKENS)
            self.told = TwoLinears(width, config)
            self.narrow = Replicated(width, model.adaln_width, **biased)
            self.row_kind = nn.Embedding(2, width, dtype=config.params_dtype)
            for made in (self.text_norm, self.row_kind):
                sees_part_of_tokens(made, config)
        self.build_stacks()
        self.build_head(JOINT_TOKENS, modulate_out=self._scale_out)

    def _scale_out(self, context: BuildContext) -> nn.Module:
        spec, width = PerBlockModulation(inputs=self.model.adaln_width), self.model.hidden_size
        return PerBlockAdaLN(context, width, spec, parts=1, gated=False, shifted=False)

    def text_positions(self, batch: PackedBatch) -> Tensor:
        places_LA = FarPicturePositions.of_text(self.text_lengths(batch))
        return to_device(places_LA, batch.position_TA.device)

    def condition_shapes(self, batch: PackedBatch) -> Shapes:
        return {T_EMB: (batch.num_levels, self.model.adaln_width)}

    @staticmethod
    def data_part(level_M: Tensor) -> Tensor:
        # In this order of operations: another rounding moves the fastest sine by 6e-4.
        return 1 - level_M / ALL_NOISE

    def embed(
        self, x_TC: Tensor, level_M: Tensor, batch: PackedBatch, layout: JointLayout
    ) -> Blocks:
        dtype = self.config.params_dtype
        text_LE = self.my_tokens(layout.text.of(batch.text_LE.to(dtype)))
        # By calling the module, because Megatron-Core's DDP waits for gathered weights in the call.
        kinds_2D = self.row_kind(torch.arange(2, device=x_TC.device))
        told_MD = self.told(_waves(level_M, self.config.hidden_size).to(dtype))
        return {
            TOKENS: self.patches(self.my_tokens(x_TC.to(dtype))) + kinds_2D[_PICTURE],
            TEXT_TOKENS: self.text_embedder(self.text_norm(text_LE)) + kinds_2D[_TEXT],
            T_EMB: silu(self.narrow(told_MD)),
        }


def _waves(part_M: Tensor, width: int) -> Tensor:
    """The sinusoidal embedding [M, width] of `part_M` * 10000: cosines, then sines, float32.

    The last frequency is exactly 1 / 10000. The order of operations is that of the published code:
    for angles up to 10000, another order changes the result by its rounding.
    """
    half, most = width // 2, 10_000.0
    index = torch.arange(half, dtype=torch.float32, device=part_M.device)
    frequency = torch.exp(index * -(math.log(most) / (half - 1)))
    angle = (most * part_M.float())[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), dim=-1)
