"""HunyuanImage 2.1: double-stream layers, then single-stream ones, over latents and text."""

# T latent tokens, L text tokens, M timesteps, N samples, C patch features, D model width
# G tokens of quoted words, E width of an encoder

from __future__ import annotations

from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from dit.batch import TEXT, PackedBatch, StepEnd
from dit.models.hunyuan_image.family import HunyuanImageConfig
from dit.models.joint.family import GLYPHS, double_then_single
from dit.models.layer_spec import JOINT_TOKENS, TEXT_TOKENS, TOKENS
from dit.models.layers.modulation import ConditionEmbedding
from dit.models.layers.parallel_linear import Replicated, transformer_config
from dit.models.layers.queries_and_keys import RotaryTable
from dit.models.layers.token_refiner import GlyphEmbedding, TokenRefiner, by_sample
from dit.models.stacks.joint_transformer import T_EMB, JointLayout, JointTransformer
from dit.models.stacks.stacked_transformer import Blocks


class HunyuanImageNetwork(JointTransformer):
    """Denoiser of HunyuanImage 2.1: predicts the velocity of each noisy token of a pack.

    The arithmetic is that of Diffusers' `HunyuanImageTransformer2DModel`.
    """

    def __init__(
        self, model: HunyuanImageConfig, groups: ProcessGroupCollection, vp_stage: int | None = None
    ):
        config, width = transformer_config(model), model.hidden_size
        super().__init__(config, model, groups, vp_stage, double_then_single(model))
        # No numbers of a head are rotated by the frame, the first axis of a position.
        self.rotary = RotaryTable((0, *model.rope_axes), (256.0,) * 3)
        biased: Any = {"config": config, "bias": True}
        if self.pre_process:
            self.patches = Replicated(model.patch_features, width, **biased, token_row=TOKENS)
            self.told = ConditionEmbedding(
                config, guidance=model.guidance_embed, step_end=model.use_meanflow
            )
            self.refiner = TokenRefiner(model)
            self.glyphs = GlyphEmbedding(model)
        self.build_stacks()
        self.build_head(JOINT_TOKENS)

    def embed(
        self, x_TC: Tensor, level_M: Tensor, batch: PackedBatch, layout: JointLayout
    ) -> Blocks:
        dtype, starts = self.config.params_dtype, [batch.text_offsets[n] for n in (TEXT, GLYPHS)]
        text_LE, glyph_GE = (batch.texts[name].to(dtype) for name in (TEXT, GLYPHS))
        refined_LD = self.refiner(level_M[: batch.num_samples], text_LE, starts[0])
        text_LD = by_sample((refined_LD, self.glyphs(glyph_GE)), starts)
        end = batch.method(StepEnd)
        end_N = None if end is None else end.level_N
        return {
            TOKENS: self.patches(self.my_tokens(x_TC.to(dtype))),
            TEXT_TOKENS: self.my_tokens(layout.text.of(text_LD)),
            T_EMB: self.told(level_M, guidance=batch.guidance, step_end_N=end_N),
        }
