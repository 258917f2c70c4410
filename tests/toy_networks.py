"""Small networks of other families' layers, built of the parts of `dit.models`.

    ToyJoint   double-stream layers, then single-stream ones: biases, a text row with samples that
               have none, tokens that are told a level of their own, a pooled input
    ToyDouble  double-stream layers alone: nothing reads the text after the last one
    ToyCross   cross-attention in the manner of Wan: norm across heads, table modulation in
               float32, cross-attention without gate, biases

They take a `ModelConfig` for its common fields, as the DiT does.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from dit.batch import PackedBatch
from dit.config import ModelConfig
from dit.models.layer_spec import (
    Activation,
    AttentionSpec,
    CrossLayerSpec,
    DoubleLayerSpec,
    FeedForwardSpec,
    QkNorm,
    SingleLayerSpec,
    StackSpec,
    TableModulation,
)
from dit.models.layers.attention import Spans
from dit.models.layers.modulation import (
    PerBlockAdaLN,
    PerSample,
    TableAdaLN,
    TimestepConditioning,
    TimestepEmbedding,
    sinusoid,
)
from dit.models.layers.packed_attention import RowConditions
from dit.models.layers.parallel_linear import BuildContext, Replicated, transformer_config
from dit.models.layers.queries_and_keys import RotaryTable
from dit.models.stacks.cross_layer import CrossConditions
from dit.models.stacks.joint_transformer import JointLayout, JointTransformer
from dit.models.stacks.stacked_transformer import Blocks, Shapes, StackedTransformer


def toy_parts(model: ModelConfig, **attention: Any) -> dict[str, Any]:
    """Attention and feed-forward with biases; the feed-forward is three heads' widths wide."""
    width, heads = model.hidden_size, model.num_attention_heads
    return {
        "attention": AttentionSpec(width=width, heads=heads, bias=True, **attention),
        "feed_forward": FeedForwardSpec(
            width=width, hidden=3 * width, activation=Activation.GELU_TANH, bias=True
        ),
    }


def rotary(model: ModelConfig) -> RotaryTable:
    width = model.hidden_size // model.num_attention_heads
    rest = width - 2 * (width // 6 * 2)
    widths = (rest, (width - rest) // 2, (width - rest) // 2)
    return RotaryTable(widths, (1e4, 256.0, 1e4), dtype=torch.float64)


class ToyJoint(JointTransformer):
    def __init__(
        self, model: ModelConfig, groups: ProcessGroupCollection, vp_stage: int | None = None
    ):
        config = transformer_config(model)
        super().__init__(config, model, groups, vp_stage, self.stacks_of(model))
        width, context = model.hidden_size, BuildContext(model=model, config=config, groups=groups)
        self.rotary = rotary(model)
        if self.pre_process:
            biased = {"config": config, "bias": True}
            self.patches = Replicated(model.patch_features, width, **biased)
            self.text_in = Replicated(model.crossattn_emb_size, width, **biased)
            self.time_1 = Replicated(width, width, **biased)
            self.time_2 = Replicated(width, width, **biased)
            self.pooled = Replicated(model.crossattn_emb_size, width, **biased)
        self.build_stacks()
        if self.post_process:
            self.modulate_out = PerBlockAdaLN(context, width, bias=True, parts=1, gated=False)
            self.proj_out = Replicated(width, model.patch_features, config=config, bias=True)

    def stacks_of(self, model: ModelConfig) -> list[StackSpec]:
        """One layer more than `num_layers`, so that stages are not even."""
        parts, half = toy_parts(model), model.num_layers // 2
        return [
            StackSpec(name="double_blocks", count=half, layer=DoubleLayerSpec(**parts)),
            StackSpec(name="single_blocks", count=half + 1, layer=SingleLayerSpec(**parts)),
        ]

    def text_lengths(self, batch: PackedBatch) -> list[int]:
        """Captions of one token count as none."""
        return [length if length > 1 else 0 for length in super().text_lengths(batch)]

    def prepared(self, batch: PackedBatch) -> PackedBatch:
        spans = zip(pairwise(batch.text_starts), self.text_lengths(batch), strict=True)
        kept = [batch.text_LE[a:b] for (a, b), length in spans if length]
        starts = torch.tensor([0, *self.text_lengths(batch)]).cumsum(0).tolist()
        text = torch.cat([batch.text_LE[:0], *kept])
        return replace(batch, text_LE=text, text_starts=tuple(starts))

    def level_rows(self, batch: PackedBatch) -> Tensor:
        """First frames of videos are told another level."""
        is_video_N = torch.tensor([f > 1 for f, _, _ in batch.grids])
        is_video_N = is_video_N.to(batch.segment_T.device, non_blocking=True)
        clean_T = is_video_N[batch.segment_T] & (batch.position_T3[:, 0] == 0)
        return batch.segment_T + batch.num_samples * clean_T

    def text_positions(self, batch: PackedBatch) -> Tensor:
        rows = [torch.arange(stop - start) for start, stop in pairwise(batch.text_starts)]
        position_LA = torch.cat(rows)[:, None] + torch.tensor([[0.0, 1.0, 2.0]])
        return position_LA.to(batch.segment_T.device, non_blocking=True)

    def condition_shapes(self, batch: PackedBatch) -> Shapes:
        return {"t_emb": (2 * batch.num_samples, self.config.hidden_size)}

    def embed(
        self, x_TC: Tensor, level_N: Tensor, batch: PackedBatch, layout: JointLayout
    ) -> Blocks:
        dtype = self.config.params_dtype
        hidden = self.patches(self.my_tokens(x_TC.to(dtype)))
        text = self.text_in(self.my_tokens(layout.text.of(batch.text_LE.to(dtype))))
        levels = torch.cat((level_N, torch.full_like(level_N, -1.0)))
        wave = sinusoid(levels, self.config.hidden_size).to(dtype)
        t_emb = self.time_2(nn.functional.silu(self.time_1(wave)))
        means = [batch.text_LE[a:b].to(dtype).sum(0) for a, b in pairwise(batch.text_starts)]
        pooled = self.pooled(torch.stack(means))
        return {"hidden": hidden, "text_hidden": text, "t_emb": t_emb + torch.cat((pooled, pooled))}

    def conditions(self, blocks: Blocks, batch: PackedBatch, layout: JointLayout) -> Any:
        timestep = TimestepConditioning(t_emb_ND=blocks["t_emb"])
        return self.joint_conditions(timestep, batch, layout, self.rotary)

    def head(self, blocks: Blocks, batch: PackedBatch, layout: JointLayout) -> Tensor:
        (adaln,) = self.modulate_out(TimestepConditioning(t_emb_ND=blocks["t_emb"]))
        if "joint" in blocks:
            out = self.proj_out(adaln.modulate(blocks["joint"], layout.joint))
            return self.latent_outputs(out, layout)
        return self.all_tokens(self.proj_out(adaln.modulate(blocks["hidden"], layout.latents)))


class ToyDouble(ToyJoint):
    def stacks_of(self, model: ModelConfig) -> list[StackSpec]:
        layer = DoubleLayerSpec(**toy_parts(model), text_is_read=False)
        return [StackSpec(name="double_blocks", count=model.num_layers, layer=layer)]


class ToyCross(StackedTransformer):
    def __init__(
        self, model: ModelConfig, groups: ProcessGroupCollection, vp_stage: int | None = None
    ):
        config = transformer_config(model)
        parts = toy_parts(model, norm=QkNorm.ACROSS_HEADS)
        layer = CrossLayerSpec(
            **parts,
            cross_attention=parts["attention"],
            text_width=model.crossattn_emb_size,
            modulation=TableModulation(),
            gated_cross=False,
        )
        stack = StackSpec(name="blocks", count=model.num_layers, layer=layer)
        super().__init__(config, model, groups, vp_stage, [stack])
        width = model.hidden_size
        self.rotary = rotary(model)
        if self.pre_process:
            self.patches = Replicated(model.patch_features, width, config=config, bias=True)
            self.level = TimestepEmbedding(config)
            self.time_6 = Replicated(width, 6 * width, config=config, bias=True)
        self.build_stacks()
        if self.post_process:
            self.modulate_out = TableAdaLN(config, width, parts=1, gated=False)
            self.proj_out = Replicated(width, model.patch_features, config=config, bias=True)

    def condition_shapes(self, batch: PackedBatch) -> Shapes:
        samples, width = batch.num_samples, self.config.hidden_size
        return {"t_emb": (samples, width), "shared": (samples, 6 * width)}

    def layout(self, batch: PackedBatch) -> PerSample:
        return PerSample.of(self.my_tokens(batch.segment_T))

    def embed(self, x_TC: Tensor, level_N: Tensor, batch: PackedBatch, layout: PerSample) -> Blocks:
        t_emb, offset = self.level(level_N)
        t_emb = t_emb + offset[:, : self.config.hidden_size]
        hidden = self.patches(self.my_tokens(x_TC.to(self.config.params_dtype)))
        return {"hidden": hidden, "t_emb": t_emb, "shared": self.time_6(nn.functional.silu(t_emb))}

    def conditions(self, blocks: Blocks, batch: PackedBatch, layout: PerSample) -> Any:
        cos, sin = self.rotary(batch.position_T3)
        rows, device = len(batch.segment_T), batch.segment_T.device
        captions = [(a, b - a) for a, b in pairwise(batch.text_starts)]
        return CrossConditions(
            timestep=TimestepConditioning(
                t_emb_ND=blocks["t_emb"], adaln_shift_NX=blocks["shared"]
            ),
            tokens=RowConditions(per_sample=layout, cos_TK=cos, sin_TK=sin),
            exchange=self.context.exchange(batch, rows=rows),
            text_LE=batch.text_LE.to(self.config.params_dtype),
            cross_spans=Spans.of(batch.shared_spans, captions, total=rows, device=device),
        )

    def head(self, blocks: Blocks, batch: PackedBatch, layout: PerSample) -> Tensor:
        twice = blocks["t_emb"].repeat(1, 2)
        timestep = TimestepConditioning(t_emb_ND=blocks["t_emb"], adaln_shift_NX=twice)
        (adaln,) = self.modulate_out(timestep)
        return self.all_tokens(self.proj_out(adaln.modulate(blocks["hidden"], layout)))


NETWORKS = {"joint": ToyJoint, "double": ToyDouble, "cross": ToyCross}
