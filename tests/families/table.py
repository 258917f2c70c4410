"""The cases of all families, each in the file of its family's name."""

from __future__ import annotations

from importlib import import_module

from dit.models.registry import NETWORKS
from tests.families.case import Case, Generation

_PUBLISHED = dict.fromkeys(NETWORKS.values())  # families that Diffusers has
_FILES = {name: import_module(f"tests.families.{name}") for name in (*_PUBLISHED, "anima")}
CASES: dict[str, Case] = {name: _FILES[name].CASE for name in _PUBLISHED}
"""`model.family` -> its case."""
GENERATIONS: dict[str, Generation] = {
    name: generation
    for file in _FILES.values()
    for name, generation in getattr(file, "GENERATIONS", {}).items()
}
"""Pipelines that make pictures and videos of texts."""
