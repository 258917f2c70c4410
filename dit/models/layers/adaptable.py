"""The interface between a network's linears and low-rank adapters, which `dit.lora` adds.

names of weights    how names in networks and checkpoints tell adapters from other weights
Adaptable           a linear to which adapters can be added
adapters_off        a context in which some adapters are switched off
DropoutRows         seed and token positions of the pack, which decide what adapters drop
mark_split          marks weights that tensor ranks divide, for Megatron-Core;
                    sees_part_of_tokens marks weights whose gradients sequence parallelism sums

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
"""Module name of the trained adapter inside its linear; the names of the linear's own weights
stay."""
FROZEN = "frozen_lora"
"""Module name of a frozen adapter. Names of further frozen adapters begin with it, and names of
further trained ones with `CHILD`."""
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
    """Whether a checkpoint of adapters (`adapted`), or else of networks, stores the weight `name`.

    Neither checkpoint stores frozen adapters, which are in their own files.
    """
    return is_adapter(name) if adapted else not is_of_any_adapter(name)


def is_up(name: str) -> bool:
    """Whether `name` is the matrix B of a trained or frozen adapter; B starts at zero."""
    return is_of_any_adapter(name) and name.endswith(f".{UP}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSharing:
    """How tensor ranks divide a linear's weight, its input, and the gradient of its input."""

    axis: int | None = None  # of the weight that they share: 0 outputs, 1 inputs; None: nothing
    group: dist.ProcessGroup | None = None  # tensor ranks
    sequence: bool = False  # each rank sees its own rows of the input (axis 0) or output (axis 1)
    partial: bool = False  # gradients of the input are parts of a sum that others complete
    token_row: str | None = None  # its input is this row of tokens, which ranks may share

    def exchanged(self, rows: Tensor) -> Tensor:
        """`rows` [T, X] after the communication between tensor ranks that this linear needs.

        With `axis` 0, `rows` is the input. With `sequence` it is gathered from all ranks; without,
        it is unchanged, and its gradient is summed over ranks unless `partial`. With `axis` 1,
        `rows` is the output, which is summed over ranks; with `sequence` each rank gets its own
        part of the sum.
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
    """Base of linears that may have adapters; it stands before the linear's class among bases."""

    lora: Any
    """The linear's trained `dit.lora.adapter.Adapter`, a child module; None, or absent, without
    one."""
    beside: Sequence[str] = ()
    """Names of further adapters, child modules whose outputs are added to that of `lora`."""
    frozen: Any = None
    """The frozen weight as a `FrozenMatrix`, if the device does not hold it as a plain tensor."""
    token_row: str | None = None
    """Name of the row of tokens that is the input, which context and tensor ranks may divide. None:
    the input is text, or has a row for each noise level, and each rank has all of it."""

    parts: int = 1
    """Number of linears of the published network that this one fuses, such as 3 for q, k and v."""

    def tensor_sharing(self) -> TensorSharing:
        """How tensor ranks divide this linear's weight and input."""
        raise NotImplementedError

    @property
    def is_frozen(self) -> bool:
        """Whether the linear's matrix is not trained."""
        return not self.weight.requires_grad  # type: ignore[union-attr]

    def add_adapter(self, name: str, adapter: nn.Module) -> None:
        """Adds `adapter` to the linear as `name`, and replaces an adapter of the same name."""
        setattr(self, name, adapter)
        if name != CHILD and name not in self.beside:
            self.beside = (*self.beside, name)

    def adapters(self) -> dict[str, Any]:
        """Adapters of this linear by name, in the order in which their outputs are added."""
        named = ((name, getattr(self, name, None)) for name in (*self.beside, CHILD))
        return {name: one for name, one in named if one is not None}

    def adapted(self, x_TI: Tensor, product: Callable[[Tensor], Tensor]) -> Tensor:
        """The output [T, O] of the linear and its enabled adapters for `x_TI`.

        `product` maps [T, I] to [T, O] by the linear's matrix alone. It is not used if `frozen`
        holds the matrix.
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

        `frozen` is the state that Megatron-Core lists for the linear. As it includes adapters, they
        are removed from it and listed anew.
        """
        found = {name: value for name, value in frozen.items() if not is_of_any_adapter(f".{name}")}
        for name, one in self.adapters().items():
            found |= one.sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)
        return found


@contextmanager
def adapters_off(network: nn.Module, names: Collection[str] | None = None) -> Iterator[None]:
    """A context in which linears of `network` compute without the adapters called `names`.

    None stands for all trained adapters. At the end the same adapters are enabled again.
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
    """Positions in the pack of the tokens of one row of tokens, int64."""

    whole_T: Tensor  # of those that a linear on whole rows sees
    own_T: Tensor  # of those that this rank holds between two matrices


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DropoutRows:
    """The seed and token positions of a pack at a step, which determine adapters' dropout masks."""

    seed: int  # 63 bits
    places: Mapping[str, TokenPlaces]  # by the name of a row of tokens (`TOKENS`)
    fused_kernels: bool = False  # allows our kernel, which runs where `kernels_run_on`

    def places_of(self, x_TI: Tensor, *, token_row: str | None) -> Tensor:
        """Position in the pack, int64 [T], of each row of `x_TI`, the input of a linear.

        `token_row` names the row of tokens that `x_TI` belongs to. None stands for an input that
        every rank has whole, such as text; its positions are its row numbers.
        """
        rows = len(x_TI)
        if token_row is None:
            return torch.arange(rows, device=x_TI.device)
        places = self.places[token_row]
        return places.own_T if len(places.own_T) == rows else places.whole_T

    def of_states(self, token_row: str, count: int) -> DropoutRows:
        """A copy for linears whose input has `count` consecutive rows per token of `token_row`."""

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
    """The seed and positions for adapters' dropout in the present pack; None without dropout."""
    return _current.get()


@contextmanager
def dropping(rows: DropoutRows | None) -> Iterator[None]:
    """A context in which adapters apply dropout by `rows`, seed and positions; None: no dropout."""
    token = _current.set(rows)
    try:
        yield
    finally:
        _current.reset(token)


def mark_split(weight: nn.Parameter, *, axis: int) -> None:
    """Marks `weight` for Megatron-Core as sharded over tensor ranks along `axis`.

    Without the mark the norm of the gradient counts one shard instead of all. Megatron-Core's
    layers set it while they initialise their weights, for which this project uses `initialise`
    instead.
    """
    marks = {"tensor_model_parallel": True, "partition_dim": axis, "partition_stride": 1}
    for name, value in marks.items():
        setattr(weight, name, value)


def sees_part_of_tokens(module: nn.Module, config: TransformerConfig) -> None:
    """Marks the parameters of `module` itself for the gradient sums of sequence parallelism.

    Its children are not marked. The mark is False if `config` has no sequence parallelism.
    """
    for parameter in module.parameters(recurse=False):
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
