"""HunyuanVideo 1.5: double-stream layers of latents and of text from three encoders."""
# T latent tokens, L text tokens, M timesteps, N samples, C patch features, D model width
# G tokens of quoted words, I tokens of pictures, E width of an encoder
# X width of a sinusoidal embedding

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn
from torch.nn.functional import gelu

from dit.batch import TEXT, PackedBatch, StepEnd
from dit.models.hunyuan_video_15.family import IMAGE, HunyuanVideo15Config, hunyuan_video_15_stack
from dit.models.joint.family import GLYPHS
from dit.models.layer_spec import LEVEL_WAVES, TOKENS
from dit.models.layers.modulation import sinusoid
from dit.models.layers.parallel_linear import Replicated, WholeLinear, dtype, transformer_config
from dit.models.layers.queries_and_keys import RotaryTable
from dit.models.layers.token_refiner import GlyphEmbedding, TokenRefiner, WholeTwoLinears, by_sample
from dit.models.stacks.joint_transformer import T_EMB, JointLayout, JointTransformer
from dit.models.stacks.stacked_transformer import Blocks


class HunyuanVideo15Network(JointTransformer):
    """Denoiser of HunyuanVideo 1.5: predicts the velocity of each noisy token of a pack.

    The arithmetic is that of Diffusers' `HunyuanVideo15Transformer3DModel`.
    """

    def __init__(
        self,
        model: HunyuanVideo15Config,
        groups: ProcessGroupCollection,
        vp_stage: int | None = None,
    ):
        config, width = transformer_config(model), model.hidden_size
        super().__init__(config, model, groups, vp_stage, [hunyuan_video_15_stack(model)])
        self.rotary = RotaryTable(model.rope_axes, (256.0,) * 3)
        of_tokens: Any = {"config": config, "token_row": TOKENS, "bias": True}
        if self.pre_process:
            self.patches = Replicated(model.input_features, width, **of_tokens)
            self.level_in = Replicated(LEVEL_WAVES, width, config=config, bias=True)
            self.level_out = Replicated(width, width, config=config, bias=True)
            told = WholeTwoLinears(LEVEL_WAVES, width, dtype=config.params_dtype)
            self.step_end = told if model.use_meanflow else None
            self.text = TextRows(model)
        self.build_stacks()
        self.build_head(TOKENS)

    def embed(
        self, x_TC: Tensor, level_M: Tensor, batch: PackedBatch, layout: JointLayout
    ) -> Blocks:
        dtype, names = self.config.params_dtype, (TEXT, GLYPHS, IMAGE)
        assert batch.condition_TC is not None
        x_TC = torch.cat((x_TC.to(dtype), batch.condition_TC.to(dtype)), dim=1)
        first, second, third = ((batch.texts[n].to(dtype), batch.text_offsets[n]) for n in names)
        rows, starts = zip(first, second, third, strict=True)
        text_LD = self.text(level_M[: batch.num_samples], rows, starts)
        wave_MX = sinusoid(level_M, LEVEL_WAVES).to(dtype)
        t_emb_MD = self.level_out(torch.nn.functional.silu(self.level_in(wave_MX)))
        if self.step_end is not None:
            end = batch.method(StepEnd)
            assert end is not None, "a mean-flow network needs the end of the step"
            t_emb_MD = t_emb_MD + self.step_end(sinusoid(end.level_N, LEVEL_WAVES).to(dtype))
        return {
            "hidden": self.patches(self.my_tokens(x_TC)),
            "text_hidden": self.my_tokens(layout.text.of(text_LD)),
            T_EMB: t_emb_MD,
        }


class PictureEmbedding(nn.Module):
    """Maps the image encoder's states [I, E] to text tokens [I, D].

    The arithmetic is that of Diffusers' `HunyuanVideo15ImageProjection`.
    """

    def __init__(self, model: HunyuanVideo15Config):
        super().__init__()
        made, inputs, width = dtype(model), model.image_embed_size, model.hidden_size
        self.norm_in = nn.LayerNorm(inputs, eps=1e-5, dtype=made)
        self.linear_1 = WholeLinear(inputs, inputs, dtype=made)
        self.linear_2 = WholeLinear(inputs, width, dtype=made)
        self.norm_out = nn.LayerNorm(width, eps=1e-5, dtype=made)

    def forward(self, image_IE: Tensor) -> Tensor:
        return self.norm_out(self.linear_2(gelu(self.linear_1(self.norm_in(image_IE)))))


class TextRows(nn.Module):
    """Embeds captions, quoted words and pictures as text tokens [L, D], ordered by sample.

    Captions, quoted words and pictures have a learned embedding each, which is added to their
    tokens. Every tensor rank computes all tokens, also with sequence parallelism, so each rank has
    the whole gradient of these weights, and gradients are not summed over ranks.
    """

    def __init__(self, model: HunyuanVideo15Config):
        super().__init__()
        self.refiner, self.glyphs = TokenRefiner(model), GlyphEmbedding(model)
        self.image = PictureEmbedding(model)
        self.kind = nn.Parameter(torch.zeros(3, model.hidden_size, dtype=dtype(model)))

    def forward(
        self,
        level_N: Tensor,
        rows: tuple[Tensor, Tensor, Tensor],
        starts: tuple[Sequence[int], Sequence[int], Sequence[int]],
    ) -> Tensor:
        """The text tokens [L, D] of all samples.

        `rows` are the encoders' states of captions, quoted words and pictures. `starts` has, for
        each of the three, the first row of each sample, then the number of rows.
        """
        text_LE, glyph_GE, image_IE = rows
        made = (
            self.refiner(level_N, text_LE, starts[0]),
            self.glyphs(glyph_GE),
            self.image(image_IE),
        )
        marked = [x + mark for x, mark in zip(made, self.kind, strict=True)]
        return by_sample(marked, starts)
