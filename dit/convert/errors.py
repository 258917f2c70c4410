"""Defines ConvertError in a module with few imports, because the whole folder raises it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from dit.progress import first_of

Shapes = Mapping[str, tuple[int, ...]]
"""Name of a tensor -> its shape."""


class ConvertError(ValueError):
    """A checkpoint cannot be converted; the message names the cause and the remedy."""


def listed(names: Iterable[str], *, most: int = 20) -> str:
    """The sorted `names` in one line; a long list is cut and ends with the number of the others."""
    return first_of(sorted(names), most)


def check_shapes(
    here: Shapes, wanted: Shapes, *, extra: Collection[str], place: Path, beyond: str
) -> None:
    """Checks that `here` has exactly the shapes `wanted`; `extra` are names that are not wanted.

    `place` and `beyond` name in messages where the tensors are, and what describes them.

    Raises:
        ConvertError: lists the names that are missing, unexpected, or of another shape.
    """
    problems = []
    if missing := wanted.keys() - here.keys():
        problems.append(f"has no {listed(missing)}")
    if extra:
        problems.append(f"has, beyond {beyond}, {listed(extra)}")
    problems += [
        f"has {name} of shape {list(here[name])} instead of {list(shape)}"
        for name, shape in wanted.items()
        if name in here and here[name] != shape
    ]
    if problems:
        raise ConvertError(
            f"{place} {'; '.join(problems)}. Download or export it again, or give the weights of"
            " this network"
        )
