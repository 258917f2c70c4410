"""The tensors of Diffusers' network for each of ours, and how they differ.

A family lists them once, as `Row`s of a `NameTable`. An import computes our tensors from
Diffusers', an export Diffusers' from ours, and the registration with Megatron-Bridge derives its
mappings from the table. `pairs_of` expands it for one network. Every `Arrangement` is a permutation
of numbers, so a round trip restores every bit.
"""

# D model width, K head width, H heads; c t h w channel, frame, row, column of a token's features
# I inputs of a linear, O outputs; F width of a feed-forward; C numbers in a token, c * t * h * w
# X any width

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from dit.config import ModelConfig
from dit.models.diffusers.arrangements import SAME, Arrangement

if TYPE_CHECKING:
    from torch import Tensor


class TensorSplit(StrEnum):
    """How a tensor is divided among tensor ranks."""

    REPLICATED = "replicated"  # each rank has all of it
    COLUMN = "column"  # ranks share its outputs
    ROW = "row"  # ranks share its inputs


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the name table: one of our tensors and its tensors in Diffusers.

    `*` stands for the number of a layer, from 0.
    """

    ours: str
    theirs: tuple[str, ...]
    split: TensorSplit
    shape: tuple[str, ...]  # of ours, in letters of the table's sizes
    arrangement: Arrangement = SAME
    exists: Callable[[Any], bool] = lambda _: True
    offset: Callable[[Any], int] = lambda _: 0  # to the number of a layer, in Diffusers' name


def linear_rows(
    ours: str,
    theirs: str | tuple[str, ...],
    outputs: str,
    inputs: str,
    *,
    split: TensorSplit = TensorSplit.REPLICATED,
    arrangement: Arrangement = SAME,
    exists: Callable[[Any], bool] = lambda _: True,
) -> tuple[Row, Row]:
    """The lines of the name table for weight and bias of a linear.

    `outputs` and `inputs` are letters of the table's sizes.
    """
    names = (theirs,) if isinstance(theirs, str) else theirs
    weights, biases = (tuple(f"{n}.{kind}" for n in names) for kind in ("weight", "bias"))
    of_bias = TensorSplit.REPLICATED if split is TensorSplit.ROW else split
    shape = (outputs, inputs)
    return (
        Row(f"{ours}.weight", weights, split, shape, arrangement, exists=exists),
        Row(f"{ours}.bias", biases, of_bias, (outputs,), arrangement.of_bias, exists=exists),
    )


def without_biases(rows: Iterable[Row]) -> tuple[Row, ...]:
    """The lines of `rows` without biases, for networks whose linears have none."""
    return tuple(row for row in rows if not row.ours.endswith(".bias"))


@dataclass(frozen=True, slots=True)
class NameTable:
    """All tensors of a family's network, with their names and shapes in both networks."""

    rows: tuple[Row, ...]
    sizes: Callable[[Any], Mapping[str, int]]
    """Maps a configuration to the size for each letter in the shapes of `rows`."""
    layers: Callable[[Any], Mapping[str, int]]
    """Maps a configuration to the number of layers of each stack, by the prefix of its weights'
    names."""
    first: Callable[[Any], Mapping[str, int]] = lambda _: {}
    """Maps a configuration to Diffusers' index of a stack's first layer, by the same prefix; 0 for
    stacks that it lacks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """One tensor of our network, and the tensors of Diffusers that hold the same numbers."""

    ours: str  # as Megatron-Core stores it: the layers of one name together
    layer: int | None  # which of them
    layers: int  # how many there are
    theirs: tuple[str, ...]
    split_over: TensorSplit
    shape: tuple[int, ...]  # of ours
    arrangement: Arrangement
    model: ModelConfig

    @property
    def their_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of Diffusers' tensors, by name."""
        shapes = self.arrangement.their_shapes(self.shape, self.model, len(self.theirs))
        return dict(zip(self.theirs, shapes, strict=True))

    @property
    def linears(self) -> list[list[int]]:
        """For each of Diffusers' tensors, the numbers of rows of the linears that it fuses.

        A tensor that is a single linear has one number.
        """
        shapes = self.their_shapes.values()
        return [self.arrangement.linears(rows, self.model) for rows, *_ in shapes]

    @property
    def groups(self) -> int:
        """Number of groups of rows in our tensor, such as heads, each with rows of all of `theirs`.

        It is 1 if Diffusers has a single tensor.
        """
        return self.arrangement.groups(self.model) if len(self.theirs) > 1 else 1

    def join(self, parts: list[Tensor]) -> Tensor:
        """Our tensor, computed from Diffusers' tensors `parts`."""
        return self.arrangement.join(parts, self.model)

    def split(self, whole: Tensor) -> list[Tensor]:
        """Diffusers' tensors, computed from our tensor `whole`: the inverse of `join`."""
        return self.arrangement.split(whole, self.model, len(self.theirs))


def pairs_of(table: NameTable, model: ModelConfig) -> list[Pair]:
    """All pairs of `table` for the network of `model`; those of stacks come last, in their order.

    Each tensor of both networks is in exactly one pair.
    """
    sizes, stacks = table.sizes(model), table.layers(model)
    rows = [row for row in table.rows if row.exists(model)]

    def pair(row: Row, layer: int | None = None, *, layers: int = 0, number: int = 0) -> Pair:
        return Pair(
            ours=row.ours.replace(".*", ""),
            layer=layer,
            layers=layers,
            theirs=tuple(name.replace("*", str(number + row.offset(model))) for name in row.theirs),
            split_over=row.split,
            shape=tuple(sizes[letter] for letter in row.shape),
            arrangement=row.arrangement,
            model=model,
        )

    found = [pair(row) for row in rows if "*" not in row.ours]
    for stack, count in stacks.items():
        own = [row for row in rows if row.ours.startswith(f"{stack}.") and "*" in row.ours]
        first = table.first(model).get(stack, 0)
        found += [pair(row, n, layers=count, number=first + n) for n in range(count) for row in own]
    return found


def their_tensors(pairs: list[Pair], read: Callable[[Pair], Tensor]) -> dict[str, Tensor]:
    """All tensors of Diffusers' network by name, computed from ours, which `read` returns."""
    return {
        name: tensor
        for pair in pairs
        for name, tensor in zip(pair.theirs, pair.split(read(pair)), strict=True)
    }
