"""A layer of steps: `LayerSpec` says what it computes."""

# T tokens of a row as this rank holds them, D model width

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any

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
from dit.models.layer_spec import LayerSpec, Modulation, Port, RowNorm
from dit.models.layers.adaptable import sees_part_of_tokens
from dit.models.layers.modulation import AdaLN, TimestepConditioning, make_modulation
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
        unread: tuple[str, ...] = (),
    ):
        """`unread` are the rows that nothing reads behind the last layer of the stack."""
        super().__init__(config=config)
        offset = get_transformer_layer_offset(config, vp_stage, pg_collection.pp.rank())
        self.layer_number = layer_number + offset  # 1-based, over all stages
        self.spec = spec
        idle = spec.idle(unread if self.layer_number == config.num_layers else ())
        self.steps: list[list[RunningPart]] = [
            [resolve_name(part.runs)(part, idle) for part in step] for step in spec.groups
        ]
        self.view: Any = None if spec.view is None else resolve_name(spec.view.runs)(spec.view)
        context = BuildContext(model=model, config=config, groups=pg_collection)
        for name, module in self._made_modules(context):
            setattr(self, name, module)

    @property
    def parts(self) -> list[RunningPart]:
        return [part for step in self.steps for part in step]

    @property
    def unused(self) -> tuple[str, ...]:
        """Patterns of names of weights here whose gradient is zero in any pack."""
        return tuple(pattern for part in self.parts for pattern in part.unused)

    def _made_modules(self, context: BuildContext) -> Iterator[tuple[str, nn.Module]]:
        """The modules by name, those of each step after the other, as they register."""
        seen, place, width = set[str](), self.layer_number - 1, context.config.hidden_size
        for step in self.steps:
            ports = [(port, part.part.width) for part in step for port in part.ports]
            for port, width in ports:
                if port.slot is not None and port.slot.modulation.name not in seen:
                    seen.add(port.slot.modulation.name)
                    yield self._modulation(port.slot.modulation, context, width)
            for port, width in ports:
                if port.norm is not None:
                    yield port.norm.name, _norm(port.norm, context, width)
            for part in step:
                yield from part.modules(context).items()
        if self.view is not None:
            yield from self.view.modules(context, width, place).items()

    def _modulation(
        self, modulation: Modulation, context: BuildContext, width: int
    ) -> tuple[str, nn.Module]:
        ports = self.spec.modulations[modulation]
        slots = 1 + max(port.slot.number for port in ports if port.slot is not None)
        gated, place = any(port.writes for port in ports), self.layer_number - 1
        options: Any = {"parts": slots, "gated": gated, "layer": place}
        return modulation.name, make_modulation(modulation.kind, context, width, **options)

    def forward(self, hidden: Any, conditions: Any) -> Any:
        """`hidden` is the row [T, D] of the layer, or one tensor for each of its rows."""
        several = isinstance(hidden, tuple)
        whole = dict(zip(self.spec.rows, hidden if several else (hidden,), strict=True))
        if self.view is None:
            made = self._made(whole, conditions)
        else:
            name = self.view.view.row
            seen = self.view.seen(self, whole[name], conditions)
            made = self._made(whole | {name: seen}, conditions)
            made |= {name: self.view.written(made[name], whole[name], conditions)}
        return tuple(made.values()) if several else made.popitem()[1]

    def _made(self, hidden: dict[str, Tensor], conditions: LayerConditions) -> dict[str, Tensor]:
        rows = {name: _Row(h_TD, conditions.rows[name]) for name, h_TD in hidden.items()}
        slots = self._slots(conditions.timestep)
        for step in self.steps:
            running = [part for part in step if not part.is_idle]
            entered = [
                [rows[port.row].entered(slots(port), self._norm_of(port)) for port in part.ports]
                for part in running
            ]
            for part, inputs in zip(running, entered, strict=True):
                outputs = part.outputs(self, inputs, conditions)
                for port, x_TD in zip(part.ports, outputs, strict=True):
                    if x_TD is not None:
                        rows[port.row].take(slots(port), x_TD)
        return {name: row.added() for name, row in rows.items()}

    def _slots(self, timestep: TimestepConditioning) -> Callable[[Port], AdaLN | None]:
        """Scale, shift and gate of each port."""
        made = {one.name: getattr(self, one.name)(timestep) for one in self.spec.modulations}
        if idle := [name for part in self.parts for name in part.idle_modules]:
            name, (*others, last) = next(iter(made.items()))
            made[name] = *others, self._tied(last, idle)

        def of(port: Port) -> AdaLN | None:
            return None if port.slot is None else made[port.slot.modulation.name][port.slot.number]

        return of

    def _tied(self, adaln: AdaLN, idle: Sequence[str]) -> AdaLN:
        """`adaln` with idle weights tied to it: they add nothing, and their gradients are zeros.

        Otherwise they would have none: Megatron-Core's DDP waits for the gradient of every weight.
        """
        idle_weights = (weight for name in idle for weight in self.get_submodule(name).parameters())
        weights = [weight.sum() for weight in idle_weights if weight.requires_grad]
        if not weights:
            return adaln
        return replace(adaln, scale_ND=adaln.scale_ND + 0 * torch.stack(weights).sum())

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
