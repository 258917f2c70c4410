"""The name table: for each of our tensors, the tensors of Diffusers with the same numbers.

A family lists its tensors once, as `Row`s of a `NameTable`; `pairs_of` expands the table for one
network. Imports, exports and the mappings for Megatron-Bridge follow from it. Every `Arrangement`
is a permutation of numbers, so a round trip restores every bit.
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

    REPLICATED = "replicated"  # each rank has the whole tensor
    COLUMN = "column"  # each rank has some of a linear's outputs
    ROW = "row"  # each rank has some of a linear's inputs


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the name table: one of our tensors and its tensors in Diffusers.

    In names, `*` stands for the index of a layer, from 0.
    """

    ours: str
    theirs: tuple[str, ...]
    split: TensorSplit
    shape: tuple[str, ...]  # of our tensor, in letters of `NameTable.sizes`
    arrangement: Arrangement = SAME
    exists: Callable[[Any], bool] = lambda _: True  # whether a configuration has the tensor
    offset: Callable[[Any], int] = lambda _: 0  # added to the layer's index in Diffusers' names


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
    """The lines of the name table for the weight and the bias of a linear.

    `ours` and `theirs` are names of the linear; `outputs` and `inputs` are letters of
    `NameTable.sizes`.
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
    """Maps a configuration to Diffusers' index of the first layer of each stack, by the same
    prefix; 0 for stacks that are not in the mapping."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """One tensor of our network, and the tensors of Diffusers that hold the same numbers."""

    ours: str  # name in Megatron-Core's checkpoints, in which all layers of a stack are one tensor
    layer: int | None  # index of the layer; None for tensors outside stacks
    layers: int  # number of layers of the stack
    theirs: tuple[str, ...]
    split_over: TensorSplit
    shape: tuple[int, ...]  # of our tensor, of one layer
    arrangement: Arrangement
    model: ModelConfig

    @property
    def their_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of Diffusers' tensors, by name."""
        shapes = self.arrangement.their_shapes(self.shape, self.model, len(self.theirs))
        return dict(zip(self.theirs, shapes, strict=True))

    @property
    def linears(self) -> list[list[int]]:
        """For each Diffusers tensor, the number of rows of each linear that it fuses.

        For a tensor that is a single linear, this is one number.
        """
        shapes = self.their_shapes.values()
        return [self.arrangement.linears(rows, self.model) for rows, *_ in shapes]

    @property
    def groups(self) -> int:
        """Number of groups of rows in our tensor, such as heads; 1 if `theirs` is a single tensor.

        Each group has rows of every tensor in `theirs`.
        """
        return self.arrangement.groups(self.model) if len(self.theirs) > 1 else 1

    def join(self, parts: list[Tensor]) -> Tensor:
        """Our tensor, computed from Diffusers' tensors `parts`."""
        return self.arrangement.join(parts, self.model)

    def split(self, whole: Tensor) -> list[Tensor]:
        """Diffusers' tensors, computed from our tensor `whole`: the inverse of `join`."""
        return self.arrangement.split(whole, self.model, len(self.theirs))


def pairs_of(table: NameTable, model: ModelConfig) -> list[Pair]:
    """All pairs of `table` for the network of `model`, first of tensors outside stacks.

    Each tensor of our network, and of Diffusers', is in exactly one pair.
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
    """All tensors of Diffusers' network by name; `read` returns our tensor of a pair."""
    return {
        name: tensor
        for pair in pairs
        for name, tensor in zip(pair.theirs, pair.split(read(pair)), strict=True)
    }
