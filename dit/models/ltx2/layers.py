"""What LTX-2's layers have beside those of others: tables, captions, and the other stream."""

# T tokens of a row as this rank holds them, S tokens of the row that is asked, L text tokens
# M level rows, H heads, K head width, D any width, R rows of a table

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dit.models.layer_spec import TOKENS
from dit.models.layers.adaptable import sees_part_of_tokens
from dit.models.layers.context_parallel import RowExchange
from dit.models.layers.modulation import AdaLN, AdaLNModule, TimestepConditioning
from dit.models.layers.packed_attention import Angles, PackedAttention
from dit.models.layers.parallel_linear import BuildContext, split_linear
from dit.models.layers.per_sample import PerSample
from dit.models.layers.queries_and_keys import rotate
from dit.models.ltx2.family import AttendAcross, AttendToCaption, TableRows
from dit.models.stacks.parts import CrossAttending, LayerConditions, RunningPart

BETWEEN, CAPTIONS = "between streams", "captions"
"""What the parts here read in `LayerConditions.of_parts`."""


class SlotTable(AdaLNModule):
    """A table [R, D] plus shared rows [M, R D], in float32, whose rows are shared out to slots."""

    def __init__(
        self, context: BuildContext, width: int, spec: TableRows, *, of_tokens: bool = True
    ):
        """`of_tokens` says that tensor ranks may share out the rows that it scales."""
        super().__init__(context.config, parts=len(spec.slots))
        self.spec = spec
        rows = torch.zeros(spec.rows, width, dtype=context.config.params_dtype)
        self.table = nn.Parameter(rows)
        if of_tokens:
            sees_part_of_tokens(self, context.config)

    def forward(self, timestep: TimestepConditioning) -> tuple[AdaLN, ...]:
        table_RD = self.table.float()
        shared_MX = timestep.of_rows.get(self.spec.shared)
        if shared_MX is None:  # one row, of any level
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
    """Tokens attend to their caption, whose rows the layer may scale and shift."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class BetweenStreams:
    """What the attention between the streams reads."""

    exchanges: Mapping[str, RowExchange]
    """How rows meet, by the one that asks."""
    angles: Mapping[str, Angles]
    """Angles of each row, by the seconds of its tokens."""
    hears_T1: Tensor | None
    """float32, of the latents between two matrices: whether their sample has a sound; None: all
    have."""


class AcrossAttention(PackedAttention):
    """Attention of the tokens of one stream to those of the other one, of another width."""

    def __init__(self, context: BuildContext, part: AttendAcross):
        spec, (width, key_width) = part.attention, part.widths
        inner = spec.width
        super().__init__(context, replace(spec, head_gate=False), output=False)
        of_keys = replace(context, token_row=part.keys.row)
        options: Any = {"context": context, "bias": spec.bias}
        self.linear_q = split_linear(width, inner, axis=0, **options)
        of_both: Any = {"context": of_keys, "bias": spec.bias, "parts": 2}
        self.linear_kv = split_linear(key_width, 2 * inner, axis=0, **of_both)
        self.linear_proj = split_linear(inner, width, axis=1, **options)
        if spec.head_gate:
            self.linear_heads = split_linear(width, spec.heads, axis=0, **options)

    def forward(
        self,
        x_TD: Tensor,
        y_SD: Tensor,
        exchange: RowExchange,
        angles: tuple[Angles, Angles],
    ) -> Tensor:
        """The output [T, D] for tokens `x_TD` that ask and `y_SD` that are asked."""
        heads = self.linear_q(x_TD), self.linear_kv(y_SD)
        q, kv = (made.unflatten(-1, (-1, n * self.head_width)) for n, made in enumerate(heads, 1))
        k, v = kv.chunk(2, dim=-1)
        q, k = (rotate(one, *own) for one, own in zip(self.normalised(q, k), angles, strict=True))
        out_THK = self.context.attend_across(self.attend, q, (k, v), exchange)
        return self.linear_proj(self.gated(out_THK, x_TD).flatten(1))


class AcrossAttending(RunningPart):
    """Tokens of one stream attend to those of the other one; without any, nothing is added."""

    part: AttendAcross

    def modules(self, context: BuildContext) -> dict[str, nn.Module]:
        port = self.part.port
        return {port.module: AcrossAttention(replace(context, token_row=port.row), self.part)}

    def outputs(
        self, layer: nn.Module, inputs: Sequence[Tensor], conditions: LayerConditions
    ) -> Sequence[Tensor | None]:
        between: BetweenStreams = conditions.of_parts[BETWEEN]
        rows = [port.row for port in self.part.ports]
        angles = between.angles[rows[0]], between.angles[rows[1]]
        module = getattr(layer, self.part.port.module)
        out_TD = module(*inputs, between.exchanges[rows[0]], angles)
        if between.hears_T1 is not None and rows[0] == TOKENS:
            out_TD = out_TD * between.hears_T1.to(out_TD.dtype)
        return out_TD, None
