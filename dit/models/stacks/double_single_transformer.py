"""Networks of double-stream layers, then single-stream layers, with one text input.

FLUX.1, FLUX.2 and Chroma are such networks, with different modulations. A family may have separate
layers of text and pictures instead of double-stream layers.
"""

# T packed tokens, M timesteps, C patch features, D model width, L text tokens, E text width
# X width of the timestep embedding

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from dit.batch import PackedBatch
from dit.models.layer_spec import JOINT_TOKENS, TEXT_TOKENS, TOKENS, StackSpec
from dit.models.layers.parallel_linear import BuildContext, Replicated, transformer_config
from dit.models.layers.queries_and_keys import RotaryTable
from dit.models.stacks.joint_transformer import T_EMB, JointLayout, JointTransformer
from dit.models.stacks.stacked_transformer import Blocks


class DoubleSingleTransformer(JointTransformer):
    """Base of networks with double-stream, then single-stream layers.

    They predict the velocity of each noisy token. The module `told` embeds the timestep and the
    other conditions of a family, such as the guidance scale.
    """

    theta: ClassVar[float] = 10_000.0
    """Base of the rotary frequencies."""
    has_biases: ClassVar[bool] = True
    """Whether the linears of patches, text and head have biases."""

    def __init__(
        self,
        model: Any,
        groups: ProcessGroupCollection,
        vp_stage: int | None,
        stacks: Sequence[StackSpec],
        *,
        told: Callable[[TransformerConfig], nn.Module],
        modulate_out: Callable[[BuildContext], nn.Module] | None = None,
    ):
        """Builds the network with these `stacks`.

        `told` builds the timestep embedding, `modulate_out` the modulation before the head; None: a
        linear of the timestep embedding.
        """
        config, width = transformer_config(model), model.hidden_size
        super().__init__(config, model, groups, vp_stage, stacks)
        # Angles in float64, as in Diffusers.
        axes = model.rope_axes
        self.rotary = RotaryTable(axes, (self.theta,) * len(axes), dtype=torch.float64)
        biased: Any = {"config": config, "bias": self.has_biases}
        if self.pre_process:
            inputs, text = model.patch_features, model.crossattn_emb_size
            self.patches = Replicated(inputs, width, **biased, token_row=TOKENS)
            self.text_embedder = Replicated(text, width, **biased, token_row=TEXT_TOKENS)
            self.told = told(config)
        self.build_stacks()
        self.build_head(JOINT_TOKENS, modulate_out=modulate_out, bias=self.has_biases)

    def t_emb(self, level_M: Tensor, batch: PackedBatch) -> Tensor:
        """The embedding [M, X] of the timesteps `level_M`, from which modulations are computed."""
        raise NotImplementedError

    def embedded_patches(self, x_TC: Tensor, batch: PackedBatch) -> Tensor:  # noqa: ARG002
        """The embeddings [T, D] of the patches `x_TC` of this tensor rank."""
        return self.patches(x_TC)

    def embed(
        self, x_TC: Tensor, level_M: Tensor, batch: PackedBatch, layout: JointLayout
    ) -> Blocks:
        dtype = self.config.params_dtype
        text_LE = self.my_tokens(layout.text.of(batch.text_LE.to(dtype)))
        return {
            TOKENS: self.embedded_patches(self.my_tokens(x_TC.to(dtype)), batch),
            TEXT_TOKENS: self.text_embedder(text_LE),
            T_EMB: self.t_emb(level_M, batch),
        }
