"""Long tables of cases: data in the YAML file beside a test that has its name."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import yaml


def table(test: str, name: str) -> Any:
    """One table of the file beside `test`, which is the `__file__` of a test."""
    return _tables(Path(test).with_suffix(".yaml"))[name]


@functools.cache
def _tables(file: Path) -> dict[str, Any]:
    return yaml.safe_load(file.read_text(encoding="utf-8"))
