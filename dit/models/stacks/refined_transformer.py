"""Networks with separate refiners of latents and of text, then joint layers (Lumina, Z-Image)."""

# T packed tokens, M timesteps, C patch features, A axes of positions, L text tokens, E text width
# X width of the timestep embedding

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import pad

from dit.batch import PackedBatch
from dit.models.layer_spec import (
    JOINT_TOKENS,
    LEVEL_WAVES,
    TEXT_TOKENS,
    TOKENS,
    PerBlockModulation,
    StackSpec,
)
from dit.models.layers.adaptable import sees_part_of_tokens
from dit.models.layers.modulation import PerBlockAdaLN, TwoLinears, sinusoid
from dit.models.layers.parallel_linear import BuildContext, Replicated, transformer_config
from dit.models.layers.queries_and_keys import RotaryTable
from dit.models.stacks.joint_transformer import T_EMB, JointLayout, TextFirstTransformer
from dit.models.stacks.stacked_transformer import Blocks, Shapes
from dit.pack_wire import to_device


class RefinedTransformer(TextFirstTransformer):
    """Base of networks with refiners of latents and of text, then joint layers.

    They predict the velocity of each noisy token. If `model.attended_multiple` is above 1, the text
    and the latents of each sample are padded with learned tokens. Learned text tokens have the
    positions after the caption, learned latent tokens position 0.
    """

    theta: ClassVar[float]
    """Base of the rotary frequencies."""
    told_divisor: ClassVar[float]
    """Divisor of timesteps, which are in [0, 1000], before their sinusoidal embedding."""
    wave_scale: ClassVar[float] = 1.0
    """Factor of the angles of the timestep's sinusoidal embedding."""
    rounds_angles: ClassVar[bool] = False
    """Whether rotary angles are rounded to float32 before their cosines are computed."""

    def __init__(
        self,
        model: Any,
        groups: ProcessGroupCollection,
        vp_stage: int | None,
        stacks: Sequence[StackSpec],
        *,
        told: tuple[int, int],
    ):
        """Builds the network with these `stacks`.

        `told` has the output widths of the two linears of the timestep embedding.
        """
        config, width = transformer_config(model), model.hidden_size
        super().__init__(config, model, groups, vp_stage, stacks)
        axes, norm = model.rope_axes, next(stacks[-1].layer.ports).norm
        assert norm is not None
        self.told_width = told[1]
        # Angles in float64, as in Diffusers.
        thetas = (self.theta,) * len(axes)
        options: Any = {"dtype": torch.float64, "rounded": self.rounds_angles}
        self.rotary = RotaryTable(axes, thetas, **options)
        biased: Any = {"config": config, "bias": True}
        if self.pre_process:
            inputs, text = model.patch_features, model.crossattn_emb_size
            self.patches = Replicated(inputs, width, **biased, token_row=TOKENS)
            self.text_norm = nn.RMSNorm(text, eps=norm.eps, dtype=config.params_dtype)
            sees_part_of_tokens(self.text_norm, config)
            self.text_embedder = Replicated(text, width, **biased, token_row=TEXT_TOKENS)
            self.told = TwoLinears(LEVEL_WAVES, config, widths=told)
            if model.attended_multiple > 1:
                self.padding, self.text_padding = PadToken(width, config), PadToken(width, config)
        self.build_stacks()
        self.build_head(JOINT_TOKENS, modulate_out=self._scale_out)

    def _scale_out(self, context: BuildContext) -> nn.Module:
        spec, width = PerBlockModulation(inputs=self.told_width), self.model.hidden_size
        return PerBlockAdaLN(context, width, spec, parts=1, gated=False, shifted=False)

    def text_lengths(self, batch: PackedBatch) -> list[int]:
        multiple = self.model.attended_multiple
        return [-(-rows // multiple) * multiple for rows in batch.text_rows]

    def condition_shapes(self, batch: PackedBatch) -> Shapes:
        return {T_EMB: (batch.num_levels, self.told_width)}

    def embed(
        self, x_TC: Tensor, level_M: Tensor, batch: PackedBatch, layout: JointLayout
    ) -> Blocks:
        dtype = self.config.params_dtype
        text_LE, is_caption_L = self._filled_text(batch)
        text_LE = self.my_tokens(layout.text.of(text_LE.to(dtype)))
        wave_MX = sinusoid(level_M / self.told_divisor, LEVEL_WAVES, scale=self.wave_scale)
        h_TD = self.embedded_patches(self.my_tokens(x_TC.to(dtype)), batch)
        text_LD = self.text_embedder(self.text_norm(text_LE))
        if self.model.attended_multiple > 1:
            h_TD = self.padding(h_TD, self.my_tokens(batch.is_real_T))
            text_LD = self.text_padding(text_LD, self.my_tokens(layout.text.of(is_caption_L)))
        return {TOKENS: h_TD, TEXT_TOKENS: text_LD, T_EMB: self.told(wave_MX.to(dtype))}

    def embedded_patches(self, x_TC: Tensor, batch: PackedBatch) -> Tensor:  # noqa: ARG002
        """The embeddings [T, D] of the patches `x_TC` of this tensor rank."""
        return self.patches(x_TC)

    def _filled_text(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """(captions [L, E], padded to `text_lengths`; mask [L], False for padding)."""
        text_LE, lengths = batch.text_LE, self.text_lengths(batch)
        starts, device = pairwise(batch.text_starts), text_LE.device
        source_L = torch.full((sum(lengths),), len(text_LE))
        at = 0
        for (first, stop), length in zip(starts, lengths, strict=True):
            source_L[at : at + stop - first] = torch.arange(first, stop)
            at += length
        source_L = to_device(source_L, device)
        return pad(text_LE, (0, 0, 0, 1)).index_select(0, source_L), source_L < len(text_LE)


class PadToken(nn.Module):
    """The learned token with which the text, or the latents, of samples are padded."""

    def __init__(self, width: int, config: TransformerConfig):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, width, dtype=config.params_dtype))
        sees_part_of_tokens(self, config)

    def forward(self, h_TD: Tensor, is_own_T: Tensor) -> Tensor:
        return torch.where(is_own_T[:, None], h_TD, self.token)
