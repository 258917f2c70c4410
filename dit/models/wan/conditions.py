"""What Wan is told beside noisy latents: the noise level, text, pictures, which frames are given.

The arithmetic is that of `WanTimeTextImageEmbedding` and of `WanImageToVideoPipeline` in Diffusers.
"""

# T packed tokens, M level rows, D model width, L text rows, E text width, I rows of images
# S rows of the images of one sample

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, silu

from dit.batch import PackedBatch
from dit.models.layers.modulation import sinusoid
from dit.models.layers.parallel_linear import Replicated, WholeLinear, dtype
from dit.models.wan.config import MASK_CHANNELS, ImageCondition, WanConfig
from dit.pack_wire import to_device


class LevelEmbedding(nn.Module):
    """Level [M] -> its embedding [M, D] and the rows [M, 6 D] that all layers share."""

    def __init__(self, model: WanConfig, config: TransformerConfig):
        super().__init__()
        width = model.hidden_size
        # In float32, as in Diffusers: bfloat16 cannot tell levels of 1000 t apart.
        self.linear_1 = Float32Linear(model.freq_dim, width, config=config, bias=True)
        self.linear_2 = Float32Linear(width, width, config=config, bias=True)
        self.linear_out = Replicated(width, 6 * width, config=config, bias=True)

    def forward(self, level_M: Tensor) -> tuple[Tensor, Tensor]:
        wave_MX = sinusoid(level_M, self.linear_1.in_features)
        t_emb_MD = self.linear_2(silu(self.linear_1(wave_MX))).to(self.linear_out.weight.dtype)
        return t_emb_MD, self.linear_out(silu(t_emb_MD))


class Float32Linear(Replicated):
    """A product in float32 whatever the type of the weights."""

    def product(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.float(), self.bias.float())


class TextEmbedding(nn.Module):
    """Rows of the text encoder [L, E], padding too -> [L, D].

    Every tensor rank has all rows and the whole gradient of them, so that the weights have no mark
    for sequence parallelism.
    """

    def __init__(self, model: WanConfig):
        super().__init__()
        width = model.hidden_size
        self.linear_1 = WholeLinear(model.crossattn_emb_size, width, dtype=dtype(model))
        self.linear_2 = WholeLinear(width, width, dtype=dtype(model))

    def forward(self, text_LE: Tensor) -> Tensor:
        return self.linear_2(gelu(self.linear_1(text_LE), approximate="tanh"))


class ImageEmbedding(nn.Module):
    """Rows of the image encoder [I, E] -> [I, D]; marked as those of text are not, either."""

    def __init__(self, model: WanConfig):
        super().__init__()
        inputs, made, rows = model.image_embed_size, dtype(model), model.image_embed_length
        assert inputs is not None
        self.norm_in = nn.LayerNorm(inputs, eps=1e-5, dtype=made)
        self.linear_1 = WholeLinear(inputs, inputs, dtype=made)
        self.linear_2 = WholeLinear(inputs, model.hidden_size, dtype=made)
        self.norm_out = nn.LayerNorm(model.hidden_size, eps=1e-5, dtype=made)
        self.positions = None
        if model.image_embed_positions:
            self.positions = nn.Parameter(torch.zeros(rows, inputs, dtype=made))

    def forward(self, image_IE: Tensor) -> Tensor:
        if self.positions is not None:
            rows = self.positions.shape[0]
            image_IE = (image_IE.unflatten(0, (-1, rows)) + self.positions).flatten(0, 1)
        return self.norm_out(self.linear_2(gelu(self.linear_1(self.norm_in(image_IE)))))


def given_mask(batch: PackedBatch, model: WanConfig) -> Tensor:
    """Which pixel frames are given [T, mask channels * patch volume], in order (c, t, h, w).

    Channel k of latent frame j is pixel frame 4 j - 3 + k. The first latent frame is one pixel
    frame, which all of its channels say. Source: `prepare_latents` of `WanImageToVideoPipeline`.
    """
    frames, cells = model.patch_temporal, model.patch_spatial**2
    inner = torch.arange(frames, device=batch.position_TA.device)
    frame_Tt = batch.position_TA[:, :1].long() * frames + inner
    given_Tct = (frame_Tt == 0)[:, None].repeat(1, MASK_CHANNELS, 1)
    if model.image_condition is ImageCondition.FIRST_AND_LAST_FRAME:
        last = [grid[0] * frames - 1 for grid in batch.grids]
        last_N = to_device(torch.tensor(last), frame_Tt.device)
        given_Tct[:, -1] |= frame_Tt == last_N[batch.segment_T, None]
    return given_Tct[..., None].expand(-1, -1, -1, cells).flatten(1)
