"""The interface between a network's linears and the low-rank adapters that `dit.lora` adds.

is_adapter, ...      recognise the weights of adapters by their names
Adaptable            a linear to which adapters can be added
adapters_off         a context in which some adapters are switched off
DropoutRows          seed and token positions, which determine the dropout masks of adapters
mark_split           marks weights that tensor ranks divide, for Megatron-Core
sees_part_of_tokens  marks weights whose gradients are summed under sequence parallelism

This module does not import `dit.lora`, so runs without adapters do not load it.
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
"""Name of the trained adapter as a child module of its linear. Names of further trained adapters
begin with it."""
FROZEN = "frozen_lora"
"""Name of a frozen adapter as a child module of its linear. Names of further frozen adapters begin
with it."""
DOWN, UP = "A", "B"

_TRAINED = re.compile(rf"\.{CHILD}(_\w+)?\.")
_OF_ANY = re.compile(rf"\.({FROZEN}|{CHILD})(_\w+)?\.")


def is_adapter(name: str) -> bool:
    """Whether the weight `name`, in a network or checkpoint, belongs to a trained adapter."""
    return _TRAINED.search(name) is not None


def is_of_any_adapter(name: str) -> bool:
    """Whether the weight `name` belongs to a trained or frozen adapter."""
    return _OF_ANY.search(name) is not None


def is_stored(name: str, *, adapted: bool) -> bool:
    """Whether a checkpoint stores the weight `name`.

    A checkpoint of a run with adapters (`adapted`) stores only trained adapters; others store all
    weights that belong to no adapter. Frozen adapters are in their own files.
    """
    return is_adapter(name) if adapted else not is_of_any_adapter(name)


def is_up(name: str) -> bool:
    """Whether the weight `name` is the matrix B of an adapter, which starts at zero."""
    return is_of_any_adapter(name) and name.endswith(f".{UP}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSharing:
    """How tensor ranks divide a linear's weight, its input, and the gradient of its input."""

    axis: int | None = None  # of the weight that ranks divide: 0 outputs, 1 inputs; None: neither
    group: dist.ProcessGroup | None = None  # tensor ranks
    sequence: bool = False  # whether ranks divide rows of the input (axis 0) or output (axis 1)
    partial: bool = False  # whether another module sums the input's gradient over ranks
    token_row: str | None = None  # the stream of tokens that is the input; ranks may divide it

    def exchanged(self, rows: Tensor) -> Tensor:
        """`rows` [T, X] after the communication between tensor ranks that this linear needs.

        If `axis` is 0, `rows` is the linear's input. With `sequence` it is gathered from all ranks;
        otherwise it is unchanged, and its gradient is summed over ranks, unless `partial` is set.
        If `axis` is 1, `rows` is the linear's output, which is summed over ranks; with `sequence`
        each rank gets only its rows of the sum.
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
    """Base class of linears that may have adapters; it must come before the linear's own base."""

    lora: Any
    """The trained `dit.lora.adapter.Adapter`, a child module; None or absent if there is none."""
    beside: Sequence[str] = ()
    """Names of further adapters, which are child modules, too. The outputs of all adapters are
    added."""
    frozen: Any = None
    """The frozen weight as a `FrozenMatrix`, if it is not a plain tensor on the device."""
    token_row: str | None = None
    """Name of the stream of tokens that is the input; context and tensor ranks may divide it. None:
    each rank has the whole input, which is text or has a row for each timestep."""
    parts: int = 1
    """Number of linears of the published network that this linear fuses, such as 3 for q, k, v."""

    def tensor_sharing(self) -> TensorSharing:
        """How tensor ranks divide this linear's weight and input."""
        raise NotImplementedError

    @property
    def is_frozen(self) -> bool:
        """Whether the linear's weight is not trained."""
        return not self.weight.requires_grad  # type: ignore[union-attr]

    def add_adapter(self, name: str, adapter: nn.Module) -> None:
        """Adds `adapter` to the linear under `name`; replaces an adapter with this name."""
        setattr(self, name, adapter)
        if name != CHILD and name not in self.beside:
            self.beside = (*self.beside, name)

    def adapters(self) -> dict[str, Any]:
        """The adapters of this linear by name, in the order in which their outputs are added."""
        named = ((name, getattr(self, name, None)) for name in (*self.beside, CHILD))
        return {name: one for name, one in named if one is not None}

    def adapted(self, x_TI: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
        """The output [T, O] of the linear and its enabled adapters for the input `x_TI`.

        `product` maps [T, I] to [T, O] by the linear's weight. It is not called if `frozen` holds
        the weight.
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
        """The sharded state of the linear and its adapters, for a checkpoint.

        `frozen` is the state that Megatron-Core's linear returns. The weights of adapters in it,
        which Megatron-Core lists as replicated, are replaced by the adapters' own sharded state.
        The other arguments are those of Megatron-Core's `sharded_state_dict`.
        """
        found = {name: value for name, value in frozen.items() if not is_of_any_adapter(f".{name}")}
        for name, one in self.adapters().items():
            found |= one.sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)
        return found


@contextmanager
def adapters_off(network: nn.Module, names: Collection[str] | None = None) -> Iterator[None]:
    """A context in which the adapters of `network` with these `names` are switched off.

    With `names` None, all trained adapters are switched off. At the end, the adapters that were
    switched off are enabled again.
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
    """Positions in the pack, int64, of the tokens of one stream."""

    whole_T: Tensor  # of the tokens of all tensor ranks, the input of linears that gather them
    own_T: Tensor  # of the tokens of this tensor rank


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DropoutRows:
    """The seed and token positions of a pack, which determine the dropout masks of adapters."""

    seed: int  # 63 bits
    places: Mapping[str, TokenPlaces]  # by the name of a stream of tokens, such as `TOKENS`
    fused_kernels: bool = False  # whether our kernel may be used, on devices that can run it

    def places_of(self, x_TI: Tensor, *, token_row: str | None) -> Tensor:
        """The position in the pack, int64 [T], of each row of `x_TI`, the input of a linear.

        `token_row` is `Adaptable.token_row`; if it is None, positions are the indices of rows.
        """
        rows = len(x_TI)
        if token_row is None:
            return torch.arange(rows, device=x_TI.device)
        places = self.places[token_row]
        return places.own_T if len(places.own_T) == rows else places.whole_T

    def of_states(self, token_row: str, count: int) -> DropoutRows:
        """A copy for linears whose input has `count` adjacent rows per token of `token_row`."""

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
    """The seed and positions of the enclosing `dropping`; None if adapters apply no dropout."""
    return _current.get()


@contextmanager
def dropping(rows: DropoutRows | None) -> Iterator[None]:
    """A context in which adapters apply dropout with the seed and positions `rows`.

    With `rows` None, adapters apply no dropout.
    """
    token = _current.set(rows)
    try:
        yield
    finally:
        _current.reset(token)


def mark_split(weight: nn.Parameter, *, axis: int) -> None:
    """Marks `weight` for Megatron-Core as sharded over tensor ranks along `axis`.

    Without the mark, the gradient norm would count one shard instead of all. Megatron-Core's layers
    set it in their own initialisation of weights, which this project replaces by `initialise`.
    """
    marks = {"tensor_model_parallel": True, "partition_dim": axis, "partition_stride": 1}
    for name, value in marks.items():
        setattr(weight, name, value)


def sees_part_of_tokens(module: nn.Module, config: TransformerConfig) -> None:
    """Marks the parameters of `module` whose gradients are summed under sequence parallelism.

    Parameters of its children are not marked. The mark is False if `config` has no sequence
    parallelism.
    """
    for parameter in module.parameters(recurse=False):
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
