"""Where a token stands in its sample: rotary positions, and learnable ones."""

# T packed tokens, K head width, D model width

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from dit.models.layers.parallel_linear import sees_part_of_tokens


class Rotary(nn.Module):
    """3-D rotary positions with NTK scaling per axis (RoPE, arXiv:2104.09864; Cosmos).

    A head's width is shared by frames, rows and columns; rows and columns get a third each,
    rounded down to an even number. Frequencies are computed, so any grid is valid.
    """

    def __init__(self, config: Any):
        super().__init__()
        width = config.hidden_size // config.num_attention_heads
        spatial = width // 6 * 2
        dims = (width - 2 * spatial, spatial, spatial)
        self.axes = len(dims)
        for axis, (dim, scale) in enumerate(zip(dims, config.rope_scale, strict=True)):
            self.register_buffer(f"frequency_{axis}", _frequencies(dim, scale), persistent=False)

    def forward(self, position_T3: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, K], float32."""
        parts = [
            torch.outer(position_T3[:, axis].float(), self.get_buffer(f"frequency_{axis}"))
            for axis in range(self.axes)
        ]
        angle_TK = torch.cat(parts * 2, dim=-1)
        return angle_TK.cos(), angle_TK.sin()


def _frequencies(dim: int, scale: float) -> Tensor:
    theta = 10_000.0 * scale ** (dim / (dim - 2))
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


class _Rotate(torch.autograd.Function):
    """Keeps nothing of x: the way back is the rotation by the opposite angles."""

    @staticmethod
    def forward(ctx: Any, x_THK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        ctx.save_for_backward(cos_TK, sin_TK)
        return _turned(x_THK, cos_TK, sin_TK, sign=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _turned(*gradients, *ctx.saved_tensors, sign=-1), None, None


def _turned(x_THK: Tensor, cos_TK: Tensor, sin_TK: Tensor, *, sign: int) -> Tensor:
    half = x_THK.shape[-1] // 2
    wide_THK, sin = x_THK.float(), sin_TK[:, None, :half]
    out_THK = wide_THK * cos_TK[:, None]
    out_THK[..., :half].addcmul_(wide_THK[..., half:], sin, value=-sign)
    out_THK[..., half:].addcmul_(wide_THK[..., :half], sin, value=sign)
    return out_THK.type_as(x_THK)


def rotate(x_THK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Turns each pair (i, i + K/2) of a head by the token's angles, in float32."""
    turned_THK = _Rotate.apply(x_THK, cos_TK, sin_TK)
    assert isinstance(turned_THK, Tensor)
    return turned_THK


class LearnablePositions(nn.Module):
    """Sum of three learnt tables, normalised to unit root mean square (Cosmos)."""

    def __init__(self, model: Any, config: TransformerConfig):
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

    def forward(self, position_T3: Tensor, fps_T: Tensor) -> Tensor:
        """Embedding [T, D], float32; `fps_T` undoes the time scale of the rotary positions."""
        pace_T = torch.where(fps_T.isnan(), 1.0, fps_T / self.base_fps)
        frame_T = (position_T3[:, 0] * pace_T).round().long()
        row_T, column_T = position_T3[:, 1].long(), position_T3[:, 2].long()
        tables = (self.pos_emb_t, frame_T), (self.pos_emb_h, row_T), (self.pos_emb_w, column_T)
        sum_TD = torch.stack([table[index].float() for table, index in tables]).sum(0)
        norm_T1 = torch.linalg.vector_norm(sum_TD, dim=-1, keepdim=True)
        return sum_TD / (1e-6 + norm_T1 * sum_TD.shape[-1] ** -0.5)
