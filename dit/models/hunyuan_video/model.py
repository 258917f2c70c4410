"""HunyuanVideo: a token refiner for captions, double-stream layers, then single-stream ones."""
# T packed tokens, M timesteps, N samples, C patch features, D model width, L text tokens
# P width of the pooled text

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from dit.batch import PackedBatch
from dit.models.family import POOLED
from dit.models.hunyuan_video.family import HunyuanVideoConfig
from dit.models.joint.family import double_then_single
from dit.models.layer_spec import JOINT_TOKENS, TEXT_TOKENS, TOKENS
from dit.models.layers.modulation import ConditionEmbedding
from dit.models.layers.parallel_linear import Replicated, transformer_config
from dit.models.layers.queries_and_keys import RotaryTable
from dit.models.layers.token_refiner import TokenRefiner
from dit.models.stacks.joint_transformer import T_EMB, JointLayout, JointTransformer
from dit.models.stacks.stacked_transformer import Blocks


class HunyuanVideoNetwork(JointTransformer):
    """Denoiser of HunyuanVideo: predicts the velocity of each noisy token of a pack.

    The arithmetic is that of Diffusers' `HunyuanVideoTransformer3DModel`. If a clean first frame
    replaces the noisy one, its tokens have timestep 0 in all layers and in the last norm. In
    Diffusers' last norm they have the sample's timestep; this makes no difference, because outputs
    of given frames are not used.
    """

    def __init__(
        self,
        model: HunyuanVideoConfig,
        groups: ProcessGroupCollection,
        vp_stage: int | None = None,
    ):
        config, width = transformer_config(model), model.hidden_size
        super().__init__(config, model, groups, vp_stage, double_then_single(model))
        self.rotary = RotaryTable(model.rope_axes, (256.0,) * 3)
        biased: Any = {"config": config, "bias": True}
        if self.pre_process:
            self.patches = Replicated(model.input_features, width, **biased, token_row=TOKENS)
            self.refiner = TokenRefiner(model)
            self.told = ConditionEmbedding(
                config, pooled=model.pooled_size, guidance=model.guidance_embed
            )
        self.build_stacks()
        self.build_head(JOINT_TOKENS)

    def embed(
        self, x_TC: Tensor, level_M: Tensor, batch: PackedBatch, layout: JointLayout
    ) -> Blocks:
        dtype, level_N = self.config.params_dtype, level_M[: batch.num_samples]
        x_TC, pooled_NP = x_TC.to(dtype), batch.vectors[POOLED].to(dtype)
        if batch.condition_TC is not None:
            x_TC = torch.cat((x_TC, batch.condition_TC.to(dtype)), dim=1)
        text_LD = self.refiner(level_N, batch.text_LE.to(dtype), batch.text_starts)
        return {
            TOKENS: self.patches(self.my_tokens(x_TC)),
            TEXT_TOKENS: self.my_tokens(layout.text.of(text_LD)),
            T_EMB: self.told(level_M, pooled_NP, batch.guidance),
        }
