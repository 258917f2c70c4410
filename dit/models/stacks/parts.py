"""What the parts of layers compute; `dit.models.layer_spec.steps` says what there are.

A part makes modules, which the layer registers by their names, and gives an output for each of its
ports.
"""

# T tokens of a row as this rank holds them, D model width

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from dit.models.layer_spec import Attend, AttendTo, Feed
from dit.models.layers.context_parallel import TokenExchange
from dit.models.layers.experts import feed_forward
from dit.models.layers.modulation import TimestepConditioning
from dit.models.layers.packed_attention import (
    AttendedRows,
    CrossAttention,
    RowConditions,
    SelfAttention,
)
from dit.models.layers.parallel_linear import BuildContext


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerConditions:
    """What every layer sees beside the tokens."""

    timestep: TimestepConditioning
    rows: Mapping[str, RowConditions]
    """By the name of the row."""
    meetings: Mapping[tuple[str, ...], TokenExchange]
    """Who attends to whom, by the rows that attend to each other."""
    keys: Mapping[str, AttendedRows] = field(default_factory=dict)
    """Rows that others attend to and no layer changes."""
    of_parts: Mapping[str, Any] = field(default_factory=dict)
    """What parts of one family alone read."""


class RunningPart:
    """A part of one layer."""

    def __init__(self, part: Any):
        self.part = part

    def modules(self, context: BuildContext) -> dict[str, nn.Module]:  # noqa: ARG002
        """Its modules by name, in the order in which they register."""
        return {}

    def outputs(
        self, layer: nn.Module, inputs: Sequence[Tensor], conditions: LayerConditions
    ) -> Sequence[Tensor]:
        """What is added to the row of each port, of the tokens [T, D] that enter it."""
        raise NotImplementedError


class SelfAttending(RunningPart):
    """Tokens of a row attend to those of their sample."""

    part: Attend

    def modules(self, context: BuildContext) -> dict[str, nn.Module]:
        (port,) = self.part.ports
        context = replace(context, token_row=port.row)
        return {port.module: SelfAttention(context, self.part.attention)}

    def outputs(
        self, layer: nn.Module, inputs: Sequence[Tensor], conditions: LayerConditions
    ) -> Sequence[Tensor]:
        (port,) = self.part.ports
        attention = getattr(layer, port.module)
        row, exchange = conditions.rows[port.row], conditions.meetings[(port.row,)]
        return (attention(*inputs, row, exchange),)


class CrossAttending(RunningPart):
    """Tokens of a row attend to rows that the layer does not change."""

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
    """The feed-forward of a row."""

    part: Feed

    def modules(self, context: BuildContext) -> dict[str, nn.Module]:
        port = self.part.port
        context = replace(context, token_row=port.row)
        return {port.module: feed_forward(context, self.part.feed_forward)}

    def outputs(
        self,
        layer: nn.Module,
        inputs: Sequence[Tensor],
        conditions: LayerConditions,  # noqa: ARG002
    ) -> Sequence[Tensor]:
        return (getattr(layer, self.part.port.module)(*inputs),)
