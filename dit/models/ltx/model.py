"""LTX-Video: self-attention, cross-attention to text, table modulation after RMSNorm."""
# T packed tokens, M timesteps, C patch features, D model width, X any width

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.nn.functional import silu

from dit.batch import PackedBatch
from dit.models.layer_spec import LEVEL_WAVES, TOKENS
from dit.models.layers.modulation import TableAdaLN, TimestepConditioning, TwoLinears, sinusoid
from dit.models.layers.parallel_linear import Replicated, transformer_config
from dit.models.layers.per_sample import PerSample
from dit.models.layers.queries_and_keys import WholeWidthRotary
from dit.models.ltx.family import LtxConfig, ltx_stack
from dit.models.stacks.cross_transformer import CrossTransformer, TextEmbedding
from dit.models.stacks.parts import LayerConditions
from dit.models.stacks.stacked_transformer import Blocks, Shapes


class LtxNetwork(CrossTransformer):
    """Denoiser of LTX-Video: predicts the velocity of each noisy token of a pack.

    The arithmetic is that of Diffusers' `LTXVideoTransformer3DModel`.
    """

    def __init__(
        self, model: LtxConfig, groups: ProcessGroupCollection, vp_stage: int | None = None
    ):
        config = transformer_config(model)
        super().__init__(config, model, groups, vp_stage, [ltx_stack(model)])
        width = model.hidden_size
        self.rotary = WholeWidthRotary(width, model.num_attention_heads, groups.tp)
        of_tokens: Any = {"config": config, "token_row": TOKENS}
        if self.pre_process:
            self.patches = Replicated(model.patch_features, width, **of_tokens, bias=True)
            self.level = TwoLinears(LEVEL_WAVES, config)
            self.shared = Replicated(width, 6 * width, config=config, bias=True)
            self.text_embedder = TextEmbedding(model)
        self.build_stacks()
        if self.post_process:
            self.modulate_out = TableAdaLN(config, width, parts=1, gated=False)
            self.proj_out = Replicated(width, model.output_features, **of_tokens, bias=True)

    def condition_shapes(self, batch: PackedBatch) -> Shapes:
        width, levels, text = self.config.hidden_size, batch.num_levels, batch.text_starts[-1]
        return {"t_emb": (levels, width), "shared": (levels, 6 * width), "text": (text, width)}

    def layout(self, batch: PackedBatch) -> PerSample:
        return replace(super().layout(batch), rms=True)

    def embed(
        self,
        x_TC: Tensor,
        level_M: Tensor,
        batch: PackedBatch,
        layout: PerSample,  # noqa: ARG002
    ) -> Blocks:
        dtype = self.config.params_dtype
        t_emb_MD = self.level(sinusoid(level_M, LEVEL_WAVES).to(dtype))
        return {
            "hidden": self.patches(self.my_tokens(x_TC.to(dtype))),
            "t_emb": t_emb_MD,
            "shared": self.shared(silu(t_emb_MD)),
            "text": self.text_embedder(batch.text_LE.to(dtype)),
        }

    def conditions(self, blocks: Blocks, batch: PackedBatch, layout: PerSample) -> LayerConditions:
        timestep = TimestepConditioning(t_emb_ND=blocks["t_emb"], adaln_shift_NX=blocks["shared"])
        return self.cross_conditions(batch, layout, timestep=timestep, text_LD=blocks["text"])

    def head(self, blocks: Blocks, batch: PackedBatch, layout: PerSample) -> Tensor:  # noqa: ARG002
        (adaln,) = self.modulate_out.of_embedding(blocks["t_emb"])
        # The last norm is a LayerNorm.
        x_TD = adaln.modulate(blocks["hidden"], replace(layout, rms=False))
        return self.all_tokens(self.proj_out(x_TD))
