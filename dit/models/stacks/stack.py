"""A stack: layers with equal specifications.

1. pipeline_stages  divides the layers of all stacks into pipeline stages
2. LayerStack       the layers of one stack on a stage: construction, recomputation, offloading
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from torch.utils.checkpoint import checkpoint

from dit.config import Implementation, Recompute, RecomputeMethod
from dit.models.layer_spec import (
    JOINT_TOKENS,
    TOKENS,
    RowKind,
    StackSpec,
)
from dit.models.layers.adaptable import Adaptable, DropoutRows, dropout_rows, dropping
from dit.models.layers.parallel_linear import BuildContext
from dit.models.layers.transformer_engine import fp8_products
from dit.models.stacks.frozen_blocks import BlockPrefetch
from dit.models.stacks.offload import OffloadedLayer, on_host, settle, when_reached
from dit.models.stacks.step_layer import StepLayer


@dataclass(frozen=True, slots=True)
class StageLayers:
    """The layers of one stack on one pipeline stage."""

    first: int  # index of the first layer in the whole stack
    count: int


def pipeline_stages(
    stacks: Sequence[StackSpec], stages: int, work_of: Callable[[StackSpec], int]
) -> list[dict[str, StageLayers]]:
    """For each pipeline stage, including virtual ones, its layers of each stack by name.

    The division minimises the multiplications of the slowest stage; layers of equal cost are
    divided evenly. `work_of` returns the multiplications of one layer of a stack.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    names = [stack.name for stack in stacks for _ in range(stack.count)]
    some = 1 < stages < len(names) and len({*names}) > 1  # otherwise costs make no difference
    each = [(work_of(stack) if some else 1, stack.count) for stack in stacks]
    costs = [work for work, count in each for _ in range(count)]
    if len(costs) < stages:
        raise ValueError(
            f"the network has {len(costs)} layers, fewer than its {stages} pipeline stages (virtual"
            " ones included); lower model.pipeline_model_parallel_size or"
            " model.virtual_pipeline_model_parallel_size"
        )
    plan = []
    for first, last in _balanced(costs, stages):
        held = {}
        for stack in stacks:
            here = [i for i in range(first, last) if names[i] == stack.name]
            before = names.index(stack.name) if stack.name in names else 0
            start = (here[0] if here else min(max(first, before), before + stack.count)) - before
            held[stack.name] = StageLayers(start, len(here))
        plan.append(held)
    return plan


def _balanced(costs: Sequence[int], parts: int) -> list[tuple[int, int]]:
    """Divides `costs` into `parts` adjacent ranges [first, last) with the smallest maximal sum.

    No range is empty. Among divisions with equal maximal sums, it takes the one with the smallest
    sum of squares.
    """
    ends = [0]
    for cost in costs:
        ends.append(ends[-1] + cost)
    # For the first i costs: (largest sum, sum of squares, start of the last range)
    best: list[tuple[int, int, int] | None] = [(0, 0, 0)] + [None] * len(costs)
    begins = []
    for part in range(1, parts + 1):
        row: list[tuple[int, int, int] | None] = [None] * len(best)
        for last in range(part, len(best) - (parts - part)):
            for first in range(part - 1, last):
                if (before := best[first]) is not None:
                    cost = ends[last] - ends[first]
                    made = (max(before[0], cost), before[1] + cost**2, first)
                    row[last] = min(made, row[last] or made)
        begins.append(row)
        best = row
    bounds, last = [], len(costs)
    for row in reversed(begins):
        chosen = row[last]
        assert chosen is not None
        bounds.append((chosen[2], last))
        last = chosen[2]
    return bounds[::-1]


def token_multiplications(context: BuildContext, spec: StackSpec) -> int:
    """Multiplications per latent token in the linears of one `spec` layer, over all tensor ranks.

    Attention is left out, because it depends on the packs. Layers for references count 0, because
    few samples have references.
    """
    if spec.layer.over is RowKind.REFERENCES:
        return 0
    model = replace(context.model, transformer_impl=Implementation.LOCAL)
    context = replace(context, model=model, config=copy(context.config))
    context.config.virtual_pipeline_model_parallel_size = None
    with torch.device("meta"):
        built = LayerStack(context, replace(spec, count=1), StageLayers(0, 1), vp_stage=None)
    linears: list[Any] = [module for module in built.modules() if isinstance(module, Adaptable)]
    return sum(
        one.weight.numel() * (1 if sharing.axis is None else context.groups.tp.size())
        for one, sharing in ((one, one.tensor_sharing()) for one in linears)
        if sharing.token_row in (TOKENS, JOINT_TOKENS)
    )


@dataclass(frozen=True, slots=True)
class _PipelineSplit:
    """A substitute for Megatron-Core's `pipeline_model_parallel_layout`, with our division.

    Megatron-Core's own division supports only one kind of layers and stages of equal size.
    """

    here: StageLayers

    def get_num_layers_to_build(self, *_: Any, **__: Any) -> int:
        return self.here.count

    def get_layer_offset(self, *_: Any, **__: Any) -> int:
        return self.here.first


class LayerStack(TransformerBlock):
    """The layers of one stack on this pipeline stage, or on one of its virtual stages.

    Megatron-Core's `TransformerBlock` builds the layers, numbers them over all stages and shards
    their checkpoint. `forward` is our own, because Megatron-Core's cannot pass the additional
    inputs of our layers.
    """

    def __init__(
        self,
        context: BuildContext,
        spec: StackSpec,
        here: StageLayers,
        *,
        vp_stage: int | None,
        layers_before: int = 0,
        unread: tuple[str, ...] = (),
    ):
        """Builds the layers `here` of the stack `spec`.

        `layers_before` is the number of layers of earlier stacks on this stage. `unread` are the
        rows that are not used after the last layer of the stack.
        """
        config = copy(context.config)
        config.num_layers = spec.count
        config.pipeline_model_parallel_layout = _PipelineSplit(here)  # type: ignore[assignment]
        parameters = {"model": context.model, "spec": spec.layer, "unread": unread}
        layer = ModuleSpec(module=StepLayer, params=parameters)
        submodules = TransformerBlockSubmodules(layer_specs=[layer] * here.count, layer_norm=None)
        super().__init__(config, submodules, pg_collection=context.groups, vp_stage=vp_stage)
        self.model, self.layers_before = context.model, layers_before
        self.hidden: tuple[str, ...] = spec.layer.rows
        self.turns: BlockPrefetch | None = None  # of swapped blocks, if there are any

    def forward(  # type: ignore[override]
        self, hidden: Any, conditions: Any, part: tuple[int, int] | None = None
    ) -> Any:
        """`hidden` after the layers: the tensor [T, D] of a row, or a tuple for several rows.

        `part` is the range (start, stop) of layers to run, stop excluded, among the layers of the
        stack on this stage; None: all.
        """
        dropout = dropout_rows()
        before: OffloadedLayer | None = None
        offloads = self.model.cpu_offloading_num_layers if self.training else 0
        for first, last in self._groups(*(part or (0, len(self.layers)))):
            number = self.layers_before + first
            if self.turns is not None:
                self.turns.forward_from(number)
            away = number < offloads
            with on_host(self.layers[first], conditions) if away else nullcontext() as here:
                hidden = self._group(hidden, conditions, dropout, first, last)
            if offloads:
                settle(hidden)
            if self.turns is not None:
                when_reached(
                    hidden, partial(self.turns.backward_from, self.layers_before + last - 1)
                )
            for offloaded in (here, before):
                if offloaded is not None:
                    when_reached(hidden, offloaded.fetch)
            before = here
        return hidden

    def _group(
        self, hidden: Any, conditions: Any, dropout: DropoutRows | None, first: int, last: int
    ) -> Any:
        """The output of layers [first, last); with recomputation, autograd saves only `hidden`."""
        if not self._recomputed(first):
            return self._run(hidden, conditions, dropout, first, last)
        return checkpoint(self._run, hidden, conditions, dropout, first, last, use_reentrant=False)

    def _run(
        self, hidden: Any, conditions: Any, dropout: DropoutRows | None, first: int, last: int
    ) -> Any:
        # Contexts are entered here, because recomputation calls this function again, possibly after
        # forward passes of other packs.
        with fp8_products(self.model), dropping(dropout):
            for layer in self.layers[first:last]:
                hidden = layer(hidden, conditions)
        return hidden

    def _groups(self, first: int, stop: int) -> list[tuple[int, int]]:
        uniform = self.model.recompute_method is RecomputeMethod.UNIFORM
        size = self.model.recompute_num_layers if self._full() and uniform else 1
        bounds = [*range(first, stop, size), stop]
        return list(pairwise(bounds))

    def _full(self) -> bool:
        return self.training and self.model.recompute_granularity is Recompute.FULL

    def _recomputed(self, first: int) -> bool:
        block = self.model.recompute_method is RecomputeMethod.BLOCK
        number = self.layers_before + first
        return self._full() and (not block or number < self.model.recompute_num_layers)

    def without_gradient(self) -> Sequence[str]:
        """Name patterns of weights in this stack whose gradient is zero for every pack."""
        return [
            f"layers.{index}.{pattern}"
            for index, layer in enumerate(self.layers)
            for pattern in getattr(layer, "unused", ())
        ]
