"""`optimizer.groups`: weights with their own learning rate or weight decay, or frozen.

A pattern matches a weight by its name in our network, such as
`blocks.layers.3.self_attention.linear_qkv.weight`, or by its name in Diffusers, such as
`blocks.3.attn1.to_q.weight`; it must then match the names of all Diffusers weights that our weight
fuses. If several groups match a weight, the last one applies.
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
"""(name of a weight in a checkpoint, index of its layer or None for weights outside layers)."""


def group_of_weights(
    model: ModelConfig, optimizer: OptimizerConfig
) -> Mapping[Weight, ParameterGroup]:
    """The group of `optimizer.groups` that applies to each weight; weights in no group are absent.

    Raises:
        Problems: a pattern matches no weight, or only some of the Diffusers weights that one of our
            weights fuses; or a group has no effect; or the family has no name table.
    """
    return matched_weights(model, optimizer.groups)


def matched_weights(
    model: ModelConfig, groups: Sequence[ParameterGroup]
) -> Mapping[Weight, ParameterGroup]:
    """The last of `groups` that matches each weight of the network; weights in no group are absent.

    Raises:
        Problems: for the same reasons as by `group_of_weights`.
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
    """Checks that the weight decay of `group` has an effect on a weight that it matches.

    Raises:
        Problems: it has no effect.
    """
    without = family_of(model).weights.no_decay
    matrices = [pair.ours for pair in matching if len(pair.shape) > 1]
    decay = any(not any(fnmatchcase(name, one) for one in without) for name in matrices)
    if group.weight_decay and not decay:
        raise Problems(
            [
                f"optimizer.groups: weight_decay={group.weight_decay:g} of pattern={group.pattern}"
                " has no effect, because the pattern matches only norms, biases or embeddings,"
                " which never have weight decay; leave weight_decay out"
            ]
        )


def _check_order(groups: Sequence[ParameterGroup], found: Mapping[Weight, ParameterGroup]) -> None:
    """Checks that each group applies to a weight.

    Raises:
        Problems: later groups match all weights of a group.
    """
    for number, group in enumerate(groups):
        if not any(one is group for one in found.values()):
            raise Problems(
                [
                    f"optimizer.groups[{number}]: pattern={group.pattern} has no effect, because"
                    " later groups match all of its weights, and the last matching group applies;"
                    " move it to the end of optimizer.groups, or leave it out"
                ]
            )


def _table(model: ModelConfig) -> list[Pair]:
    if family_of(model).diffusers is None and family_of(model).names is None:
        raise Problems(
            [
                f"optimizer.groups needs a table of weight names, which model.family={model.family}"
                " does not have; leave optimizer.groups out"
            ]
        )
    return [pair for pair in pairs(model) if not _is_fixed(model, pair.ours)]


def _is_fixed(model: ModelConfig, name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in family_of(model).weights.fixed)


def own_name(weight: Weight) -> str:
    """The name of `weight` in our network, with the index of its layer, if any."""
    name, layer = weight
    return name.replace("layers.", f"layers.{layer}.", 1)


def _matches(pattern: str, pair: Pair) -> bool:
    """Whether `pattern` matches the weight of `pair`, by our name or Diffusers' names.

    Raises:
        Problems: it matches some, but not all, of the Diffusers weights that our weight fuses.
    """
    if fnmatchcase(own_name((pair.ours, pair.layer)), pattern):
        return True
    here = [name for name in pair.theirs if fnmatchcase(name, pattern)]
    if here and len(here) < len(pair.theirs):
        rest = [name for name in pair.theirs if name not in here]
        raise Problems(
            [
                f"optimizer.groups: pattern={pattern} matches {', '.join(here)} but not"
                f" {', '.join(rest)}, although our network fuses them in one matrix; use a pattern"
                f" that matches all of them, or our name {own_name((pair.ours, pair.layer))}"
            ]
        )
    return bool(here)


def _nothing_matches(pattern: str, table: list[Pair]) -> str:
    names = [name for pair in table for name in (own_name((pair.ours, pair.layer)), *pair.theirs)]
    near = get_close_matches(pattern.strip("*"), names, n=3, cutoff=0.0)
    return (
        f"optimizer.groups: pattern={pattern} matches no weight of the network; use a name such as"
        f" {', '.join(near)}"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenWeights:
    """The weights that a run does not train: those of frozen groups, and `WeightRules.fixed`."""

    pairs: tuple[Pair, ...] = ()  # weights of frozen groups
    # All that are frozen; they are stored without optimizer state and average.
    alone: frozenset[Weight] = frozenset()
    partly: frozenset[str] = frozenset()  # names of weights that are frozen only in some layers


NOTHING_FROZEN = FrozenWeights()


def frozen_weights(config: RunConfig) -> FrozenWeights:
    """The weights that the run `config` does not train.

    Raises:
        Problems: for the same reasons as by `group_of_weights`.
    """
    alone = frozenset(
        w for w, group in group_of_weights(config.model, config.optimizer).items() if group.frozen
    )
    fixed = frozenset[Weight]()
    if family_of(config.model).weights.fixed:
        every = pairs(config.model)
        fixed = frozenset((p.ours, p.layer) for p in every if _is_fixed(config.model, p.ours))
    if not alone:
        return FrozenWeights(alone=fixed)
    every = _table(config.model)
    trained = {pair.ours for pair in every if (pair.ours, pair.layer) not in alone}
    return FrozenWeights(
        pairs=tuple(pair for pair in every if (pair.ours, pair.layer) in alone),
        alone=alone | fixed,
        partly=frozenset(name for name, _ in alone if name in trained),
    )
