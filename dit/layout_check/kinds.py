"""Tiny networks of each kind that the families have, as settings of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from dit.config import MockGeometry
from dit.models.family import Family
from dit.models.registry import families

ALL = "all"
"""Every kind of every family."""


def chosen_sizes(words: Sequence[str]) -> list[str]:
    """Named sizes that have a tiny network, of families, sizes or `ALL`, each once.

    Raises:
        ValueError: a word is none of these.
    """
    tiny = {family.name: [*family.tiny] for family in families()}
    every = [size for sizes in tiny.values() for size in sizes]
    named = {ALL: every, **{size: [size] for size in every}, **tiny}
    for word in words:
        if word not in named:
            raise ValueError(f"--family {word}: unknown; use some of {', '.join(named)}")
    return list(dict.fromkeys(size for word in words for size in named[word]))


def kind_settings(size: str, mixture: Sequence[MockGeometry]) -> list[str]:
    """The tiny network of a named size as KEY=VALUE, which has the size's other settings.

    For a network that knows no place of further frames, the samples of `mixture` have fewer.
    """
    family: Family = next(one for one in families() if size in one.tiny)
    settings: dict[str, Any] = {"family": family.name, "name": size, **family.tiny[size]}
    lines = [f"model.{key}={json.dumps(value)}" for key, value in settings.items()]
    most = family.config(**{**family.sizes[size], **settings}).largest_latent
    if most is None or max(one.frames for one in mixture) <= most[0]:
        return lines
    samples = [replace(one, frames=min(one.frames, most[0]), fps=None) for one in mixture]
    return [*lines, f"dataset.mock_samples={json.dumps([asdict(one) for one in samples])}"]
