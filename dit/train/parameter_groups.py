"""`optimizer.groups`: weights with a learning rate or weight decay of their own, or frozen ones.

A weight goes by its names here and in Diffusers' network, with the number of its layer:
`blocks.layers.3.self_attention.linear_qkv.weight`, or `blocks.3.attn1.to_q.weight` and those of the
others that it is laid together with. The last group with a pattern that matches rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from dit.config import ModelConfig, ParameterGroup, Problems, RunConfig
from dit.models.diffusers_names import Pair, pairs
from dit.models.family import family_of
from dit.models.lora.adapter import Adaptable
from dit.train.checkpoint.shares import entries_of

Weight = tuple[str, int | None]
"""Name of a weight as a checkpoint has it, and its layer."""


def group_of_weights(config: RunConfig) -> Mapping[Weight, ParameterGroup]:
    """The group of each weight that has one.

    Raises:
        Problems: a pattern matches nothing, or a part of a weight.
    """
    groups, found = config.optimizer.groups, {}
    if not groups:
        return found
    table = _table(config.model)
    for group in groups:
        matching = [pair for pair in table if _matches(group.pattern, pair)]
        if not matching:
            raise Problems([_nothing_matches(group.pattern, table)])
        found |= {(pair.ours, pair.layer): group for pair in matching}
    return found


def _table(model: ModelConfig) -> list[Pair]:
    if family_of(model).diffusers is None:
        raise Problems(
            [f"optimizer.groups needs the names of weights, and model.family={model.family} has no"]
        )
    return pairs(model)


def own_name(pair: Pair) -> str:
    """Our name of a weight, with the number of its layer."""
    return pair.ours.replace("layers.", f"layers.{pair.layer}.", 1)


def _matches(pattern: str, pair: Pair) -> bool:
    """Whether a pattern matches a weight.

    Raises:
        Problems: it matches some, not all, of those that the weight is made of.
    """
    if fnmatchcase(own_name(pair), pattern):
        return True
    here = [name for name in pair.theirs if fnmatchcase(name, pattern)]
    if here and len(here) < len(pair.theirs):
        rest = [name for name in pair.theirs if name not in here]
        raise Problems(
            [
                f"optimizer.groups: pattern={pattern} matches {', '.join(here)}, which is one"
                f" matrix with {', '.join(rest)} here; write a pattern that matches all of them, or"
                f" {own_name(pair)}"
            ]
        )
    return bool(here)


def _nothing_matches(pattern: str, table: list[Pair]) -> str:
    names = [name for pair in table for name in (own_name(pair), *pair.theirs)]
    near = get_close_matches(pattern.strip("*"), names, n=3, cutoff=0.0)
    return (
        f"optimizer.groups: pattern={pattern} matches no weight of the network; near ones are"
        f" {', '.join(near)}"
    )


def grouped(
    module: Any, groups: Mapping[Weight, ParameterGroup]
) -> Iterator[tuple[nn.Parameter, ParameterGroup]]:
    """The weights of a part of the network that have a group."""
    for entry in entries_of(module) if groups else ():
        place = entry.key, entry.global_offset[0] if entry.prepend_axis_num else None
        if place in groups:
            assert isinstance(entry.data, nn.Parameter)
            yield entry.data, groups[place]


def freeze_groups(module: Any, config: RunConfig) -> None:
    """Freezes the weights of frozen groups, before the module is wrapped.

    Raises:
        Problems: as `group_of_weights`.
    """
    for weight, group in grouped(module, group_of_weights(config)):
        if group.frozen:
            weight.requires_grad_(False)
    # Megatron-Core's product with a frozen matrix has no gradient for the bias.
    for linear in module.modules() if config.optimizer.groups else ():
        if isinstance(linear, Adaptable) and linear.is_frozen:
            linear.freeze_matrix()
