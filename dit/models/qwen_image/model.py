"""Qwen-Image: double-stream layers, in which latents and text attend to each other."""
# T latent tokens, L text tokens, M timesteps, N samples, C patch features, D model width
# E text width, A axes of a position, X width of a sinusoidal embedding

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from dit.batch import Grid, PackedBatch
from dit.models.layer_spec import LEVEL_WAVES, TEXT_TOKENS, TOKENS
from dit.models.layers.adaptable import sees_part_of_tokens
from dit.models.layers.modulation import sinusoid
from dit.models.layers.parallel_linear import Replicated, transformer_config
from dit.models.layers.queries_and_keys import RotaryTable
from dit.models.qwen_image.family import SCALE, QwenImageConfig, qwen_image_stack
from dit.models.stacks.joint_transformer import T_EMB, JointLayout, JointTransformer
from dit.models.stacks.stacked_transformer import Blocks
from dit.pack_wire import to_device


class QwenImageNetwork(JointTransformer):
    """Denoiser of Qwen-Image: predicts the velocity of each noisy token of a pack.

    The arithmetic is that of Diffusers' `QwenImageTransformer2DModel`.
    """

    def __init__(
        self, model: QwenImageConfig, groups: ProcessGroupCollection, vp_stage: int | None = None
    ):
        config, width = transformer_config(model), model.hidden_size
        super().__init__(config, model, groups, vp_stage, [qwen_image_stack(model)])
        self.rotary = RotaryTable(model.rope_axes, (10_000.0,) * 3)
        of_tokens: Any = {"config": config, "token_row": TOKENS, "bias": True}
        if self.pre_process:
            of_levels: Any = {"config": config, "bias": True}
            self.patches = Replicated(model.patch_features, width, **of_tokens)
            self.level_in = Replicated(LEVEL_WAVES, width, **of_levels)
            self.level_out = Replicated(width, width, **of_levels)
            text = model.crossattn_emb_size
            self.text_norm = nn.RMSNorm(text, eps=1e-6, dtype=config.params_dtype)
            sees_part_of_tokens(self.text_norm, config)
            self.text_in = Replicated(text, width, **of_levels | {"token_row": TEXT_TOKENS})
        self.build_stacks()
        self.build_head(TOKENS)

    def text_positions(self, batch: PackedBatch) -> Tensor:
        pairs = zip(batch.grids, batch.references, strict=True)
        pictures = [(own, *others) for own, others in pairs]
        rows_LA = text_positions(self.text_lengths(batch), pictures)
        return to_device(rows_LA.contiguous(), batch.position_TA.device)

    def embed(
        self, x_TC: Tensor, level_M: Tensor, batch: PackedBatch, layout: JointLayout
    ) -> Blocks:
        dtype = self.config.params_dtype
        text_LE = self.my_tokens(layout.text.of(batch.text_LE.to(dtype)))
        # Rounded as in Diffusers: pipelines divide by 1000, and the embedding multiplies by it.
        wave_MX = sinusoid(level_M / SCALE, LEVEL_WAVES, scale=SCALE).to(dtype)
        return {
            "hidden": self.patches(self.my_tokens(x_TC.to(dtype))),
            "text_hidden": self.text_in(self.text_norm(text_LE)),
            T_EMB: self.level_out(nn.functional.silu(self.level_in(wave_MX))),
        }


def text_positions(lengths: Sequence[int], grids: Sequence[Sequence[Grid]]) -> Tensor:
    """The positions [L, 3], float32, of the text tokens of samples.

    `lengths` are the numbers of text tokens of the samples, `grids` the grids of their pictures. A
    token has the same position on all axes: its index in the text plus half of the longest side of
    the sample's pictures, in tokens.
    """
    rows = [
        torch.arange(length) + max(side // 2 for grid in pictures for side in grid[1:])
        for length, pictures in zip(lengths, grids, strict=True)
    ]
    return torch.cat(rows).float()[:, None].expand(-1, 3)
