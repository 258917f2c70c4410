"""Modules and computations of a layer's parts, as `dit.models.layer_spec.steps` specifies them.

A `RunningPart` creates the modules of a part, which the layer registers by name, and computes an
output for each of its ports.
"""

# T tokens of a row (a stream of tokens) on this rank, D model width

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from dit.batch import Perturbation
from dit.models.layer_spec import Attend, AttendAcross, AttendAndFeed, AttendTo, Feed, Port, QkNorm
from dit.models.layers.across_attention import AcrossAttention, Crossing
from dit.models.layers.context_parallel import TokenExchange
from dit.models.layers.joint_order import JointOrder
from dit.models.layers.modulation import TimestepConditioning
from dit.models.layers.packed_attention import (
    AttendedRows,
    CrossAttention,
    PackedAttention,
    RowConditions,
    SelfAttention,
    joint_attention,
)
from dit.models.layers.parallel_linear import ACTIVATIONS, BuildContext, FeedForward, split_linear
from dit.models.layers.queries_and_keys import hold_key_bias


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerConditions:
    """Inputs of every layer besides the tokens."""

    timestep: TimestepConditioning
    rows: Mapping[str, RowConditions]
    """Rotary angles, timesteps and masks of the tokens of each row, by the name of the row."""
    meetings: Mapping[tuple[str, ...], TokenExchange]
    """The exchange for joint attention among rows, by the tuple of their names."""
    keys: Mapping[str, AttendedRows] = field(default_factory=dict)
    """Encoder states for cross-attention, such as text, by name."""
    crossings: Mapping[str, Crossing] = field(default_factory=dict)
    """Inputs of attention from one row to another, by the name of the row of queries."""
    of_parts: Mapping[str, Any] = field(default_factory=dict)
    """Inputs that only parts of one family use, by name."""
    perturbation: Perturbation | None = None
    """Attention that this pass leaves out; None: nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JointConditions(LayerConditions):
    """Inputs of layers in which latents and text attend to each other."""

    order: JointOrder
    # bool, whether each latent token of this tensor rank is a reference's; None: no references
    is_reference_T: Tensor | None = None


class RunningPart:
    """Base of the modules and computations of a part of one layer; `part` is its specification."""

    def __init__(self, part: Any, idle: Collection[Port] = ()):
        """Stores the specification; `idle` are the layer's ports whose output is never used."""
        self.part, self.idle = part, idle

    @property
    def ports(self) -> tuple[Port, ...]:
        return self.part.ports

    @property
    def is_idle(self) -> bool:
        """Whether no output of the part is used."""
        return all(port in self.idle for port in self.ports)

    @property
    def idle_modules(self) -> Sequence[str]:
        """Names of the part's modules that are not called, because their outputs are never used."""
        return [port.module for port in self.ports if port in self.idle]

    @property
    def unused(self) -> Sequence[str]:
        """Name patterns of the part's weights whose gradient is zero for every pack."""
        return [f"{name}.*" for name in self.idle_modules]

    def modules(self, context: BuildContext) -> dict[str, nn.Module]:  # noqa: ARG002
        """The part's modules by name, in the order of registration."""
        return {}

    def outputs(
        self, layer: nn.Module, inputs: Sequence[Tensor], conditions: LayerConditions
    ) -> Sequence[Tensor | None]:
        """The output [T, D] for each port, which is added to its row; None: nothing is added.

        `inputs` has the tokens [T, D] of each port, normalised, scaled and shifted.
        """
        raise NotImplementedError


class SelfAttending(RunningPart):
    """Self-attention over one row, or joint attention over two rows.

    If the output of a row is never used, it is not computed, but tokens of the other row still
    attend to this row.
    """

    part: Attend

    def _makes_output(self, port: Port) -> bool:
        return port.writes and port not in self.idle

    @property
    def idle_modules(self) -> Sequence[str]:
        idle = [port.module for port in self.ports if port.writes and port in self.idle]
        return [f"{name}.linear_proj" for name in idle]

    @property
    def unused(self) -> Sequence[str]:
        queries = [port.module for port in self.ports if not self._makes_output(port)]
        return [*super().unused, *(f"{name}.q_layernorm.*" for name in queries)]

    def attention(self, context: BuildContext, *, output: bool) -> SelfAttention:
        """The attention module of a row, with or without (`output`) an output linear."""
        in_one_kernel = self.part.in_one_kernel
        return SelfAttention(
            context, self.part.attention, output=output, in_one_kernel=in_one_kernel
        )

    def modules(self, context: BuildContext) -> dict[str, nn.Module]:
        found, spec = dict[str, nn.Module](), self.part.attention
        for port in self.ports:
            of_row = replace(context, token_row=port.row)
            found[port.module] = made = self.attention(of_row, output=port.writes)
            if self.part.joined is None and spec.norm is QkNorm.NONE and spec.bias:
                # Not for joint attention of two rows: their keys have different biases, so these
                # biases have an effect.
                linear: Any = made.linear_qkv
                hold_key_bias(linear.bias, spec.head_width)
        return found

    def outputs(
        self, layer: Any, inputs: Sequence[Tensor], conditions: LayerConditions
    ) -> Sequence[Tensor | None]:
        ports = self.ports
        exchange = conditions.meetings[tuple(port.row for port in ports)]
        modules = [getattr(layer, port.module) for port in ports]
        rows = [conditions.rows[port.row] for port in ports]
        if self.part.joined is None:
            left_out = conditions.perturbation
            if left_out is not None and layer.layer_number - 1 in left_out.value_layers:
                return (modules[0].of_values(*inputs, rows[0]),)
            return (modules[0](*inputs, rows[0], exchange),)
        first, second = zip(modules, inputs, rows, strict=True)
        attended = zip(ports, modules, joint_attention(first, second, exchange), strict=True)
        return [
            module.linear_proj(x_TX) if self._makes_output(port) else None
            for port, module, x_TX in attended
        ]


class AttendingAcross(RunningPart):
    """Attention of one row's tokens to those of another row, such as of latents to sound."""

    part: AttendAcross

    def modules(self, context: BuildContext) -> dict[str, nn.Module]:
        port = self.part.port
        return {port.module: AcrossAttention(replace(context, token_row=port.row), self.part)}

    def outputs(
        self, layer: nn.Module, inputs: Sequence[Tensor], conditions: LayerConditions
    ) -> Sequence[Tensor | None]:
        if conditions.perturbation is not None and conditions.perturbation.isolated:
            return None, None
        port = self.part.port
        return getattr(layer, port.module)(*inputs, conditions.crossings[port.row]), None


class CrossAttending(RunningPart):
    """Cross-attention of a row's tokens to encoder states, which the layer does not change."""

    part: AttendTo

    def modules(self, context: BuildContext) -> dict[str, nn.Module]:
        port, keys = self.part.port, self.part.keys
        sizes: Any = {"text_width": keys[0].width, "image": len(keys) > 1}
        context = replace(context, token_row=port.row)
        return {port.module: CrossAttention(context, self.part.attention, **sizes)}

    def outputs(
        self, layer: nn.Module, inputs: Sequence[Tensor], conditions: LayerConditions
    ) -> Sequence[Tensor]:
        port = self.part.port
        attended = [conditions.keys[rows.name] for rows in self.part.keys]
        fused = conditions.rows[port.row].per_sample.fused
        return (getattr(layer, port.module)(*inputs, *attended, fused=fused),)


class Feeding(RunningPart):
    """A feed-forward on the tokens of a row."""

    part: Feed

    def modules(self, context: BuildContext) -> dict[str, nn.Module]:
        port = self.part.port
        context = replace(context, token_row=port.row)
        return {port.module: FeedForward(context, self.part.feed_forward)}

    def outputs(
        self,
        layer: nn.Module,
        inputs: Sequence[Tensor],
        conditions: LayerConditions,  # noqa: ARG002
    ) -> Sequence[Tensor]:
        return (getattr(layer, self.part.port.module)(*inputs),)


class AttendingAndFeeding(RunningPart):
    """Attention and feed-forward in parallel on the same tokens, by two linears.

    The arithmetic is that of Diffusers' `FluxSingleTransformerBlock`. Tensor ranks gather inputs
    and sum outputs once for both. The linears are ordered head by head, each head with some of the
    hidden units, so that any number of tensor ranks that divides the heads divides the linears.
    """

    part: AttendAndFeed

    @property
    def each_head(self) -> tuple[int, ...]:
        """Numbers of outputs of the first linear for each head: (q, k, v, hidden units)."""
        attention, mlp = self.part.attention, self.part.feed_forward
        wide = mlp.hidden * mlp.activation.inputs // attention.heads
        return *(attention.head_width,) * 3, wide

    def modules(self, context: BuildContext) -> dict[str, nn.Module]:
        attention, mlp = self.part.attention, self.part.feed_forward
        width, hidden, heads = attention.width, mlp.hidden, attention.heads
        if hidden % heads:
            raise ValueError(
                f"the feed-forward of a single-stream layer has {hidden} hidden units, which must"
                f" be a multiple of its {heads} heads; change model.mlp_ratio"
            )
        context = replace(context, token_row=self.part.port.row)
        options: Any = {"context": context, "bias": attention.bias}
        made, parts = heads * sum(self.each_head), 1 if self.part.fused else 4
        return {
            "attention": PackedAttention(context, attention, output=False),
            "linear_in": split_linear(width, made, axis=0, **options, parts=parts),
            "linear_out": split_linear(width + hidden, width, axis=1, **options),
        }

    def outputs(
        self, layer: Any, inputs: Sequence[Tensor], conditions: LayerConditions
    ) -> Sequence[Tensor]:
        (x_TD,), name = inputs, self.part.port.row
        row, exchange = conditions.rows[name], conditions.meetings[(name,)]
        x_THX = layer.linear_in(x_TD).unflatten(-1, (-1, sum(self.each_head)))
        q, k, v, wide_THF = layer.attention.positioned_parts(x_THX, self.each_head, row)
        attended_THK = layer.attention.exchanged((q, k, v), exchange)
        parts = attended_THK, ACTIVATIONS[self.part.feed_forward.activation](wide_THF)
        return (layer.linear_out(torch.cat(parts, dim=-1).flatten(1)),)
