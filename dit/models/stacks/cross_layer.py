"""A layer with cross-attention to text: Cosmos, Wan, LTX."""

# T packed tokens as this rank holds them, L text tokens, E text width, D model width

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    BaseTransformerLayer,
    get_transformer_layer_offset,
)
from torch import Tensor, nn

from dit.config import ModelConfig
from dit.models.attention.spans import Spans
from dit.models.layer_spec import CrossLayerSpec, LowRankModulation
from dit.models.layers.adaptable import sees_part_of_tokens
from dit.models.layers.context_parallel import TokenExchange
from dit.models.layers.modulation import AdaLN, TimestepConditioning, make_modulation
from dit.models.layers.packed_attention import (
    AttendedRows,
    CrossAttention,
    RowConditions,
    SelfAttention,
)
from dit.models.layers.parallel_linear import BuildContext, FeedForward


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossConditions:
    """The inputs of every layer with cross-attention, besides the tokens."""

    timestep: TimestepConditioning
    tokens: RowConditions
    exchange: TokenExchange  # of self-attention
    text_LE: Tensor  # whole on every rank
    cross_spans: Spans
    image: AttendedRows | None = None  # of layers with `CrossLayerSpec.image_rows`
    position_TD: Tensor | None = None  # learned positions, added before every layer


class CrossLayer(MegatronModule, BaseTransformerLayer):
    """A layer of three parts, each h = h + gate * part(norm(h) * (1 + scale) + shift).

    The parts are self-attention, cross-attention and the MLP; `AdaLN` computes the steps around
    each. With a low-rank modulation each part has its own module; other kinds have one for the
    layer. Cross-attention may have no modulation and gate, after an affine LayerNorm (Wan) or on
    unnormalised tokens (LTX).
    """

    hidden: ClassVar = ("hidden",)
    """Names of the hidden states that go through these layers."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        spec: CrossLayerSpec,
        model: ModelConfig,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        vp_stage: int | None = None,
    ):
        super().__init__(config=config)
        offset = get_transformer_layer_offset(config, vp_stage, pg_collection.pp.rank())
        self.layer_number = layer_number + offset  # 1-based, over all stages
        context = BuildContext(model=model, config=config, groups=pg_collection)
        width = spec.attention.width
        own = isinstance(spec.modulation, LowRankModulation)
        self.modulation = self.norm_cross = None
        self.gated_cross = spec.gated_cross
        if not own:
            parts = 3 if spec.gated_cross else 2
            self.modulation = make_modulation(spec.modulation, context, width, parts=parts)

        def modulate() -> nn.Module | None:
            return make_modulation(spec.modulation, context, width, parts=1) if own else None

        self.modulate_self = modulate()
        self.self_attention = SelfAttention(context, spec.attention)
        self.modulate_cross = modulate() if spec.gated_cross else None
        if spec.cross_norm and not spec.gated_cross:
            self.norm_cross = nn.LayerNorm(width, eps=1e-6, dtype=config.params_dtype)
            sees_part_of_tokens(self.norm_cross, config)
        self.cross_attention = CrossAttention(
            context,
            spec.cross_attention,
            text_width=spec.text_width,
            image=spec.image_rows is not None,
        )
        self.modulate_mlp = modulate()
        self.mlp = FeedForward(context, spec.feed_forward)

    def forward(self, h_TD: Tensor, conditions: CrossConditions) -> Tensor:
        c, per_sample = conditions, conditions.tokens.per_sample
        if c.position_TD is not None:
            h_TD = h_TD + c.position_TD
        parts = self._adaln(c.timestep)
        own = next(parts)
        h_TD, x_TD = own.branch(h_TD, per_sample)
        x_TD = self.self_attention(x_TD, c.tokens, c.exchange)
        if self.gated_cross:
            cross = next(parts)
            h_TD, x_TD = own.add_and_branch(h_TD, x_TD, per_sample, then=cross)
            x_TD = self._cross(x_TD, c)
            mlp = next(parts)
            h_TD, x_TD = cross.add_and_branch(h_TD, x_TD, per_sample, then=mlp)
        else:
            h_TD = own.add(h_TD, x_TD, per_sample)
            # torch's kernels: this norm has weights, and its part is added without a gate.
            x_TD = h_TD if self.norm_cross is None else self.norm_cross(h_TD)
            h_TD = h_TD + self._cross(x_TD, c)
            mlp = next(parts)
            h_TD, x_TD = mlp.branch(h_TD, per_sample)
        return mlp.add(h_TD, self.mlp(x_TD), per_sample)

    def _cross(self, x_TD: Tensor, c: CrossConditions) -> Tensor:
        fused = c.tokens.per_sample.fused
        return self.cross_attention(x_TD, c.text_LE, c.cross_spans, c.image, fused=fused)

    def _adaln(self, timestep: TimestepConditioning) -> Iterator[AdaLN]:
        """The modulation of each part of the layer, in order."""
        if self.modulation is not None:
            yield from self.modulation(timestep)
            return
        for modulate in (self.modulate_self, self.modulate_cross, self.modulate_mlp):
            if modulate is not None:
                yield modulate(timestep)[0]
