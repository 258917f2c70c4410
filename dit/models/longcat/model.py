"""LongCat-Image: FLUX's layers; rows and columns of pictures start after the text's positions."""
# M timesteps, D model width, N samples, T packed tokens, L text tokens, A axes of positions

from __future__ import annotations

from dataclasses import replace

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from dit.batch import PackedBatch
from dit.models.joint.family import double_then_single
from dit.models.layers.modulation import ConditionEmbedding
from dit.models.longcat.family import LongCatConfig
from dit.models.stacks.double_single_transformer import DoubleSingleTransformer
from dit.pack_wire import to_device


class LongCatNetwork(DoubleSingleTransformer):
    """Denoiser of LongCat-Image: predicts the velocity of each noisy token of a pack.

    The arithmetic is that of Diffusers' `LongCatImageTransformer2DModel`. Positions (kind, row,
    column) are those of its pipelines. Token n of a text has position (0, n, n). After a text of L
    tokens, the token at row r and column c has position (1, L + r, L + c) in the target and
    (2, L + r, L + c) in the first picture to edit.
    """

    def __init__(
        self, model: LongCatConfig, groups: ProcessGroupCollection, vp_stage: int | None = None
    ):
        stacks = double_then_single(model)
        super().__init__(model, groups, vp_stage, stacks, told=ConditionEmbedding)

    def t_emb(self, level_M: Tensor, batch: PackedBatch) -> Tensor:  # noqa: ARG002
        return self.told(level_M)

    def prepared(self, batch: PackedBatch) -> PackedBatch:
        position_TA = batch.position_TA
        moved_NA = torch.tensor([[1, rows, rows] for rows in self.text_lengths(batch)])
        moved_TA = to_device(moved_NA, position_TA.device)[batch.segment_T]
        return replace(batch, position_TA=position_TA + moved_TA)

    def text_positions(self, batch: PackedBatch) -> Tensor:
        places_L = torch.cat([torch.arange(rows) for rows in self.text_lengths(batch)])
        rows_LA = places_L[:, None] * torch.tensor([0, 1, 1])
        return to_device(rows_LA, batch.position_TA.device).type_as(batch.position_TA)
