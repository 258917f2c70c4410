"""Matrices A and B, and alpha, of adapted linears, by Diffusers' names of modules.

1. LoraFactors  the adapter of one module
2. check_fits   whether adapters belong to a network
3. to_stored    converts adapters to tensors of checkpoints; `from_stored` converts them back

One linear of this project may join several of Diffusers', with its outputs (head by head, halves of
rotary pairs separated) or inputs in another order. An arrangement is a permutation, so the product
of its matrices is the permuted product of Diffusers' matrices, to the bit in both directions.
"""

# O outputs of one module, I inputs, R rank

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

import torch
from torch import Tensor

from dit.config import ModelConfig
from dit.lora.adapter import AdapterShape
from dit.lora.targets import Adapters, stored_name
from dit.models.diffusers.names import Pair
from dit.models.layers.adaptable import CHILD, DOWN, UP
from dit.models.linears import matrices_of_linears, their_modules


class LoraFileError(ValueError):
    """An adapter file cannot be used; the message names the file, the key and the remedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraFactors:
    """LoRA (arXiv:2106.09685) of one linear: y = W x + alpha / r * up (down x)."""

    down: Tensor  # A, [R, I], float32
    up: Tensor  # B, [O, R], float32
    alpha: float

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def shape(self) -> AdapterShape:
        return AdapterShape(rank=self.rank, alpha=self.alpha)

    def folded(self) -> LoraFactors:
        """This adapter with alpha = r, and the scale multiplied into `up`."""
        up_OR = self.shape.scale * self.up
        return LoraFactors(down=self.down, up=up_OR, alpha=float(self.rank))

    def product(self) -> Tensor:
        """What the adapter adds to the weight: alpha / r times B A, [O, I]."""
        return self.shape.scale * (self.up @ self.down)

    def swapped(self) -> LoraFactors:
        """This adapter with the two halves of its outputs, shift and scale, exchanged.

        An adapter without twice as many outputs as inputs is returned as it is.
        """
        if self.up.shape[0] != 2 * self.down.shape[1]:
            return self
        return replace(self, up=torch.cat(self.up.chunk(2)[::-1]))


FactorsByModule = Mapping[str, LoraFactors]
"""Module name in Diffusers' network -> its adapter."""


def shapes_of(factors: FactorsByModule) -> dict[str, AdapterShape]:
    """Rank and alpha of each adapter, by the name of its module."""
    return {name: one.shape for name, one in factors.items()}


def side_by_side(parts: Sequence[LoraFactors]) -> LoraFactors:
    """One adapter for a linear whose outputs are those of `parts`, concatenated."""
    down_RI = torch.cat([one.down for one in parts])
    up_OR = torch.block_diag(*(one.folded().up for one in parts))
    return LoraFactors(down=down_RI, up=up_OR, alpha=float(len(down_RI)))


def summed(adapters: Sequence[tuple[FactorsByModule, float]]) -> dict[str, LoraFactors]:
    """The sum of several files' adapters, each times its strength.

    For each linear, all A are stacked and all B joined by columns; B contains the strengths, and
    alpha is the rank.
    """
    names = dict.fromkeys(name for factors, _ in adapters for name in factors)
    found = {}
    for name in names:
        own = [(factors[name], scale) for factors, scale in adapters if name in factors]
        down_RI = torch.cat([one.down for one, _ in own])
        up_OR = torch.cat([one.folded().up * scale for one, scale in own], dim=1)
        found[name] = LoraFactors(down=down_RI, up=up_OR, alpha=float(len(down_RI)))
    return found


def in_order(factors: FactorsByModule) -> dict[str, LoraFactors]:
    """`factors` sorted by name, with blocks.2 before blocks.10."""

    def place(item: tuple[str, LoraFactors]) -> list[tuple[int, int, str]]:
        parts = item[0].split(".")
        return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]

    return dict(sorted(factors.items(), key=place))


def linear_shapes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Diffusers' name of each linear that can have an adapter -> (outputs, inputs).

    Raises:
        Problems: Diffusers has no such network.
    """
    return {
        module: (shape[0], shape[1])
        for pair in matrices_of_linears(model)
        for module, shape in zip(their_modules(pair), pair.their_shapes.values(), strict=True)
    }


def check_fits(factors: FactorsByModule, model: ModelConfig, *, place: object) -> None:
    """Checks that each adapter belongs to a linear of the network, with the linear's shape.

    Raises:
        LoraFileError: names adapters that do not fit, with the nearest names.
        Problems: Diffusers has no such network.
    """
    shapes = linear_shapes(model)
    wrong = [_unknown(name, shapes) for name in factors if name not in shapes]
    wrong += [
        f"{name} is of a linear with {one.down.shape[1]} inputs and {one.up.shape[0]} outputs, and"
        f" the network's has {shapes[name][1]} inputs and {shapes[name][0]} outputs"
        for name, one in factors.items()
        if name in shapes and shapes[name] != (one.up.shape[0], one.down.shape[1])
    ]
    if wrong:
        more = f"; and {len(wrong) - _MOST} more" if len(wrong) > _MOST else ""
        raise LoraFileError(
            f"{place} is of another network than model.family={model.family}"
            f" model.name={model.name}: {'; '.join(wrong[:_MOST])}{more}. Give adapters of this"
            " network"
        )


_MOST = 5  # shown in one message


def _unknown(name: str, known: Iterable[str]) -> str:
    near = get_close_matches(name, list(known), n=2, cutoff=0.6)
    nearest = f" (the nearest are {', '.join(near)})" if near else ""
    return f"the network has no linear {name}{nearest}"


def to_stored(
    factors: FactorsByModule, model: ModelConfig, *, adapter: str = CHILD
) -> dict[str, Tensor]:
    """Name -> tensor in a checkpoint, for the adapters `factors` of Diffusers' modules."""
    found: dict[str, Tensor] = {}
    for pair in matrices_of_linears(model):
        for part, module in enumerate(their_modules(pair)):
            if (one := factors.get(module)) is not None:
                down, up = (stored_name(pair, part, of, adapter=adapter) for of in (DOWN, UP))
                found[down] = _inputs(pair, one.down, join=True)
                found[up] = _joined(pair, part, one.up)
    return found


def from_stored(
    adapters: Adapters, model: ModelConfig, read: Callable[[str], Tensor]
) -> dict[str, LoraFactors]:
    """Adapters by Diffusers' module, from the tensors of a checkpoint.

    `adapters` has rank and alpha of the modules to read. `read` returns a tensor of the checkpoint
    by its name: A [R, I] or B [O, R], of any float dtype.
    """
    found: dict[str, LoraFactors] = {}
    for pair in matrices_of_linears(model):
        for part, module in enumerate(their_modules(pair)):
            if (shape := adapters.get(module)) is not None:
                down, up = (read(stored_name(pair, part, one)).float() for one in (DOWN, UP))
                down, up = _inputs(pair, down, join=False), _split(pair, part, up)
                found[module] = LoraFactors(down=down, up=up, alpha=shape.alpha)
    return found


def _inputs(pair: Pair, down_RI: Tensor, *, join: bool) -> Tensor:
    """A [R, I] with its columns in the order of this project (`join`), or of Diffusers."""
    if not pair.arrangement.of_inputs:
        return down_RI
    return pair.join([down_RI]) if join else pair.split(down_RI)[0]


def _zeros(pair: Pair, up_OR: Tensor) -> list[Tensor]:
    """Zeros in the shape of B for each of Diffusers' modules that `pair` joins."""
    return [up_OR.new_zeros(rows, up_OR.shape[1]) for rows, *_ in pair.their_shapes.values()]


def _part(pair: Pair, part: int, whole_OR: Tensor) -> Tensor:
    """View [groups, rows, R] of the rows of module number `part` in `whole_OR`.

    `whole_OR` is the B of all modules of `pair` in the order of this project's linear.
    """
    widths = [rows // pair.groups for rows, *_ in pair.their_shapes.values()]
    return whole_OR.unflatten(0, (pair.groups, -1)).split(widths, dim=1)[part]


def _joined(pair: Pair, part: int, up_OR: Tensor) -> Tensor:
    """B of module number `part`, with its rows in the order of this project's linear."""
    if pair.arrangement.of_inputs:
        return up_OR
    parts = _zeros(pair, up_OR)
    parts[part] = up_OR
    return _part(pair, part, pair.join(parts)).flatten(0, 1)


def _split(pair: Pair, part: int, up_OR: Tensor) -> Tensor:
    """B of module number `part` with its rows in Diffusers' order; undoes `_joined`."""
    if pair.arrangement.of_inputs:
        return up_OR
    whole = pair.join(_zeros(pair, up_OR))
    rows = _part(pair, part, whole)
    rows.copy_(up_OR.view(rows.shape))
    return pair.split(whole)[part]
