"""A and B of our linears <-> those of Diffusers' modules.

A linear of ours may be made of several of theirs, in another order of its outputs (head by head,
rotary pairs apart) or inputs. An arrangement is a permutation, so that the product of ours is the
arranged product of theirs, to the bit in both directions.
"""

# O outputs of one module, I inputs, R rank

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dit.models.diffusers_names import ByHead, Features, Pair
from dit.models.lora.adapter import DOWN, UP
from dit.models.lora.targets import stored_name, their_modules

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
    if not (isinstance(pair.arrangement, Features) and pair.arrangement.axis == 1):
        return down_RI
    return pair.join([down_RI]) if join else pair.split(down_RI)[0]


def _of_outputs(pair: Pair) -> bool:
    return not (isinstance(pair.arrangement, Features) and pair.arrangement.axis == 1)


def _groups(pair: Pair) -> int:
    """Groups of outputs in each of which every module has some, as `attach_adapters` has them."""
    by_head = isinstance(pair.arrangement, ByHead) and len(pair.theirs) > 1
    return pair.model.num_attention_heads if by_head else 1


def _joined(pair: Pair, part: int, up_OR: Tensor) -> Tensor:
    if not _of_outputs(pair):
        return up_OR
    parts = [torch.zeros_like(up_OR) for _ in pair.theirs]
    parts[part] = up_OR
    whole = pair.join(parts).unflatten(0, (_groups(pair), len(parts), -1))
    return whole[:, part].flatten(0, 1)


def _split(pair: Pair, part: int, up_OR: Tensor) -> Tensor:
    if not _of_outputs(pair):
        return up_OR
    groups = up_OR.unflatten(0, (_groups(pair), -1))
    parts = [torch.zeros_like(groups) for _ in pair.theirs]
    parts[part] = groups
    return pair.split(torch.stack(parts, dim=1).flatten(0, 2))[part]
