"""Stable Diffusion 3: double-stream layers over text and latents with added positions."""
# T packed tokens, M timesteps, C patch features, D model width, L text tokens, E text width
# G rows or columns of the table of positions, F frequencies, X sines and cosines of a row or column
# A axes of a position

from __future__ import annotations

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from dit.batch import PackedBatch
from dit.models.family import POOLED
from dit.models.layer_spec import TEXT_TOKENS, TOKENS
from dit.models.layers.modulation import ConditionEmbedding
from dit.models.layers.parallel_linear import Replicated, transformer_config
from dit.models.sd3.family import Sd3Config, sd3_stacks
from dit.models.stacks.joint_transformer import T_EMB, JointLayout, JointTransformer
from dit.models.stacks.stacked_transformer import Blocks


class Sd3Network(JointTransformer):
    """Denoiser of Stable Diffusion 3: predicts the velocity of each noisy token of a pack.

    The arithmetic is that of Diffusers' `SD3Transformer2DModel`.
    """

    def __init__(
        self, model: Sd3Config, groups: ProcessGroupCollection, vp_stage: int | None = None
    ):
        config, width = transformer_config(model), model.hidden_size
        super().__init__(config, model, groups, vp_stage, sd3_stacks(model))
        if self.pre_process:
            inputs, text = model.patch_features, model.crossattn_emb_size
            self.patches = Replicated(inputs, width, config=config, bias=True, token_row=TOKENS)
            self.positions = PositionTable(model, dtype=config.params_dtype)
            self.text_embedder = Replicated(
                text, width, config=config, bias=True, token_row=TEXT_TOKENS
            )
            self.told = ConditionEmbedding(config, pooled=model.pooled_size)
        self.build_stacks()
        self.build_head(TOKENS)

    def embed(
        self, x_TC: Tensor, level_M: Tensor, batch: PackedBatch, layout: JointLayout
    ) -> Blocks:
        dtype = self.config.params_dtype
        text_LE = self.my_tokens(layout.text.of(batch.text_LE.to(dtype)))
        position_TD = self.positions(self.my_tokens(batch.position_TA))
        return {
            TOKENS: self.patches(self.my_tokens(x_TC.to(dtype))) + position_TD,
            TEXT_TOKENS: self.text_embedder(text_LE),
            T_EMB: self.told(level_M, batch.vectors[POOLED].to(dtype)),
        }


class PositionTable(nn.Module):
    """A table with an embedding for each position of a square; it is stored but never trained.

    Published weights include the table. A new table has sines and cosines of the column, then of
    the row, at frequencies 10000^(-i / (D / 4)) (arXiv:2403.03206, Sec. 4), as in Diffusers'
    `PatchEmbed`.
    """

    table: Tensor

    def __init__(self, model: Sd3Config, *, dtype: torch.dtype):
        super().__init__()
        self.side = model.table_side
        place_G = torch.arange(self.side, dtype=torch.float32)
        place_G /= self.side / (model.sample_size // model.patch_spatial)
        index = torch.arange(model.hidden_size // 4, dtype=torch.float64)
        angle_GF = torch.outer(place_G.double(), 1 / 10_000.0 ** (index / len(index)))
        wave_GX = torch.cat((angle_GF.sin(), angle_GF.cos()), dim=1).to(dtype)
        rows_GGX = wave_GX[:, None].expand(-1, self.side, -1)
        table_GGD = torch.cat((rows_GGX.transpose(0, 1), rows_GGX), dim=-1)
        self.register_buffer("table", table_GGD.flatten(0, 1))

    def forward(self, position_TA: Tensor) -> Tensor:
        """The embeddings [T, D] of the positions `position_TA`, (row, column)."""
        row_T, column_T = position_TA.long().unbind(1)
        return self.table[row_T * self.side + column_T]
