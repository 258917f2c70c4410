"""A layer that is built from its `LayerSpec`."""
# T tokens of a row (a stream of tokens) on this rank, D model width

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
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
from dit.models.layer_spec import LayerSpec, Modulation, NormKind, Port, RowNorm
from dit.models.layers.adaptable import sees_part_of_tokens
from dit.models.layers.modulation import AdaLN, TimestepConditioning, make_modulation
from dit.models.layers.packed_attention import RowConditions
from dit.models.layers.parallel_linear import BuildContext
from dit.models.layers.queries_and_keys import CentredNorm
from dit.models.stacks.parts import LayerConditions, RunningPart
from dit.models.stacks.views import RunningView


class StepLayer(MegatronModule, BaseTransformerLayer):
    """A layer that runs the steps of a `LayerSpec` in order."""

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
        """Builds the modules of `spec`; `unread` are rows that are not used after the stack."""
        super().__init__(config=config)
        offset = get_transformer_layer_offset(config, vp_stage, pg_collection.pp.rank())
        self.layer_number = layer_number + offset  # 1-based, over all stages
        self.spec = spec
        idle = spec.idle(unread if self.layer_number == config.num_layers else ())
        self.steps: list[list[RunningPart]] = [
            [resolve_name(part.runs)(part, idle) for part in step] for step in spec.groups
        ]
        self.running = [[part for part in step if not part.is_idle] for step in self.steps]
        self.idle = [name for part in self.parts for name in part.idle_modules]
        self.view: RunningView | None = None
        if spec.view is not None:
            self.view = resolve_name(spec.view.runs)(spec.view)
        self.rows, self.modulations = spec.rows, tuple(spec.modulations)
        context = BuildContext(model=model, config=config, groups=pg_collection)
        for name, module in self._made_modules(context):
            setattr(self, name, module)

    @property
    def parts(self) -> list[RunningPart]:
        return [part for step in self.steps for part in step]

    @property
    def unused(self) -> tuple[str, ...]:
        """Name patterns of weights in this layer whose gradient is zero for every pack."""
        return tuple(pattern for part in self.parts for pattern in part.unused)

    def _made_modules(self, context: BuildContext) -> Iterator[tuple[str, nn.Module]]:
        """The layer's modules by name, in the order of registration."""
        made, modulations = set[Modulation](), self.spec.modulations
        for step in [self.parts] if self.spec.norms_first else self.steps:
            ports = [(port, part.part) for part in step for port in part.ports]
            for port, part in ports:
                modulation = None if port.slot is None else port.slot.modulation
                if modulation is not None and modulation not in made:
                    width = part.width_of(port)
                    made.add(modulation)
                    users = modulations[modulation]
                    yield modulation.name, self._modulation(modulation, users, context, width)
            for port, part in ports:
                if port.norm is not None:
                    yield port.norm.name, _made_norm(port.norm, context, part.width_of(port))
            for running in step:
                yield from running.modules(context).items()
            for port, part in ports:
                if port.after is not None:
                    yield port.after.name, _made_norm(port.after, context, part.width_of(port))
        if self.view is not None:
            width, place = self.parts[0].part.width, self.layer_number - 1
            yield from self.view.modules(context, width, place).items()

    def _modulation(
        self, modulation: Modulation, ports: Sequence[Port], context: BuildContext, width: int
    ) -> nn.Module:
        """The module that computes scale, shift and gate for `ports`."""
        return make_modulation(
            modulation.kind,
            context,
            width,
            parts=1 + max(port.slot.number for port in ports if port.slot is not None),
            gated=any(port.writes for port in ports),
            shifted=modulation.shifted,
            layer=self.layer_number - 1,
        )

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The layer's own parameters, or with `recurse` also those of its modules.

        For a layer that may be skipped, because a pack lacks its tokens, it always yields all
        parameters. Before each call of a module, Megatron-Core's DDP waits until the module's own
        parameters are gathered (`ddp.overlap_param_gather`). In a skipped layer no modules are
        called; so ranks that skip it would gather other parameters than ranks that do not.
        """
        whole = self.view is not None and self.view.may_be_absent
        return super().parameters(recurse or whole)

    def forward(self, hidden: Any, conditions: Any) -> Any:
        """`hidden` after the layer: the tensor [T, D] of its row, or a tuple for several rows."""
        several = isinstance(hidden, tuple)
        whole = dict(zip(self.rows, hidden if several else (hidden,), strict=True))
        if self.view is None:
            made = self._made(whole, conditions)
        elif self.view.is_absent(conditions):
            made = {name: self._untouched(h_TD) for name, h_TD in whole.items()}
        else:
            name = self.view.view.row
            seen = self.view.seen(self, whole[name], conditions)
            made = self._made(whole | {name: seen}, conditions)
            made |= {name: self.view.written(made[name], whole[name], conditions)}
        return tuple(made.values()) if several else made.popitem()[1]

    def _made(self, hidden: dict[str, Tensor], conditions: LayerConditions) -> dict[str, Tensor]:
        rows = {name: _OpenRow(h_TD, conditions.rows[name]) for name, h_TD in hidden.items()}
        slots = self._slots(conditions.timestep)

        def slot(port: Port) -> AdaLN | None:
            return None if port.slot is None else slots[port.slot.modulation.name][port.slot.number]

        for step in self.running:
            entered = [
                [rows[port.row].entered(slot(port), self._norm(port.norm)) for port in part.ports]
                for part in step
            ]
            for part, inputs in zip(step, entered, strict=True):
                outputs = part.outputs(self, inputs, conditions)
                for port, x_TD in zip(part.ports, outputs, strict=True):
                    if x_TD is not None:
                        rows[port.row].take(slot(port), x_TD, self._norm(port.after))
        return {name: row.added() for name, row in rows.items()}

    def _norm(self, norm: RowNorm | None) -> nn.Module | None:
        return None if norm is None else getattr(self, norm.name)

    def _slots(self, timestep: TimestepConditioning) -> dict[str, tuple[AdaLN, ...]]:
        """The scales, shifts and gates of all slots of each modulation, by its name."""
        made = {one.name: self._rows_of(one, timestep) for one in self.modulations}
        if self.idle:
            name, (*others, last) = next(iter(made.items()))
            made[name] = *others, self._tied(last)
        return made

    def _rows_of(self, modulation: Modulation, timestep: TimestepConditioning) -> tuple[AdaLN, ...]:
        """The scale, shift and gate of each slot of `modulation`, for each timestep.

        Tanh is applied to gates here, because there are fewer timesteps than tokens.
        """
        made = getattr(self, modulation.name)(timestep)
        if not modulation.tanh:
            return made
        return tuple(replace(one, gate_ND=one.gate_ND.tanh()) for one in made)

    def _tied(self, adaln: AdaLN) -> AdaLN:
        """`adaln`, connected to the unused weights, so that they get zero gradients.

        Megatron-Core's DDP waits for a gradient of every weight.
        """
        modules = (self.get_submodule(name) for name in self.idle)
        idle_weights = (weight for module in modules for weight in module.parameters())
        weights = [weight.sum() for weight in idle_weights if weight.requires_grad]
        if not weights:
            return adaln
        return replace(adaln, scale_ND=adaln.scale_ND + 0 * torch.stack(weights).sum())

    def _untouched(self, h_TD: Tensor) -> Tensor:
        """`h_TD` unchanged, but connected to all trained weights, so that they get zero gradients.

        Megatron-Core's DDP waits for a gradient of every weight.
        """
        trained = [weight for weight in self.parameters() if weight.requires_grad]
        nothing = [0 * weight.sum().to(h_TD.dtype) for weight in trained]
        return h_TD + torch.stack(nothing).sum() if nothing else h_TD


class _OpenRow:
    """The tokens of a row, and possibly the output of a part that is not yet added to them.

    The output is added together with the next norm, in one kernel if kernels are fused.
    """

    def __init__(self, h_TD: Tensor, conditions: RowConditions):
        self.h_TD, self.per_sample = h_TD, conditions.per_sample
        self.waiting: tuple[AdaLN, Tensor] | None = None

    def entered(self, adaln: AdaLN | None, norm: nn.Module | None) -> Tensor:
        """The input [T, D] of a port's module: the tokens, normalised, scaled and shifted."""
        if adaln is None or norm is not None:
            h_TD = self.added()
            x_TD = h_TD if norm is None else norm(h_TD)
            return x_TD if adaln is None else adaln.scaled(x_TD, self.per_sample)
        if self.waiting is None:
            self.h_TD, x_TD = adaln.branch(self.h_TD, self.per_sample)
            return x_TD
        (last, x_TD), self.waiting = self.waiting, None
        self.h_TD, x_TD = last.add_and_branch(self.h_TD, x_TD, self.per_sample, then=adaln)
        return x_TD

    def take(self, adaln: AdaLN | None, x_TD: Tensor, after: nn.Module | None) -> None:
        """Adds the output `x_TD` of a part to the tokens, after the norm `after` if there is one.

        With `adaln`, the output is gated, and added only when the tokens are read next.
        """
        h_TD, x_TD = self.added(), x_TD if after is None else after(x_TD)
        if adaln is None:
            self.h_TD = h_TD + x_TD
        else:
            self.waiting = (adaln, x_TD)

    def added(self) -> Tensor:
        """The tokens [T, D], with all outputs of parts added."""
        if self.waiting is not None:
            (last, x_TD), self.waiting = self.waiting, None
            self.h_TD = last.add(self.h_TD, x_TD, self.per_sample)
        return self.h_TD


_NORMS: Mapping[NormKind, Callable[..., nn.Module]] = {
    NormKind.LAYER: nn.LayerNorm,
    NormKind.RMS: nn.RMSNorm,
    NormKind.CENTRED: CentredNorm,
    NormKind.BARE: partial(nn.RMSNorm, elementwise_affine=False),
}


def _made_norm(norm: RowNorm, context: BuildContext, width: int) -> nn.Module:
    made = _NORMS[norm.kind](width, eps=norm.eps, dtype=context.config.params_dtype)
    sees_part_of_tokens(made, context.config)
    return made
