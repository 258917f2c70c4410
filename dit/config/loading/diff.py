"""What differs between two configurations, in words."""

from __future__ import annotations

from functools import reduce
from typing import Any

from dit.config import RunConfig
from dit.config.loading.merge import shown
from dit.config.loading.schema import keys
from dit.config.loading.validate import plain


def changes(before: RunConfig, after: RunConfig) -> list[str]:
    """`key old -> new` for each setting that differs."""
    old, new = plain(before), plain(after)
    pairs = [(key, _at(old, key), _at(new, key)) for key in keys()]
    return [f"{key} {shown(was)} -> {shown(now)}" for key, was, now in pairs if was != now]


def _at(tree: dict[str, Any], key: str) -> Any:
    return reduce(lambda node, name: node[name], key.split("."), tree)
