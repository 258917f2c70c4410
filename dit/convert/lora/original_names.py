"""Names of modules in the original projects -> those of Diffusers' network.

A family lists its tables (`DiffusersForm.original_names`); `*` stands for the number of a block.
Files of the original projects, of ComfyUI and of diffusion-pipe write these names with dots, those
of kohya's scripts with underscores for dots.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from dit.config import ModelConfig
from dit.convert.lora.factors import LoraFactors
from dit.models.registry import diffusers_families

SWAPPED = "~"
"""Ends the name of a modulation that may be a shift and a scale alone; Diffusers has those two the
other way round."""


def swapped(one: LoraFactors) -> LoraFactors:
    """Scale and shift for shift and scale, if these are all that the linear makes."""
    if one.up.shape[0] != 2 * one.down.shape[1]:
        return one
    return replace(one, up=torch.cat(one.up.chunk(2)[::-1]))


class OriginalNames:
    """The tables of all families that Diffusers has, for the modules of one file.

    Some projects have the same name for linears that Diffusers names differently (`time_in` of all
    Hunyuan models). The family of `model` is asked first, then the one that knows most of a file's
    modules.
    """

    def __init__(self, modules: Iterable[str] = (), model: ModelConfig | None = None) -> None:
        names, own = list(modules), None if model is None else model.family
        found: list[tuple[bool, int, _Names]] = []
        for family in diffusers_families().values():
            if family.diffusers is not None:
                tables = _Names.of(family.diffusers().original_names)
                found.append((family.name == own, tables.knows(names), tables))
        self._families = [one[2] for one in sorted(found, key=lambda one: one[:2], reverse=True)]

    def dotted(self, module: str) -> str:
        """Diffusers' name of a module, or names with spaces; a name of no table as it is."""
        found = (_translated(module, family.dotted) for family in self._families)
        return next(filter(None, found), module)

    def flat(self, module: str) -> str | None:
        """Diffusers' name of a module that is written with underscores; None for an unknown one."""
        found = (_translated(module, family.flat) for family in self._families)
        return next(filter(None, found), None)


class _Names(NamedTuple):
    """The tables of one family, by names with dots and with underscores."""

    dotted: _Table
    flat: _Table

    @classmethod
    def of(cls, tables: Sequence[Mapping[str, str]]) -> _Names:
        # Some scripts write Diffusers' own names with underscores.
        values = [value.removesuffix(SWAPPED) for table in tables for value in table.values()]
        every = [ours for value in values for ours in value.split()]
        flat = {_flat(ours): ours for ours in every}
        flat |= {_flat(theirs): ours for table in tables for theirs, ours in table.items()}
        pairs = (pair for table in tables for pair in table.items())
        return cls(_compiled(pairs), _compiled(flat.items()))

    def knows(self, modules: Sequence[str]) -> int:
        """How many of the modules it has."""
        return sum(
            any(_translated(module, table) for table in (self.dotted, self.flat))
            for module in modules
        )


def to_original(modules: Iterable[str], table: Mapping[str, str]) -> dict[str, str] | None:
    """Diffusers' names -> those of an original project; None where it lacks one of them."""
    back = _compiled((ours, theirs) for theirs, ours in table.items())
    found = {module: _translated(module, back) for module in modules}
    whole = {module: name for module, name in found.items() if name is not None}
    return whole if len(whole) == len(found) else None


def in_original_names(
    factors: Mapping[str, LoraFactors], table: Mapping[str, str]
) -> dict[str, LoraFactors] | None:
    """Adapters by the names of an original project; None where it lacks one of them.

    Those of modules that it has as one linear become one, of all their ranks together; None where
    one of them has none.
    """
    alone = {k: ours.removesuffix(SWAPPED) for k, ours in table.items() if " " not in ours}
    fused = [(theirs, ours.split()) for theirs, ours in table.items() if " " in ours]
    turned = _compiled(
        (v.removesuffix(SWAPPED), k) for k, v in table.items() if v.endswith(SWAPPED)
    )
    left = {m: swapped(one) if _translated(m, turned) else one for m, one in factors.items()}
    found = dict[str, LoraFactors]()
    for theirs, parts in fused:
        first = _compiled([(parts[0], theirs)])
        for module in factors:
            name = _translated(module, first)
            if name is None:
                continue
            (number,) = re.findall(r"\.(\d+)\.", module)
            names = [part.replace("*", number) for part in parts]
            if any(part not in left for part in names):
                return None
            found[name] = _fused([left.pop(part) for part in names])
    names = to_original(left, alone)
    return None if names is None else found | {names[module]: one for module, one in left.items()}


def _fused(parts: list[LoraFactors]) -> LoraFactors:
    """The adapter of one linear whose outputs are those of all parts, one after the other."""
    ups = [one.folded().up for one in parts]
    down = torch.cat([one.down for one in parts])
    return LoraFactors(down=down, up=torch.block_diag(*ups), alpha=float(len(down)))


_Table = list[tuple[re.Pattern[str], str]]


def _compiled(names: Iterable[tuple[str, str]]) -> _Table:
    return [
        (re.compile(re.escape(theirs).replace(r"\*", r"(\d+)")), ours) for theirs, ours in names
    ]


def _translated(module: str, table: _Table) -> str | None:
    for pattern, ours in table:
        if match := pattern.fullmatch(module):
            return ours.replace("*", match[1]) if match.groups() else ours
    return None


def _flat(name: str) -> str:
    return name.replace(".", "_")
