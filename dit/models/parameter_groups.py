"""`optimizer.groups`: weights with their own learning rate or weight decay, or frozen.

A pattern matches a weight by its names in our network and in Diffusers', with the number of its
layer: `blocks.layers.3.self_attention.linear_qkv.weight`, or `blocks.3.attn1.to_q.weight` and the
names of the others that are fused with it. The last group with a matching pattern applies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from dit.config import ModelConfig, OptimizerConfig, ParameterGroup, Problems, RunConfig
from dit.models.registry import family_of, pairs

if TYPE_CHECKING:
    from dit.models.diffusers.names import Pair

Weight = tuple[str, int | None]
"""(name of a weight in a checkpoint, number of its layer; None outside of layers)."""


def group_of_weights(
    model: ModelConfig, optimizer: OptimizerConfig
) -> Mapping[Weight, ParameterGroup]:
    """The group of `optimizer.groups` that applies to each weight; weights in no group are absent.

    Raises:
        Problems: a pattern matches no weight, or only a part of a fused weight; or a group has no
            effect; or the family has no names of weights.
    """
    return matched_weights(model, optimizer.groups)


def matched_weights(
    model: ModelConfig, groups: Sequence[ParameterGroup]
) -> Mapping[Weight, ParameterGroup]:
    """The last of `groups` that matches each weight of the network; weights in no group are absent.

    Raises:
        Problems: as `group_of_weights`.
    """
    found: dict[Weight, ParameterGroup] = {}
    if not groups:
        return found
    table = _table(model)
    for group in groups:
        matching = [pair for pair in table if _matches(group.pattern, pair)]
        if not matching:
            raise Problems([_nothing_matches(group.pattern, table)])
        _check_decay(group, matching, model)
        found |= {(pair.ours, pair.layer): group for pair in matching}
    _check_order(groups, found)
    return found


def _check_decay(group: ParameterGroup, matching: Sequence[Pair], model: ModelConfig) -> None:
    """Refuses a group's weight decay if it matches only weights that never decay."""
    without = family_of(model).weights.no_decay
    matrices = [pair.ours for pair in matching if len(pair.shape) > 1]
    decay = any(not any(fnmatchcase(name, one) for one in without) for name in matrices)
    if group.weight_decay and not decay:
        raise Problems(
            [
                f"optimizer.groups: weight_decay={group.weight_decay:g} of pattern={group.pattern}"
                " has no effect: norms, biases and embeddings have no weight decay, and it matches"
                " nothing else; leave it out"
            ]
        )


def _check_order(groups: Sequence[ParameterGroup], found: Mapping[Weight, ParameterGroup]) -> None:
    """Refuses a group that has no effect, because later groups apply to all weights it matches."""
    for number, group in enumerate(groups):
        if not any(one is group for one in found.values()):
            raise Problems(
                [
                    f"optimizer.groups: pattern={group.pattern} has no effect, for the groups"
                    " behind it match all of its weights, and the last one rules; move it to the"
                    f" end (it is groups[{number}]), or leave it out"
                ]
            )


def _table(model: ModelConfig) -> list[Pair]:
    if family_of(model).diffusers is None and family_of(model).names is None:
        raise Problems(
            [
                f"optimizer.groups needs names of weights, and model.family={model.family} has"
                " none; leave it out"
            ]
        )
    fixed = family_of(model).weights.fixed
    return [pair for pair in pairs(model) if pair.ours not in fixed]


def own_name(weight: Weight) -> str:
    """The name of a weight in our network, with the number of its layer, if any, after `layers`."""
    name, layer = weight
    return name.replace("layers.", f"layers.{layer}.", 1)


def _matches(pattern: str, pair: Pair) -> bool:
    """Whether `pattern` matches the weight `pair`, by any of its names.

    Raises:
        Problems: it matches some, but not all, of the Diffusers weights that `pair` fuses.
    """
    if fnmatchcase(own_name((pair.ours, pair.layer)), pattern):
        return True
    here = [name for name in pair.theirs if fnmatchcase(name, pattern)]
    if here and len(here) < len(pair.theirs):
        rest = [name for name in pair.theirs if name not in here]
        raise Problems(
            [
                f"optimizer.groups: pattern={pattern} matches {', '.join(here)}, which is one"
                f" matrix with {', '.join(rest)} here; write a pattern that matches all of them, or"
                f" {own_name((pair.ours, pair.layer))}"
            ]
        )
    return bool(here)


def _nothing_matches(pattern: str, table: list[Pair]) -> str:
    names = [name for pair in table for name in (own_name((pair.ours, pair.layer)), *pair.theirs)]
    near = get_close_matches(pattern.strip("*"), names, n=3, cutoff=0.0)
    return (
        f"optimizer.groups: pattern={pattern} matches no weight of the network; near ones are"
        f" {', '.join(near)}"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenWeights:
    """The weights that a run does not train: those of frozen groups, and fixed tables."""

    pairs: tuple[Pair, ...] = ()  # of groups
    alone: frozenset[Weight] = frozenset()  # stored without state; their average is themselves
    partly: frozenset[str] = frozenset()  # names whose layers are frozen in part


NOTHING_FROZEN = FrozenWeights()


def frozen_weights(config: RunConfig) -> FrozenWeights:
    """The weights that a run does not train: those of frozen groups, and fixed tables.

    Raises:
        Problems: as `group_of_weights`.
    """
    alone = frozenset(
        w for w, group in group_of_weights(config.model, config.optimizer).items() if group.frozen
    )
    fixed = frozenset((name, None) for name in family_of(config.model).weights.fixed)
    if not alone:
        return FrozenWeights(alone=fixed)
    every = _table(config.model)
    trained = {pair.ours for pair in every if (pair.ours, pair.layer) not in alone}
    return FrozenWeights(
        pairs=tuple(pair for pair in every if (pair.ours, pair.layer) in alone),
        alone=alone | fixed,
        partly=frozenset(name for name, _ in alone if name in trained),
    )
