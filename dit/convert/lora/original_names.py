"""Names of modules in the original projects -> those of Diffusers' network.

A family lists its tables (`DiffusersForm.original_names`); `*` stands for the number of a block.
Files of the original projects, of ComfyUI and of diffusion-pipe write these names with dots, those
of kohya's scripts with underscores for dots.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from dit.models.family import diffusers_families


class OriginalNames:
    """The tables of all families that Diffusers has."""

    def __init__(self) -> None:
        forms = [family.diffusers for family in diffusers_families().values()]
        tables = [table for form in forms if form is not None for table in form().original_names]
        self._dotted = _compiled(pair for table in tables for pair in table.items())
        # Some scripts write Diffusers' own names with underscores.
        every = [ours for table in tables for value in table.values() for ours in value.split()]
        flat = {_flat(ours): ours for ours in every}
        flat |= {_flat(theirs): ours for table in tables for theirs, ours in table.items()}
        self._flat = _compiled(flat.items())

    def dotted(self, module: str) -> str:
        """Diffusers' name of a module, or names with spaces; a name of no table as it is."""
        return _translated(module, self._dotted) or module

    def flat(self, module: str) -> str | None:
        """Diffusers' name of a module that is written with underscores; None for an unknown one."""
        return _translated(module, self._flat)


def to_original(modules: Iterable[str], table: Mapping[str, str]) -> dict[str, str] | None:
    """Diffusers' names -> those of an original project; None where it lacks one of them."""
    back = _compiled((ours, theirs) for theirs, ours in table.items())
    found = {module: _translated(module, back) for module in modules}
    whole = {module: name for module, name in found.items() if name is not None}
    return whole if len(whole) == len(found) else None


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
