"""FLUX.1: double-stream layers, then single-stream ones, over latents and text."""

# T packed tokens, M level rows, C patch features, D model width, L text tokens, E text width

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from dit.batch import PackedBatch
from dit.models.flux.config import FluxConfig
from dit.models.flux.family import POOLED
from dit.models.joint_family import double_then_single
from dit.models.layers.modulation import ConditionEmbedding, PerBlockAdaLN
from dit.models.layers.parallel_linear import BuildContext, Replicated, transformer_config
from dit.models.layers.queries_and_keys import RotaryTable
from dit.models.lora.dropout import TOKENS
from dit.models.stacks.joint_transformer import T_EMB, JointLayout, JointTransformer
from dit.models.stacks.stacked_transformer import Blocks
from dit.models.stacks.stream_layers import JOINT_TOKENS, TEXT_TOKENS


class FluxNetwork(JointTransformer):
    """Noisy tokens, noise level, text and reference pictures of a pack -> velocity of each token.

    The arithmetic is that of Diffusers' `FluxTransformer2DModel`.
    """

    def __init__(
        self, model: FluxConfig, groups: ProcessGroupCollection, vp_stage: int | None = None
    ):
        config, width = transformer_config(model), model.hidden_size
        super().__init__(config, model, groups, vp_stage, double_then_single(model))
        # Angles in float64, as in Diffusers.
        self.rotary = RotaryTable(model.rope_axes, (10_000.0,) * 3, dtype=torch.float64)
        biased: Any = {"config": config, "bias": True}
        if self.pre_process:
            inputs, text = model.patch_features, model.crossattn_emb_size
            self.patches = Replicated(inputs, width, **biased, token_row=TOKENS)
            self.text_embedder = Replicated(text, width, **biased, token_row=TEXT_TOKENS)
            self.told = ConditionEmbedding(
                config, pooled=model.pooled_size, guidance=model.guidance_embed
            )
        self.build_stacks()
        if self.post_process:
            context = BuildContext(model=model, config=config, groups=groups)
            self.modulate_out = PerBlockAdaLN(context, width, bias=True, parts=1, gated=False)
            outputs = model.output_features
            self.proj_out = Replicated(width, outputs, **biased, token_row=JOINT_TOKENS)

    def embed(
        self, x_TC: Tensor, level_M: Tensor, batch: PackedBatch, layout: JointLayout
    ) -> Blocks:
        dtype = self.config.params_dtype
        text_LE = self.my_tokens(layout.text.of(batch.text_LE.to(dtype)))
        pooled_NP = batch.vectors[POOLED].to(dtype)
        return {
            TOKENS: self.patches(self.my_tokens(x_TC.to(dtype))),
            TEXT_TOKENS: self.text_embedder(text_LE),
            T_EMB: self.told(level_M, pooled_NP, batch.guidance),
        }

    def head(self, blocks: Blocks, batch: PackedBatch, layout: JointLayout) -> Tensor:  # noqa: ARG002
        return self.outputs(blocks, layout, modulation=self.modulate_out, linear=self.proj_out)
