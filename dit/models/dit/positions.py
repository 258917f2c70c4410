"""Positions of Cosmos: rotary ones with NTK scaling, and learnable ones."""

# T packed tokens, K head width, D model width

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from dit.models.dit.config import DitConfig
from dit.models.layers.parallel_linear import sees_part_of_tokens
from dit.models.layers.rope import RotaryTable


class Rotary(RotaryTable):
    """3-D rotary positions with NTK scaling for each axis (Cosmos).

    Rows and columns get a third of a head's width each, rounded down to an even number; frames get
    the rest.
    """

    def __init__(self, model: DitConfig):
        width = model.hidden_size // model.num_attention_heads
        spatial = width // 6 * 2
        widths = (width - 2 * spatial, spatial, spatial)
        scales = zip(widths, model.rope_scale, strict=True)
        super().__init__(widths, [10_000.0 * scale ** (w / (w - 2)) for w, scale in scales])


class LearnablePositions(nn.Module):
    """Sum of three learnt tables, normalised to unit root mean square (Cosmos)."""

    def __init__(self, model: DitConfig, config: TransformerConfig):
        super().__init__()
        frames, rows, columns = model.max_size
        width, spatial = model.hidden_size, model.patch_spatial
        self.base_fps = model.base_fps

        # Of the model's own type: Megatron-Core's distributed optimizer mixes up the shards of a
        # parameter group that holds two types.
        def table(size: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(size, width, dtype=config.params_dtype))

        self.pos_emb_t = table(frames // model.patch_temporal)
        self.pos_emb_h = table(rows // spatial)
        self.pos_emb_w = table(columns // spatial)
        sees_part_of_tokens(self, config)

    def forward(self, position_TA: Tensor, fps_T: Tensor) -> Tensor:
        """Embedding [T, D], float32; `fps_T` undoes the time scale of the rotary positions."""
        pace_T = torch.where(fps_T.isnan(), 1.0, fps_T / self.base_fps)
        frame_T = (position_TA[:, 0] * pace_T).round().long()
        row_T, column_T = position_TA[:, 1].long(), position_TA[:, 2].long()
        tables = (self.pos_emb_t, frame_T), (self.pos_emb_h, row_T), (self.pos_emb_w, column_T)
        sum_TD = torch.stack([table[index].float() for table, index in tables]).sum(0)
        norm_T1 = torch.linalg.vector_norm(sum_TD, dim=-1, keepdim=True)
        return sum_TD / (1e-6 + norm_T1 * sum_TD.shape[-1] ** -0.5)
