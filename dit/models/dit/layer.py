"""One layer of the DiT: self-attention, cross-attention and MLP, each modulated by the level."""

# T packed tokens, N samples, L text tokens, E text width, D model width, H heads, K head width

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from functools import partial

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    BaseTransformerLayer,
    get_transformer_layer_offset,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dit.config import Implementation, Recompute
from dit.models.dit.adaln import Modulation
from dit.models.dit.config import DitConfig
from dit.models.layers.attention import Attend, Spans, attend_packed, attention_for
from dit.models.layers.compile import region
from dit.models.layers.context_parallel import Context, TokenOrder
from dit.models.layers.parallel_linear import ColumnLinear, split_linear
from dit.models.layers.per_sample import Owners
from dit.models.layers.qk_norm import HeadNorm
from dit.models.layers.rope import rotate
from dit.models.layers.transformer_engine import engine_kernel


@dataclass(frozen=True, kw_only=True, slots=True)
class Steer:
    """What is learnt of levels, positions and text, once for all layers."""

    wave_ND: Tensor  # normalised sinusoid of each sample's level
    offset_NX: Tensor  # [N, 3 D], added to every modulation
    position_TD: Tensor | None  # learnable positions, added before every layer
    text_LE: Tensor | None  # projected text; None attends to the text as it is


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """What every layer sees beside the tokens."""

    steer: Steer
    owners: Owners
    text_LE: Tensor
    cos_TK: Tensor  # float32
    sin_TK: Tensor  # float32
    self_spans: Spans
    self_order: TokenOrder | None  # None where attention needs none
    cross_spans: Spans


class PackedAttention(MegatronModule):
    """Attention whose queries, keys and values come from packed tokens.

    Queries and keys are normalised per head (RMSNorm) before their product. The names of weights
    are those that Megatron-Core reduces over tensor ranks.
    """

    def __init__(
        self, config: TransformerConfig, groups: ProcessGroupCollection, *, model: DitConfig
    ):
        super().__init__(config=config)
        width = model.hidden_size
        self.head_width = width // model.num_attention_heads
        self.recomputed = model.recompute_granularity is Recompute.SELECTIVE
        self.implementation = model.transformer_impl
        of = {"model": model, "config": config, "groups": groups}
        self.linear_proj = split_linear(width, width, axis=1, **of)
        self.q_layernorm = HeadNorm(self.head_width, dtype=config.params_dtype)
        self.k_layernorm = HeadNorm(self.head_width, dtype=config.params_dtype)

    def _heads(self, x_TX: Tensor, parts: int) -> tuple[Tensor, ...]:
        """Splits [T, heads * parts * K], ordered head by head, into `parts` of [T, heads, K]."""
        x_THX = x_TX.view(x_TX.shape[0], -1, parts * self.head_width)
        return x_THX.chunk(parts, dim=-1)

    def _attend(self, q_THK: Tensor, k_SHK: Tensor, v_SHK: Tensor, spans: Spans) -> Tensor:
        if not spans.lengths:
            # This rank's part of the pack is padding. Its gradients are zeros, not missing: the
            # other ranks wait for them.
            return q_THK * 0 + (k_SHK.sum() + v_SHK.sum()) * 0
        attend = _attention_for(self.implementation, q_THK)
        inputs = (q_THK, k_SHK, v_SHK.contiguous(), spans)
        if self.training and self.recomputed:
            return checkpoint(attend, *inputs, use_reentrant=False)
        return attend(*inputs)


def _attention_for(implementation: Implementation, q_THK: Tensor) -> Attend:
    if implementation is Implementation.TRANSFORMER_ENGINE:
        return partial(attend_packed, kernel=engine_kernel)
    return attention_for(q_THK.device, q_THK.dtype)


class SelfAttention(PackedAttention):
    """Tokens of a sample attend to each other, with rotary positions."""

    def __init__(
        self, config: TransformerConfig, groups: ProcessGroupCollection, *, model: DitConfig
    ):
        super().__init__(config, groups, model=model)
        width = model.hidden_size
        of = {"model": model, "config": config, "groups": groups}
        self.linear_qkv = split_linear(width, 3 * width, axis=0, **of)
        self.context = Context(group=groups.cp, comm=model.cp_comm_type)

    def forward(self, x_TD: Tensor, conditions: Conditions) -> Tensor:
        q, k, v = self._heads(self.linear_qkv(x_TD), 3)
        turn = region(_turn) if conditions.owners.compiled else _turn
        angles = (conditions.cos_TK, conditions.sin_TK)
        q, k = turn(q, self.q_layernorm, *angles), turn(k, self.k_layernorm, *angles)
        spans, order = conditions.self_spans, conditions.self_order
        out_THK = self.context.attend(self._attend, (q, k, v), spans, order)
        return self.linear_proj(out_THK.flatten(1))


def _turn(x_THK: Tensor, norm: HeadNorm, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    return rotate(norm(x_THK), cos_TK, sin_TK)


class CrossAttention(PackedAttention):
    """Tokens of a sample attend to its caption, which every context and tensor rank holds whole."""

    def __init__(
        self, config: TransformerConfig, groups: ProcessGroupCollection, *, model: DitConfig
    ):
        super().__init__(config, groups, model=model)
        width, text_width = model.hidden_size, model.text_width
        self.linear_q = split_linear(
            width, width, axis=0, model=model, config=config, groups=groups
        )
        # Every tensor rank has the whole text: there are no parts of it to gather. And text of any
        # length is nothing for 8-bit products.
        whole = copy(config)
        whole.sequence_parallel = False
        self.linear_kv = ColumnLinear(text_width, 2 * width, config=whole, groups=groups)

    def forward(self, x_TD: Tensor, conditions: Conditions) -> Tensor:
        (q,) = self._heads(self.linear_q(x_TD), 1)
        k, v = self._heads(self.linear_kv(conditions.text_LE), 2)
        q, k = self.q_layernorm(q), self.k_layernorm(k)
        return self.linear_proj(self._attend(q, k, v, conditions.cross_spans).flatten(1))


class Mlp(MegatronModule):
    """Two linears with a GELU (exact, not tanh) between them."""

    def __init__(
        self, config: TransformerConfig, groups: ProcessGroupCollection, *, model: DitConfig
    ):
        super().__init__(config=config)
        wide, width = model.ffn_hidden_size, model.hidden_size
        of = {"model": model, "config": config, "groups": groups}
        self.linear_fc1 = split_linear(width, wide, axis=0, **of)
        self.linear_fc2 = split_linear(wide, width, axis=1, **of)

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.linear_fc2(nn.functional.gelu(self.linear_fc1(x_TD)))


class DiTLayer(MegatronModule, BaseTransformerLayer):
    """h += gate · part(modulated h), for self-attention, cross-attention and MLP in turn."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        model: DitConfig,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        vp_stage: int | None = None,
    ):
        super().__init__(config=config)
        offset = get_transformer_layer_offset(config, vp_stage, pg_collection.pp.rank())
        self.layer_number = layer_number + offset  # 1-based, over all stages
        self.modulate_self = Modulation(config, rank=model.adaln_lora_dim, gated=True)
        self.self_attention = SelfAttention(config, pg_collection, model=model)
        self.modulate_cross = Modulation(config, rank=model.adaln_lora_dim, gated=True)
        self.cross_attention = CrossAttention(config, pg_collection, model=model)
        self.modulate_mlp = Modulation(config, rank=model.adaln_lora_dim, gated=True)
        self.mlp = Mlp(config, pg_collection, model=model)

    def forward(self, h_TD: Tensor, conditions: Conditions) -> Tensor:
        c, position_TD = conditions, conditions.steer.position_TD
        if position_TD is not None:
            h_TD = h_TD + position_TD
        steer = (c.steer.wave_ND, c.steer.offset_NX, c.owners)
        x_TD, gate_ND = self.modulate_self(h_TD, *steer)
        h_TD = c.owners.add(h_TD, self.self_attention(x_TD, c), gate_ND=gate_ND)
        x_TD, gate_ND = self.modulate_cross(h_TD, *steer)
        h_TD = c.owners.add(h_TD, self.cross_attention(x_TD, c), gate_ND=gate_ND)
        x_TD, gate_ND = self.modulate_mlp(h_TD, *steer)
        return c.owners.add(h_TD, self.mlp(x_TD), gate_ND=gate_ND)
