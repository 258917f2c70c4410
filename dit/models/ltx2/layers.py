"""Modules of LTX-2's layers: modulation by tables, and attention to captions.

A table is added to vectors of the timestep. In versions with tables for captions, each layer scales
and shifts the caption states.
"""

# T tokens of a stream on this rank, L text tokens, M timesteps, D any width
# R rows of a table

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from dit.models.layers.adaptable import sees_part_of_tokens
from dit.models.layers.modulation import AdaLN, AdaLNModule, TimestepConditioning
from dit.models.layers.parallel_linear import BuildContext
from dit.models.layers.per_sample import PerSample
from dit.models.ltx2.family import AttendToCaption, TableRows
from dit.models.stacks.parts import CrossAttending, LayerConditions

CAPTIONS = "captions"
"""Key in `LayerConditions.of_parts`: maps the name of a text to the samples of its tokens."""


class SlotTable(AdaLNModule):
    """Modulation by a table [R, D] plus shared vectors [M, R * D], in float32.

    Each slot uses some of the R rows (`TableRows.slots`).
    """

    def __init__(
        self, context: BuildContext, width: int, spec: TableRows, *, of_tokens: bool = True
    ):
        """Creates the table; `of_tokens` says whether tensor ranks may divide the scaled tokens."""
        super().__init__(context.config, parts=len(spec.slots))
        self.spec = spec
        rows = torch.zeros(spec.rows, width, dtype=context.config.params_dtype)
        self.table = nn.Parameter(rows)
        if of_tokens:
            sees_part_of_tokens(self, context.config)

    def forward(self, timestep: TimestepConditioning) -> tuple[AdaLN, ...]:
        table_RD = self.table.float()
        shared_MX = timestep.of_rows.get(self.spec.shared)
        if shared_MX is None:  # one row for all timesteps
            rows = table_RD[:, None].unbind()
        else:
            shared_MRD = shared_MX.float().unflatten(1, table_RD.shape)
            rows = (shared_MRD + table_RD).unbind(1)
        return tuple(
            AdaLN(
                shift_ND=rows[shift],
                scale_ND=rows[scale],
                gate_ND=None if gate is None else rows[gate],
            )
            for shift, scale, gate in self.spec.slots
        )


class CaptionAttending(CrossAttending):
    """Runs cross-attention to caption states, which the layer may scale and shift."""

    part: AttendToCaption  # type: ignore[reportIncompatibleVariableOverride]

    def modules(self, context: BuildContext) -> dict[str, nn.Module]:
        made, table = super().modules(context), self.part.table
        if table is not None:
            assert isinstance(table.kind, TableRows)
            width = self.part.keys[0].width
            made[table.name] = SlotTable(context, width, table.kind, of_tokens=False)
        return made

    def outputs(
        self, layer: nn.Module, inputs: Sequence[Tensor], conditions: LayerConditions
    ) -> Sequence[Tensor]:
        table = self.part.table
        if table is None:
            return super().outputs(layer, inputs, conditions)
        (keys,) = self.part.keys
        text = conditions.keys[keys.name]
        (adaln,) = getattr(layer, table.name)(conditions.timestep)
        owners: Mapping[str, PerSample] = conditions.of_parts[CAPTIONS]
        text = replace(text, rows_LE=adaln.scaled(text.rows_LE, owners[keys.name]))
        fused = conditions.rows[self.part.port.row].per_sample.fused
        return (getattr(layer, self.part.port.module)(*inputs, text, fused=fused),)
