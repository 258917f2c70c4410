"""A plain network with the arithmetic of OmniGen2's public code, of Diffusers' layers of Lumina 2.

Diffusers has no class of it. `tests/golden/omnigen2.safetensors` holds what the public code itself
makes of the same random weights, and a test compares.
"""

# B pictures, C channels, H rows, W columns, L text tokens, E text width, D model width, P places

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.loaders.peft import PeftAdapterMixin
from diffusers.models.modeling_utils import ModelMixin
from diffusers.models.normalization import LuminaLayerNormContinuous
from diffusers.models.transformers.transformer_lumina2 import (
    Lumina2CombinedTimestepCaptionEmbedding,
    Lumina2TransformerBlock,
)
from torch import Tensor, nn

MOST = 5
Angles = Sequence[Tensor]


class OmniGen2Transformer2DModel(ModelMixin, ConfigMixin, PeftAdapterMixin):
    """It takes samples one by one, as the public code's class does in a list of one."""

    @register_to_config
    def __init__(  # noqa: PLR0913  # the keys of config.json
        self,
        patch_size: int = 2,
        in_channels: int = 16,
        out_channels: int | None = None,
        hidden_size: int = 2304,
        num_layers: int = 26,
        num_refiner_layers: int = 2,
        num_attention_heads: int = 24,
        num_kv_heads: int = 8,
        multiple_of: int = 256,
        ffn_dim_multiplier: float | None = None,
        norm_eps: float = 1e-5,
        axes_dim_rope: tuple[int, int, int] = (32, 32, 32),
        axes_lens: tuple[int, int, int] = (300, 512, 512),
        text_feat_dim: int = 1024,
        timestep_scale: float = 1.0,
    ):
        super().__init__()
        width, token = hidden_size, patch_size**2 * in_channels
        self.image_index_embedding = nn.Parameter(torch.empty(MOST, width))
        self.x_embedder, self.ref_image_patch_embedder = (nn.Linear(token, width) for _ in range(2))
        told: Any = Lumina2CombinedTimestepCaptionEmbedding(width, text_feat_dim, norm_eps=norm_eps)
        self.time_caption_embed = told
        told.time_proj.scale = timestep_scale

        def layers(count: int, *, modulation: bool = True) -> nn.ModuleList:
            sizes = (width, num_attention_heads, num_kv_heads, multiple_of)
            more: Any = (ffn_dim_multiplier, norm_eps, modulation)
            return nn.ModuleList(Lumina2TransformerBlock(*sizes, *more) for _ in range(count))

        self.noise_refiner, self.ref_image_refiner = (layers(num_refiner_layers) for _ in range(2))
        self.context_refiner = layers(num_refiner_layers, modulation=False)
        self.layers = layers(num_layers)
        self.norm_out = LuminaLayerNormContinuous(
            width, min(width, 1024), elementwise_affine=False, eps=1e-6, out_dim=token
        )

    def forward(
        self,
        hidden_states: Sequence[Tensor],
        timestep: Tensor,
        text_hidden_states: Tensor,
        freqs_cis: Angles,
        text_attention_mask: Tensor,
        ref_image_hidden_states: Any = None,
    ) -> list[Tensor]:
        """[C, H, W] of a sample, in a list; the tables of angles are [P, width / 2], complex."""
        (latent_CHW,) = hidden_states
        references = ref_image_hidden_states[0] if ref_image_hidden_states else ()
        assert text_attention_mask.all()
        places = _places(text_hidden_states.shape[1], [self._grid(x) for x in references])
        told, text = self.time_caption_embed(
            hidden_states=latent_CHW, timestep=timestep, encoder_hidden_states=text_hidden_states
        )
        words = torch.arange(text.shape[1])[:, None].expand(-1, 3)
        row, angles = [text], [_turned(words, freqs_cis)]
        for layer in self.context_refiner:
            row[0] = layer(row[0], None, angles[0])
        embedders = [self.ref_image_patch_embedder] * len(references) + [self.x_embedder]
        refiners = [self.ref_image_refiner] * len(references) + [self.noise_refiner]
        for number, picture in enumerate((*references, latent_CHW)):
            h = embedders[number](self._tokens(picture))[None]
            if number < len(references):
                h = h + self.image_index_embedding[number]
            ends = (torch.arange(side) for side in self._grid(picture))
            at = torch.cartesian_prod(torch.tensor([places[number]]), *ends)
            angles.append(_turned(at, freqs_cis))
            for layer in refiners[number]:
                h = layer(h, None, angles[-1], told)
            row.append(h)
        joint, whole = torch.cat(row, dim=1), torch.cat(angles, dim=1)
        for layer in self.layers:
            joint = layer(joint, None, whole, told)
        made = self.norm_out(joint, told)[0, -row[-1].shape[1] :]
        return [self._picture(made, self._grid(latent_CHW))]

    def _grid(self, picture: Tensor) -> tuple[int, int]:
        p = self.config["patch_size"]
        return picture.shape[1] // p, picture.shape[2] // p

    def _tokens(self, picture: Tensor) -> Tensor:
        """Rows of (row, column, channel) in a patch."""
        p = self.config["patch_size"]
        cut = picture.unflatten(2, (-1, p)).unflatten(1, (-1, p))  # c h p w q
        return cut.permute(1, 3, 2, 4, 0).flatten(2).flatten(0, 1)

    def _picture(self, rows: Tensor, grid: tuple[int, int]) -> Tensor:
        p = self.config["patch_size"]
        cut = rows.view(*grid, p, p, -1)  # h w p q c
        return cut.permute(4, 0, 2, 1, 3).flatten(3).flatten(1, 2)


def _places(words: int, grids: Sequence[tuple[int, int]]) -> list[int]:
    """Of each reference, and of the target behind them."""
    places = [words]
    for grid in grids:
        places.append(places[-1] + max(grid))
    return places


def _turned(at: Tensor, tables: Angles) -> Tensor:
    """Complex numbers [1, tokens, width / 2] of places on three axes."""
    return torch.cat([table[at[:, axis]] for axis, table in enumerate(tables)], dim=-1)[None]
