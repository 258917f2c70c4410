"""The interface between a network's linears and low-rank adapters, which `dit.lora` adds.

names of their weights   in a network and in checkpoints
Adaptable                a linear to which adapters can be added
adapters_off             a context without some adapters
DropoutRows              the present pack, which decides what adapters drop
mark_split               marks weights that tensor ranks divide, for Megatron-Core;
                         sees_part_of_tokens sets another mark

This module does not import `dit.lora`, so that runs without adapters do not open it.
"""

# T rows, I inputs, O outputs (of this tensor rank), X any width

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

CHILD = "lora"
"""Module name of the trained adapter inside its linear; names of frozen weights do not change."""
FROZEN = "frozen_lora"
"""Module name of a frozen adapter, and prefix of all frozen ones; trained ones begin with
`CHILD`."""
DOWN, UP = "A", "B"

_TRAINED = re.compile(rf"\.{CHILD}(_\w+)?\.")
_OF_ANY = re.compile(rf"\.({FROZEN}|{CHILD})(_\w+)?\.")


def is_adapter(name: str) -> bool:
    """Whether `name`, in a network or a checkpoint, is a weight of a trained adapter."""
    return _TRAINED.search(name) is not None


def is_of_any_adapter(name: str) -> bool:
    """Whether `name` is a weight of a trained or frozen adapter."""
    return _OF_ANY.search(name) is not None


def is_stored(name: str, *, adapted: bool) -> bool:
    """Whether a checkpoint stores the weight `name`: of adapters (`adapted`), or of networks.

    Neither kind stores frozen adapters, which are in their own files.
    """
    return is_adapter(name) if adapted else not is_of_any_adapter(name)


def is_up(name: str) -> bool:
    """Whether `name` is the matrix B of an adapter, which starts at zero."""
    return is_of_any_adapter(name) and name.endswith(f".{UP}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSharing:
    """How tensor ranks divide a linear's weight, its input and the gradient of its input."""

    axis: int | None = None  # of the weight that they share: 0 outputs, 1 inputs; None: nothing
    group: dist.ProcessGroup | None = None  # tensor ranks
    sequence: bool = False  # each rank sees its own rows of the input (axis 0) or output (axis 1)
    partial: bool = False  # gradients of the input are parts of a sum that others complete
    token_row: str | None = None  # its input is this row of tokens, which ranks may share

    def exchanged(self, rows: Tensor) -> Tensor:
        """Rows [T, X], complete on each tensor rank that needs them.

        They are inputs of a product whose outputs are divided, or outputs of one whose inputs are
        divided.
        """
        if self.axis is None or self.group is None or self.group.size() == 1:
            return rows
        if self.axis == 1:
            if self.sequence:
                return reduce_scatter_to_sequence_parallel_region(rows, group=self.group)
            return reduce_from_tensor_model_parallel_region(rows, group=self.group)
        if self.sequence:
            return gather_from_sequence_parallel_region(rows, group=self.group)
        if self.partial:
            return rows
        return copy_to_tensor_model_parallel_region(rows, group=self.group)


class Adaptable(nn.Module):
    """Interface of a linear that may have adapters; listed before the linear's class as a base."""

    lora: Any
    """The linear's `dit.lora.adapter.Adapter`; None, or absent, without one."""
    beside: Sequence[str] = ()
    """Names of further adapters, child modules whose outputs are added to `lora`'s."""
    frozen: Any = None
    """The frozen weight as a `FrozenMatrix`, if it is not kept whole on the device."""
    token_row: str | None = None
    """Row of tokens that is the input, which context and tensor ranks may divide; None: rows of
    text or levels that each rank has whole."""

    parts: int = 1
    """Number of the published network's linears that it fuses, such as 3 for q, k and v."""

    def tensor_sharing(self) -> TensorSharing:
        """How tensor ranks divide this linear."""
        raise NotImplementedError

    @property
    def is_frozen(self) -> bool:
        """Whether the matrix is not trained."""
        return not self.weight.requires_grad  # type: ignore[union-attr]

    def add_adapter(self, name: str, adapter: nn.Module) -> None:
        """Adds an adapter to the linear, or replaces the one with this name."""
        setattr(self, name, adapter)
        if name != CHILD and name not in self.beside:
            self.beside = (*self.beside, name)

    def adapters(self) -> dict[str, Any]:
        """Adapters of this linear by name, in the order in which its output adds them."""
        named = ((name, getattr(self, name, None)) for name in (*self.beside, CHILD))
        return {name: one for name, one in named if one is not None}

    def adapted(self, x_TI: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
        """The output [T, O] of the linear and its adapters.

        `product` maps [T, I] to [T, O] by the matrix alone, once the matrix is on the device.
        """
        product = product if self.frozen is None else partial(self.frozen.output_of, self)
        for adapter in self.adapters().values():
            if adapter.enabled:
                product = partial(adapter, product=product)
        return product(x_TI)

    def with_adapter(
        self,
        frozen: Mapping[str, Any],
        prefix: str,
        sharded_offsets: Any,
        metadata: Any,
    ) -> ShardedStateDict:
        """The linear's sharded state without adapters, and the adapters' sharded state.

        Megatron-Core's linears list all of `state_dict`, which includes adapters.
        """
        found = {name: value for name, value in frozen.items() if not is_of_any_adapter(f".{name}")}
        for name, one in self.adapters().items():
            found |= one.sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)
        return found


@contextmanager
def adapters_off(network: nn.Module, names: Collection[str] | None = None) -> Iterator[None]:
    """A context in which linears of `network` compute without the adapters `names`.

    None stands for all trained adapters.
    """
    linears = (module for module in network.modules() if isinstance(module, Adaptable))
    switched = [
        one
        for linear in linears
        for name, one in linear.adapters().items()
        if one.enabled and (not name.startswith(FROZEN) if names is None else name in names)
    ]
    for adapter in switched:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in switched:
            adapter.enabled = True


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenPlaces:
    """Positions in the pack of one row's tokens, int64."""

    whole_T: Tensor  # of those that a linear on whole rows sees
    own_T: Tensor  # of those that this rank holds between two matrices


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DropoutRows:
    """The seed and token positions of a pack at a step, which fix adapters' dropout masks."""

    seed: int  # 63 bits
    places: Mapping[str, TokenPlaces]  # by the name of a row of tokens (`TOKENS`)
    fused_kernels: bool = False  # allows our kernel, which runs where `kernels_run_on`

    def places_of(self, x_TI: Tensor, *, token_row: str | None) -> Tensor:
        """Position in the pack of each row of a linear's input, whose token row is `token_row`.

        None stands for text and level rows that every rank has whole.
        """
        rows = len(x_TI)
        if token_row is None:
            return torch.arange(rows, device=x_TI.device)
        places = self.places[token_row]
        return places.own_T if len(places.own_T) == rows else places.whole_T

    def of_states(self, token_row: str, count: int) -> DropoutRows:
        """Positions for dropout if each token of `token_row` has `count` consecutive rows."""

        def spread(place_T: Tensor) -> Tensor:
            inner = torch.arange(count, device=place_T.device)
            return (place_T[:, None] * count + inner).flatten()

        of_tokens = self.places[token_row]
        spread_out = replace(
            of_tokens, own_T=spread(of_tokens.own_T), whole_T=spread(of_tokens.whole_T)
        )
        return replace(self, places={**self.places, token_row: spread_out})


_current: ContextVar[DropoutRows | None] = ContextVar("dropout rows", default=None)


def dropout_rows() -> DropoutRows | None:
    """Positions for adapters' dropout in the present pack; None without dropout."""
    return _current.get()


@contextmanager
def dropping(rows: DropoutRows | None) -> Iterator[None]:
    """A context in which adapters apply dropout by `rows`."""
    token = _current.set(rows)
    try:
        yield
    finally:
        _current.reset(token)


def mark_split(weight: nn.Parameter, *, axis: int) -> None:
    """Marks a weight for Megatron-Core as sharded over tensor ranks along `axis`.

    Without the mark the norm of the gradient counts one shard instead of all. Megatron-Core's
    layers set it while they initialise their weights, for which this project uses `initialise`
    instead.
    """
    marks = {"tensor_model_parallel": True, "partition_dim": axis, "partition_stride": 1}
    for name, value in marks.items():
        setattr(weight, name, value)


def sees_part_of_tokens(module: nn.Module, config: TransformerConfig) -> None:
    """Marks replicated weights whose gradients sequence parallelism must sum."""
    for parameter in module.parameters(recurse=False):
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
