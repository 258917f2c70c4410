"""Layers that attend to latents and text jointly: double-stream and single-stream (FLUX).

A double-stream layer has latents and text in separate rows, with separate weights. A single-stream
layer works on one row of both. Qwen-Image and HunyuanVideo 1.5 have only double-stream layers; FLUX
and HunyuanVideo continue with single-stream layers.
"""

# T latent tokens, L text tokens, J tokens of the joint row, D model width, F width inside of the
# feed-forward, H heads of this tensor rank, K head width, X any width

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    BaseTransformerLayer,
    get_transformer_layer_offset,
)
from torch import Tensor, nn

from dit.config import ModelConfig
from dit.models.layer_spec import DoubleLayerSpec, QkNorm, SingleLayerSpec
from dit.models.layers.adaptable import TOKENS
from dit.models.layers.context_parallel import TokenExchange
from dit.models.layers.experts import feed_forward
from dit.models.layers.joint_order import JOINT_TOKENS, TEXT_TOKENS, JointOrder
from dit.models.layers.layer_text import LayerText, LayerTextRows
from dit.models.layers.modulation import AdaLN, TimestepConditioning, make_modulation
from dit.models.layers.packed_attention import (
    PackedAttention,
    RowConditions,
    SelfAttention,
    joint_attention,
)
from dit.models.layers.parallel_linear import ACTIVATIONS, BuildContext, FeedForward, split_linear
from dit.models.layers.queries_and_keys import hold_key_bias


@dataclass(frozen=True, kw_only=True, slots=True)
class JointConditions:
    """The inputs of every layer of both kinds, besides the tokens."""

    timestep: TimestepConditioning
    latents: RowConditions
    text: RowConditions
    joint: RowConditions
    order: JointOrder
    latents_alone: TokenExchange | None = None  # for attention of the latents to each other
    text_alone: TokenExchange | None = None  # likewise of the text
    layer_text: LayerTextRows | None = None  # text that is each layer's own
    # bool, of the latents that this rank holds between two matrices; None: no sample has references
    is_reference_T: Tensor | None = None


class DoubleStreamLayer(MegatronModule, BaseTransformerLayer):
    """Attention over latents and text jointly; all other parts have separate weights.

    The published blocks: `FluxTransformerBlock`, `QwenImageTransformerBlock` of Diffusers; and
    `JointTransformerBlock`, with a second attention of the latents, or without an update of the
    text.
    """

    hidden: ClassVar = (TOKENS, TEXT_TOKENS)
    """Names of the hidden states that go through these layers."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        spec: DoubleLayerSpec,
        model: ModelConfig,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        vp_stage: int | None = None,
    ):
        super().__init__(config=config)
        offset = get_transformer_layer_offset(config, vp_stage, pg_collection.pp.rank())
        self.layer_number = layer_number + offset  # 1-based, over all stages
        self.text_ends = not spec.text_is_read and self.layer_number == config.num_layers
        context = BuildContext(model=model, config=config, groups=pg_collection)
        of_text = replace(context, token_row=TEXT_TOKENS)
        width, second, updates = spec.attention.width, spec.second_attention, spec.updates_text
        place = self.layer_number - 1
        make = partial(make_modulation, spec.modulation, context, width, layer=place)
        self.modulation = make(parts=4 if spec.one_modulation else 3 if second else 2)
        make = partial(make, of_text=True)
        self.text_modulation: nn.Module | None = None
        if not spec.one_modulation:
            self.text_modulation = make(parts=2) if updates else make(parts=1, gated=False)
        self.attention = SelfAttention(context, spec.attention)
        self.text_attention = SelfAttention(of_text, spec.attention, output=updates)
        self.second_attention = SelfAttention(context, spec.attention) if second else None
        if self.second_attention is not None and spec.attention.norm is QkNorm.NONE:
            # Not of the attention over both rows, whose keys have two biases.
            linear: Any = self.second_attention.linear_qkv
            hold_key_bias(linear.bias, spec.attention.head_width)
        self.mlp = feed_forward(context, spec.feed_forward)
        self.text_mlp = FeedForward(of_text, spec.of_text) if updates else None
        self.layer_text: LayerText | None = None
        if (text := spec.layer_text) is not None:
            state = text.state(place)
            assert state is not None, "the last layer is no double-stream one"
            self.layer_text = LayerText(of_text, text, state=state, width=width)

    @property
    def unused(self) -> tuple[str, ...]:
        """Patterns of names of weights that are unused because the text is not read after it."""
        if self.text_mlp is None:
            return ("text_attention.q_layernorm.*",)
        if not self.text_ends:
            return ()
        return ("text_attention.linear_proj.*", "text_attention.q_layernorm.*", "text_mlp.*")

    def forward(
        self, hidden: tuple[Tensor, Tensor], conditions: JointConditions
    ) -> tuple[Tensor, Tensor]:
        """`hidden` after the layer: [T, D] of latents and [L, D] of text."""
        if self.layer_text is None:
            return self._updated(hidden, conditions)
        rows = conditions.layer_text
        assert rows is not None
        h_TD, text_LD = hidden
        seen_LD = self.layer_text(text_LD, rows)
        h_TD, made_LD = self._updated((h_TD, seen_LD), conditions)
        return h_TD, rows.placed[TEXT_TOKENS].replaced(made_LD, text_LD)

    def _modulations(
        self, timestep: TimestepConditioning
    ) -> tuple[tuple[AdaLN, ...], tuple[AdaLN, ...]]:
        adaln = self.modulation(timestep)
        if self.text_modulation is None:
            return adaln[:2], adaln[2:]
        return adaln, self.text_modulation(timestep)

    def _updated(
        self, hidden: tuple[Tensor, Tensor], conditions: JointConditions
    ) -> tuple[Tensor, Tensor]:
        c, (h_TD, text_LD) = conditions, hidden
        adaln, text_adaln = self._modulations(c.timestep)
        h_TD, x_TD = adaln[0].branch(h_TD, c.latents.per_sample)
        z_TD = None
        if self.second_attention is not None:
            h_TD, z_TD = adaln[2].branch(h_TD, c.latents.per_sample)
        text_LD, y_LD = text_adaln[0].branch(text_LD, c.text.per_sample)
        x_TX, text_LX = joint_attention(
            (self.attention, x_TD, c.latents),
            (self.text_attention, y_LD, c.text),
            c.order.apart,
        )
        if self.text_mlp is not None and self.text_ends:
            adaln = (adaln[0], self._tied(adaln[1]), *adaln[2:])
        elif self.text_mlp is not None:
            parts = (self.text_attention.linear_proj, self.text_mlp)
            text_LD = _update(text_LD, text_LX, text_adaln, parts, c.text)
        parts = (self.attention.linear_proj, self.mlp)
        if self.second_attention is None:
            return _update(h_TD, x_TX, adaln, parts, c.latents), text_LD
        assert c.latents_alone is not None
        h_TD = adaln[0].add(h_TD, parts[0](x_TX), c.latents.per_sample)
        z_TD = self.second_attention(z_TD, c.latents, c.latents_alone)
        h_TD, x_TD = adaln[2].add_and_branch(h_TD, z_TD, c.latents.per_sample, then=adaln[1])
        return adaln[1].add(h_TD, self.mlp(x_TD), c.latents.per_sample), text_LD

    def _tied(self, adaln: AdaLN) -> AdaLN:
        """`adaln` with unused weights tied to it: they add nothing, and their gradients are zeros.

        Otherwise they would have no gradient, and Megatron-Core's DDP waits for that of every
        weight.
        """
        assert self.text_mlp is not None
        idle = (self.text_attention.linear_proj, self.text_mlp)
        idle_weights = (weight for module in idle for weight in module.parameters())
        weights = [weight.sum() for weight in idle_weights if weight.requires_grad]
        if not weights:
            return adaln
        return replace(adaln, scale_ND=adaln.scale_ND + 0 * torch.stack(weights).sum())


def _update(
    h_TD: Tensor,
    attended_TX: Tensor,
    adaln: tuple[AdaLN, ...],
    parts: tuple[nn.Module, nn.Module],
    row: RowConditions,
) -> Tensor:
    """One row after attention's output and the feed-forward have been added."""
    linear_proj, mlp = parts
    x_TD = linear_proj(attended_TX)
    h_TD, x_TD = adaln[0].add_and_branch(h_TD, x_TD, row.per_sample, then=adaln[1])
    return adaln[1].add(h_TD, mlp(x_TD), row.per_sample)


class SingleStreamLayer(MegatronModule, BaseTransformerLayer):
    """Attention and feed-forward of the same normed input, added with one gate.

    The published block: `FluxSingleTransformerBlock` of Diffusers. One matrix computes queries,
    keys, values and the hidden units of the feed-forward; another reads attention's output and
    hidden units together, so tensor ranks gather and sum the tokens once. Both are ordered head by
    head, each head with its part of the hidden units, so any number of tensor ranks that divides
    the heads divides both matrices.
    """

    hidden: ClassVar = (JOINT_TOKENS,)
    """Names of the hidden states that go through these layers."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        spec: SingleLayerSpec,
        model: ModelConfig,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        vp_stage: int | None = None,
    ):
        super().__init__(config=config)
        offset = get_transformer_layer_offset(config, vp_stage, pg_collection.pp.rank())
        self.layer_number = layer_number + offset  # 1-based, over all stages
        context = BuildContext(
            model=model, config=config, groups=pg_collection, token_row=JOINT_TOKENS
        )
        attention, mlp = spec.attention, spec.feed_forward
        width, hidden = attention.width, mlp.hidden
        if hidden % attention.heads:
            raise ValueError(
                f"a single-stream layer has {hidden} hidden units in its feed-forward, which"
                f" {attention.heads} heads do not divide; choose a multiple"
            )
        place = self.layer_number - 1
        self.modulation = make_modulation(spec.modulation, context, width, parts=1, layer=place)
        self.attention = PackedAttention(context, attention, output=False)
        self.activation = ACTIVATIONS[mlp.activation]
        wide = hidden * mlp.activation.inputs
        parts = 1 if spec.fused else 4
        of_input: Any = {"axis": 0, "context": context, "bias": attention.bias}
        self.linear_in = split_linear(width, 3 * width + wide, **of_input, parts=parts)
        self.linear_out = split_linear(
            width + hidden, width, axis=1, context=context, bias=attention.bias
        )
        self.each_head = (*(attention.head_width,) * 3, wide // attention.heads)

    def forward(self, joint_JD: Tensor, conditions: JointConditions) -> Tensor:
        row = conditions.joint
        (adaln,) = self.modulation(conditions.timestep)
        joint_JD, x_JD = adaln.branch(joint_JD, row.per_sample)
        x_JHX = self.linear_in(x_JD).unflatten(-1, (-1, sum(self.each_head)))
        q, k, v, wide_JHF = self.attention.positioned_parts(x_JHX, self.each_head, row)
        attended_JHK = self.attention.exchanged((q, k, v), conditions.order.joined)
        parts = attended_JHK, self.activation(wide_JHF)
        out_JD = self.linear_out(torch.cat(parts, dim=-1).flatten(1))
        return adaln.add(joint_JD, out_JD, row.per_sample)
