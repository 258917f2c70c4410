"""A and B of our linears <-> those of Diffusers' modules.

A linear of ours may be made of several of theirs, in another order of its outputs (head by head,
rotary pairs apart) or inputs. An arrangement is a permutation, so that the product of ours is the
arranged product of theirs, to the bit in both directions.
"""

# O outputs of one module, I inputs, R rank

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor

from dit.lora.targets import stored_name, their_modules
from dit.models.diffusers_names import Pair
from dit.models.layers.adaptable import DOWN, UP

_ByModule = Mapping[str, "FactorPair"]


class FactorPair(NamedTuple):
    """A [R, I] and B [O, R] of one adapter."""

    down: Tensor
    up: Tensor


def to_stored(factors: _ByModule, pairs: list[Pair]) -> dict[str, Tensor]:
    """Adapters by Diffusers' modules -> tensors by their names in a checkpoint.

    `pairs` are `adaptable_pairs` of the network.
    """
    found: dict[str, Tensor] = {}
    for pair in pairs:
        for part, module in enumerate(their_modules(pair)):
            if (one := factors.get(module)) is not None:
                found[stored_name(pair, part, DOWN)] = _inputs(pair, one.down, join=True)
                found[stored_name(pair, part, UP)] = _joined(pair, part, one.up)
    return found


def from_stored(
    modules: Mapping[str, object], pairs: list[Pair], read: Callable[[str], Tensor]
) -> dict[str, FactorPair]:
    """The inverse for `modules`: `read` gives the tensor of a checkpoint by its name."""
    found: dict[str, FactorPair] = {}
    for pair in pairs:
        for part, module in enumerate(their_modules(pair)):
            if module in modules:
                down, up = (read(stored_name(pair, part, letter)) for letter in (DOWN, UP))
                down = _inputs(pair, down, join=False)
                found[module] = FactorPair(down, _split(pair, part, up))
    return found


def _inputs(pair: Pair, down_RI: Tensor, *, join: bool) -> Tensor:
    """A, where inputs have another order; the order of outputs does not concern it."""
    if not pair.arrangement.of_inputs:
        return down_RI
    return pair.join([down_RI]) if join else pair.split(down_RI)[0]


def _zeros(pair: Pair, up_OR: Tensor) -> list[Tensor]:
    """A B of zeros for each module of the linear."""
    return [up_OR.new_zeros(rows, up_OR.shape[1]) for rows, *_ in pair.their_shapes.values()]


def _part(pair: Pair, part: int, whole_OR: Tensor) -> Tensor:
    """View of the rows of one module, by heads, in those of all modules in our order."""
    heads = pair.model.num_attention_heads if len(pair.theirs) > 1 else 1
    widths = [rows // heads for rows, *_ in pair.their_shapes.values()]
    return whole_OR.unflatten(0, (heads, -1)).split(widths, dim=1)[part]


def _joined(pair: Pair, part: int, up_OR: Tensor) -> Tensor:
    """B of one module, its rows in our order."""
    if pair.arrangement.of_inputs:
        return up_OR
    parts = _zeros(pair, up_OR)
    parts[part] = up_OR
    return _part(pair, part, pair.join(parts)).flatten(0, 1)


def _split(pair: Pair, part: int, up_OR: Tensor) -> Tensor:
    """The inverse of `_joined`."""
    if pair.arrangement.of_inputs:
        return up_OR
    whole = pair.join(_zeros(pair, up_OR))
    rows = _part(pair, part, whole)
    rows.copy_(up_OR.view(rows.shape))
    return pair.split(whole)[part]
