"""Attention, then feed-forward, with norms around both, over one row (Lumina Image 2.0, Z-Image).

Such layers refine latents and text separately, and then work on both in one row.
"""

# T tokens of the row, N level rows, D model width

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
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
from dit.models.layer_spec import (
    PerBlockModulation,
    RowKind,
    SequentialLayerSpec,
    SharedModulation,
    TableModulation,
)
from dit.models.layers.adaptable import TOKENS, sees_part_of_tokens
from dit.models.layers.context_parallel import TokenExchange
from dit.models.layers.experts import feed_forward
from dit.models.layers.layer_text import LayerText
from dit.models.layers.modulation import (
    AdaLN,
    AdaLNModule,
    PerBlockAdaLN,
    PrecomputedAdaLN,
    TableAdaLN,
    TimestepConditioning,
    Unmodulated,
)
from dit.models.layers.packed_attention import RowConditions, SelfAttention
from dit.models.layers.parallel_linear import BuildContext
from dit.models.layers.queries_and_keys import CentredNorm
from dit.models.stacks.stream_layers import JOINT_TOKENS, TEXT_TOKENS, JointConditions


class SequentialLayer(MegatronModule, BaseTransformerLayer):
    """The layer of `SequentialLayerSpec`, over a row that its subclasses name.

    The published blocks: `Lumina2TransformerBlock` and `ZImageTransformerBlock` of Diffusers.
    """

    hidden: ClassVar[tuple[str]]
    """Name of the hidden state that goes through these layers."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        spec: SequentialLayerSpec,
        model: ModelConfig,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        vp_stage: int | None = None,
    ):
        super().__init__(config=config)
        offset = get_transformer_layer_offset(config, vp_stage, pg_collection.pp.rank())
        self.layer_number = layer_number + offset  # 1-based, over all stages
        context = BuildContext(
            model=model, config=config, groups=pg_collection, token_row=self.hidden[0]
        )
        width, self.tanh = spec.attention.width, spec.tanh
        self.modulation = None
        if spec.modulation is not None:
            self.modulation = _modulation(context, width, spec)

        def norm() -> nn.Module:
            if not spec.weighted:
                return nn.Identity()
            kind = CentredNorm if spec.centred else nn.RMSNorm
            made = kind(width, eps=spec.eps, dtype=config.params_dtype)
            sees_part_of_tokens(made, config)
            return made

        self.norm_1, self.norm_2 = norm(), norm()
        self.attention = SelfAttention(context, spec.attention)
        self.mlp = feed_forward(context, spec.feed_forward)
        self.after_1, self.after_2 = (norm() if spec.after else nn.Identity() for _ in range(2))
        self.weighted, self.parallel, self.layer_text = spec.weighted, spec.parallel, None
        text, place = spec.layer_text, self.layer_number - 1
        state = None if text is None else text.state(place)
        if text is not None and state is not None:
            self.layer_text = LayerText(context, text, state=state, width=width)

    def row(self, conditions: JointConditions) -> tuple[RowConditions, TokenExchange]:
        """Conditions of the layer's row of tokens, and their exchange over context ranks."""
        raise NotImplementedError

    def forward(self, h_TD: Tensor, conditions: JointConditions) -> Tensor:
        if self.layer_text is None:
            return self._updated(h_TD, conditions)
        rows = conditions.layer_text
        assert rows is not None
        made_TD = self._updated(self.layer_text(h_TD, rows), conditions)
        return rows.placed[self.hidden[0]].replaced(made_TD, h_TD)

    def _updated(self, h_TD: Tensor, conditions: JointConditions) -> Tensor:
        row, exchange = self.row(conditions)
        first, second = self._modulations(conditions.timestep)
        if self.parallel:
            assert isinstance(first, AdaLN)
            h_TD, x_TD = first.branch(h_TD, row.per_sample)
            x_TD = self.attention(x_TD, row, exchange) + self.mlp(x_TD)
            return first.add(h_TD, x_TD, row.per_sample)
        if not self.weighted:
            assert isinstance(first, AdaLN) and isinstance(second, AdaLN)
            h_TD, x_TD = first.branch(h_TD, row.per_sample)
            x_TD = self.attention(x_TD, row, exchange)
            h_TD, x_TD = first.add_and_branch(h_TD, x_TD, row.per_sample, then=second)
            return second.add(h_TD, self.mlp(x_TD), row.per_sample)
        x_TD = first.scaled(self.norm_1(h_TD), row.per_sample)
        x_TD = self.after_1(self.attention(x_TD, row, exchange))
        h_TD = first.add(h_TD, x_TD, row.per_sample)
        x_TD = second.scaled(self.norm_2(h_TD), row.per_sample)
        return second.add(h_TD, self.after_2(self.mlp(x_TD)), row.per_sample)

    def _modulations(
        self, timestep: TimestepConditioning
    ) -> tuple[AdaLN | Unmodulated, AdaLN | Unmodulated]:
        """Modulations of attention and of feed-forward.

        If both run in parallel, the same one twice. tanh is applied to rows [N, D], before they are
        spread to tokens.
        """
        if self.modulation is None:
            return Unmodulated(), Unmodulated()
        made = self.modulation(timestep)
        first, second = map(self._gated, made[:1] + made[-1:]) if self.tanh else (made[0], made[-1])
        return first, second

    @staticmethod
    def _gated(adaln: AdaLN) -> AdaLN:
        assert adaln.gate_ND is not None
        return replace(adaln, gate_ND=adaln.gate_ND.tanh())


def _modulation(context: BuildContext, width: int, spec: SequentialLayerSpec) -> AdaLNModule:
    vectors: Any = {"parts": 1 if spec.parallel else 2, "shifted": spec.shifted}
    match spec.modulation:
        case SharedModulation(first=first):
            return PrecomputedAdaLN(context.config, first=first, **vectors)
        case TableModulation():
            assert spec.shifted
            return TableAdaLN(context.config, width, parts=2)
        case PerBlockModulation():
            return PerBlockAdaLN(context, width, spec.modulation, **vectors)
    raise AssertionError(f"no modulation {spec.modulation}")


class JointRowLayer(SequentialLayer):
    """A sequential layer over latents and text together."""

    hidden = (JOINT_TOKENS,)

    def row(self, conditions: JointConditions) -> tuple[RowConditions, TokenExchange]:
        return conditions.joint, conditions.order.joined


class LatentsLayer(SequentialLayer):
    """A sequential layer over latents; references with layers of their own do not change."""

    hidden = (TOKENS,)

    def row(self, conditions: JointConditions) -> tuple[RowConditions, TokenExchange]:
        assert conditions.latents_alone is not None
        return conditions.latents, conditions.latents_alone

    def forward(self, h_TD: Tensor, conditions: JointConditions) -> Tensor:
        made_TD, is_reference_T = super().forward(h_TD, conditions), conditions.is_reference_T
        if is_reference_T is None:
            return made_TD
        return torch.where(is_reference_T[:, None], h_TD, made_TD)


class ReferencesLayer(LatentsLayer):
    """A sequential layer over references among the latents, each alone or a sample's together.

    It computes all rows of a pack that has references, so that ranks hold as many as for other
    layers.
    """

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:  # noqa: ARG002
        """All parameters, whatever `recurse` is.

        Before it calls a module, Megatron-Core's DDP waits for the module's own weights that are
        being gathered (`ddp.overlap_param_gather`). Without references the modules in this layer
        are not called, and ranks that have some would gather other weights than ranks without.
        """
        return super().parameters()

    def forward(self, h_TD: Tensor, conditions: JointConditions) -> Tensor:
        is_reference_T = conditions.is_reference_T
        if is_reference_T is None:  # gradients of zeros, which data parallelism waits for
            trained = [weight for weight in self.parameters() if weight.requires_grad]
            nothing = [0 * weight.sum().to(h_TD.dtype) for weight in trained]
            return h_TD + torch.stack(nothing).sum() if nothing else h_TD
        made_TD = SequentialLayer.forward(self, h_TD, conditions)
        return torch.where(is_reference_T[:, None], made_TD, h_TD)


class TextLayer(SequentialLayer):
    """A sequential layer over the text, before it is joined with the latents."""

    hidden = (TEXT_TOKENS,)

    def row(self, conditions: JointConditions) -> tuple[RowConditions, TokenExchange]:
        assert conditions.text_alone is not None
        return conditions.text, conditions.text_alone


LAYERS = {
    RowKind.JOINT: JointRowLayer,
    RowKind.LATENTS: LatentsLayer,
    RowKind.REFERENCES: ReferencesLayer,
    RowKind.TEXT: TextLayer,
}
"""By the row that they work on."""
