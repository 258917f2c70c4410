"""A layer of steps: `LayerSpec` says what it computes."""

# T tokens of a row as this rank holds them, D model width

from __future__ import annotations

from collections.abc import Iterator
from pkgutil import resolve_name
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    BaseTransformerLayer,
    get_transformer_layer_offset,
)
from torch import Tensor, nn

from dit.config import ModelConfig
from dit.models.layer_spec import LayerSpec, Port, RowNorm
from dit.models.layers.adaptable import sees_part_of_tokens
from dit.models.layers.modulation import AdaLN, make_modulation
from dit.models.layers.packed_attention import RowConditions
from dit.models.layers.parallel_linear import BuildContext
from dit.models.stacks.parts import LayerConditions, RunningPart


class StepLayer(MegatronModule, BaseTransformerLayer):
    """The steps of a `LayerSpec`, one after the other, over the rows that they name."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        spec: LayerSpec,
        model: ModelConfig,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        vp_stage: int | None = None,
    ):
        super().__init__(config=config)
        offset = get_transformer_layer_offset(config, vp_stage, pg_collection.pp.rank())
        self.layer_number = layer_number + offset  # 1-based, over all stages
        self.spec = spec
        self.parts: list[RunningPart] = [resolve_name(part.runs)(part) for part in spec.steps]
        context = BuildContext(model=model, config=config, groups=pg_collection)
        for name, module in self._modules_of_steps(context):
            setattr(self, name, module)
        slots = [port.slot for port in spec.ports if port.slot is not None]
        self.modulations = tuple(dict.fromkeys(slot.modulation.name for slot in slots))

    def _modules_of_steps(self, context: BuildContext) -> Iterator[tuple[str, nn.Module]]:
        """The modules by name, each step after the other, in the order in which they register."""
        seen = set()
        for part in self.parts:
            ports = part.part.ports
            for port in ports:
                made = None if port.slot is None else port.slot.modulation
                if made is not None and made.name not in seen:
                    seen.add(made.name)
                    slots = self.spec.slots(made)
                    yield (
                        made.name,
                        make_modulation(made.kind, context, part.part.width, parts=slots),
                    )
            for port in ports:
                if port.norm is not None:
                    yield port.norm.name, _norm(port.norm, context, part.part.width)
            yield from part.modules(context).items()

    def forward(self, hidden: Any, conditions: LayerConditions) -> Any:
        """`hidden` is the one row [T, D] of the layer."""
        (name,) = self.spec.rows
        row = _Row(hidden, conditions.rows[name])
        made = {name: getattr(self, name)(conditions.timestep) for name in self.modulations}
        for part in self.parts:
            (port,) = part.part.ports
            adaln = None if port.slot is None else made[port.slot.modulation.name][port.slot.number]
            x_TD = row.entered(adaln, self._norm_of(port))
            (x_TD,) = part.outputs(self, [x_TD], conditions)
            row.take(adaln, x_TD)
        return row.added()

    def _norm_of(self, port: Port) -> nn.Module | None:
        return None if port.norm is None else getattr(self, port.norm.name)


class _Row:
    """The tokens of a row, and the last output for it, which waits to be added.

    With the norm of the next part the sum is one kernel, where kernels are fused.
    """

    def __init__(self, h_TD: Tensor, conditions: RowConditions):
        self.h_TD, self.per_sample = h_TD, conditions.per_sample
        self.waiting: tuple[AdaLN, Tensor] | None = None

    def entered(self, adaln: AdaLN | None, norm: nn.Module | None) -> Tensor:
        """The tokens as they enter a port: normed, scaled and shifted."""
        if adaln is None:
            h_TD = self.added()
            return h_TD if norm is None else norm(h_TD)
        if self.waiting is None:
            self.h_TD, x_TD = adaln.branch(self.h_TD, self.per_sample)
            return x_TD
        (last, x_TD), self.waiting = self.waiting, None
        self.h_TD, x_TD = last.add_and_branch(self.h_TD, x_TD, self.per_sample, then=adaln)
        return x_TD

    def take(self, adaln: AdaLN | None, x_TD: Tensor) -> None:
        """Adds an output of a part: at once without a gate, else with the next norm."""
        h_TD = self.added()
        if adaln is None:
            self.h_TD = h_TD + x_TD
        else:
            self.waiting = (adaln, x_TD)

    def added(self) -> Tensor:
        """The tokens with all outputs."""
        if self.waiting is not None:
            (last, x_TD), self.waiting = self.waiting, None
            self.h_TD = last.add(self.h_TD, x_TD, self.per_sample)
        return self.h_TD


def _norm(norm: RowNorm, context: BuildContext, width: int) -> nn.Module:
    made = nn.LayerNorm(width, eps=norm.eps, dtype=context.config.params_dtype)
    sees_part_of_tokens(made, context.config)
    return made
