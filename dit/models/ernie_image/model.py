"""ERNIE-Image: layers over concatenated latents and text, which all share one modulation."""
# T packed tokens, M timesteps, C patch features, D model width

from __future__ import annotations

from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from dit.batch import PackedBatch
from dit.models.ernie_image.family import (
    ALL_VECTORS,
    FIRST_OF_HEAD,
    THETA,
    VECTORS,
    ErnieImageConfig,
    ernie_image_stack,
)
from dit.models.layer_spec import JOINT_TOKENS, TEXT_TOKENS, TOKENS
from dit.models.layers.modulation import PrecomputedAdaLN, SharedModulations, TwoLinears, sinusoid
from dit.models.layers.parallel_linear import BuildContext, Replicated, transformer_config
from dit.models.layers.queries_and_keys import RotaryTable
from dit.models.stacks.joint_transformer import T_EMB, JointLayout, TextFirstTransformer
from dit.models.stacks.stacked_transformer import Blocks, Shapes


class ErnieImageNetwork(TextFirstTransformer):
    """Denoiser of ERNIE-Image: predicts the velocity of each noisy token of a pack.

    The arithmetic is that of Diffusers' `ErnieImageTransformer2DModel`. The first pipeline stage
    computes all modulation vectors, 8 per sample, and sends them with the hidden states.
    """

    def __init__(
        self, model: ErnieImageConfig, groups: ProcessGroupCollection, vp_stage: int | None = None
    ):
        config, width = transformer_config(model), model.hidden_size
        super().__init__(config, model, groups, vp_stage, (ernie_image_stack(model),))
        self.rotary = RotaryTable(model.rope_axes, (THETA,) * 3, twisted=True)
        if self.pre_process:
            made: Any = {"config": config}
            self.patches = Replicated(
                model.patch_features, width, bias=True, token_row=TOKENS, **made
            )
            self.text_embedder = (
                Replicated(model.crossattn_emb_size, width, token_row=TEXT_TOKENS, **made)
                if model.projects_text
                else nn.Identity()
            )
            self.told = TwoLinears(width, config)
            context = BuildContext(model=model, config=config, groups=groups)
            self.modulations = SharedModulations(context, width, VECTORS, bias=True, plain=("out",))
        self.build_stacks()
        self.build_head(
            JOINT_TOKENS,
            modulate_out=lambda context: PrecomputedAdaLN(
                context.config, first=FIRST_OF_HEAD, gated=False
            ),
        )

    def condition_shapes(self, batch: PackedBatch) -> Shapes:
        return {T_EMB: (batch.num_levels, ALL_VECTORS * self.config.hidden_size)}

    def embed(
        self, x_TC: Tensor, level_M: Tensor, batch: PackedBatch, layout: JointLayout
    ) -> Blocks:
        dtype, width = self.config.params_dtype, self.config.hidden_size
        text_LE = self.my_tokens(layout.text.of(batch.text_LE.to(dtype)))
        told_MD = self.told(sinusoid(level_M, width).to(dtype))
        return {
            TOKENS: self.patches(self.my_tokens(x_TC.to(dtype))),
            TEXT_TOKENS: self.text_embedder(text_LE),
            T_EMB: self.modulations(told_MD),
        }
