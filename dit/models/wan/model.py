"""Wan: one row of latents, cross-attention to text and image, table modulation."""

# T packed tokens, N samples, M level rows, C patch features, D model width, K head width
# L text tokens, E text width, I rows of images

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from dit.batch import PackedBatch
from dit.models.attention.spans import Spans
from dit.models.layers.adaptable import TOKENS
from dit.models.layers.modulation import TableAdaLN, TimestepConditioning
from dit.models.layers.packed_attention import AttendedRows, RowConditions
from dit.models.layers.parallel_linear import Replicated, transformer_config
from dit.models.layers.per_sample import PerSample
from dit.models.layers.queries_and_keys import RotaryTable
from dit.models.layers.text_padding import pad_text, padded_rows
from dit.models.stacks.cross_layer import CrossConditions
from dit.models.stacks.stacked_transformer import Blocks, Shapes, StackedTransformer
from dit.models.wan.conditions import ImageEmbedding, LevelEmbedding, TextEmbedding, given_mask
from dit.models.wan.config import WanConfig
from dit.models.wan.family import IMAGE, wan_stack


class WanNetwork(StackedTransformer):
    """Noisy tokens, noise level, text and pictures of a pack -> velocity of each token.

    The arithmetic is that of Diffusers' `WanTransformer3DModel`.
    """

    def __init__(
        self, model: WanConfig, groups: ProcessGroupCollection, vp_stage: int | None = None
    ):
        config = transformer_config(model)
        super().__init__(config, model, groups, vp_stage, [wan_stack(model)])
        width = model.hidden_size
        head = width // model.num_attention_heads
        spatial = head // 6 * 2
        widths = (head - 2 * spatial, spatial, spatial)
        # Angles in float64, as in Diffusers.
        self.rotary = RotaryTable(widths, (10_000.0,) * 3, dtype=torch.float64)
        self.image_embedder = None
        of_tokens: Any = {"config": config, "token_row": TOKENS}
        if self.pre_process:
            self.patches = Replicated(model.input_features, width, **of_tokens, bias=True)
            self.level = LevelEmbedding(model, config)
            self.text_embedder = TextEmbedding(model)
            if model.image_embed_size is not None:
                self.image_embedder = ImageEmbedding(model)
        self.build_stacks()
        if self.post_process:
            self.modulate_out = TableAdaLN(config, width, parts=1, gated=False)
            self.proj_out = Replicated(width, model.output_features, **of_tokens, bias=True)

    def prepared(self, batch: PackedBatch) -> PackedBatch:
        return pad_text(batch, self.model.text_pad_to)

    def condition_shapes(self, batch: PackedBatch) -> Shapes:
        width, levels = self.config.hidden_size, batch.num_levels
        text = padded_rows(batch, self.model.text_pad_to)
        shapes = {"t_emb": (levels, width), "shared": (levels, 6 * width), "text": (text, width)}
        if self.model.image_embed_size is not None:
            shapes["image"] = (batch.text_offsets[IMAGE][-1], width)
        return shapes

    def layout(self, batch: PackedBatch) -> PerSample:
        return self.per_sample(self.my_tokens(batch.level_row_T))

    def embed(
        self,
        x_TC: Tensor,
        level_M: Tensor,
        batch: PackedBatch,
        layout: PerSample,  # noqa: ARG002
    ) -> Blocks:
        dtype = self.config.params_dtype
        t_emb_MD, shared_MX = self.level(level_M)
        text_LD = self.text_embedder(batch.text_LE.to(dtype))
        blocks = {"t_emb": t_emb_MD, "shared": shared_MX, "text": text_LD}
        if self.image_embedder is not None:
            blocks["image"] = self.image_embedder(batch.texts[IMAGE].to(dtype))
        x_TC = self.my_tokens(self._with_condition(x_TC.to(dtype), batch))
        return blocks | {"hidden": self.patches(x_TC)}

    def _with_condition(self, x_TC: Tensor, batch: PackedBatch) -> Tensor:
        """Noisy channels, then the mask, then those of the condition."""
        if not self.model.condition_channels:
            return x_TC
        assert batch.condition_TC is not None
        mask_TC = given_mask(batch, self.model)
        return torch.cat((x_TC, mask_TC.to(x_TC), batch.condition_TC.to(x_TC)), dim=1)

    def conditions(self, blocks: Blocks, batch: PackedBatch, layout: PerSample) -> CrossConditions:
        angles_TK = self.rotary(batch.position_TA)
        image = None
        if "image" in blocks:
            spans = _spans(batch, batch.text_offsets[IMAGE])
            image = AttendedRows(rows_LE=blocks["image"], spans=spans)
        return CrossConditions(
            timestep=TimestepConditioning(
                t_emb_ND=blocks["t_emb"], adaln_shift_NX=blocks["shared"]
            ),
            tokens=RowConditions(per_sample=layout, angles_TK=angles_TK),
            exchange=self.context.exchange(batch, rows=len(batch.segment_T)),
            text_LE=blocks["text"],
            cross_spans=_spans(batch, batch.text_starts),
            image=image,
        )

    def head(self, blocks: Blocks, batch: PackedBatch, layout: PerSample) -> Tensor:  # noqa: ARG002
        # Both rows of the table are added to the embedding itself, which SiLU has not changed.
        twice_MX = blocks["t_emb"].repeat(1, 2)
        timestep = TimestepConditioning(t_emb_ND=blocks["t_emb"], adaln_shift_NX=twice_MX)
        (adaln,) = self.modulate_out(timestep)
        return self.all_tokens(self.proj_out(adaln.modulate(blocks["hidden"], layout)))


def _spans(batch: PackedBatch, starts: tuple[int, ...]) -> Spans:
    """Of the tokens here, and of the rows of their samples that begin at `starts`."""
    rows = [(first, stop - first) for first, stop in pairwise(starts)]
    tokens, device = len(batch.segment_T), batch.segment_T.device
    return Spans.of(batch.shared_spans, rows, total=tokens, device=device)
