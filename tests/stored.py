"""What a checkpoint holds."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

COMMON = "common.pt"
"""What is no tensor, until Megatron-Core 0.16."""


def stored(place: Path) -> dict[str, Any]:
    """All tensors and objects by name."""
    found: dict[str, Any] = {}
    _load_state_dict(
        found,
        storage_reader=FileSystemReader(place),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    assert any(isinstance(value, Tensor) for value in found.values())
    if (place / COMMON).is_file():
        found[COMMON] = torch.load(place / COMMON, weights_only=False)
    return found


def assert_same_stored(some: Path, other: Path) -> None:
    """To the last bit."""
    one, two = stored(some), stored(other)
    assert one.keys() == two.keys()
    unequal = [name for name in one if not _equal(one[name], two[name])]
    assert not unequal, unequal


def _equal(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, two)
    if isinstance(one, BytesIO):
        one, two = (torch.load(value, weights_only=False) for value in (one, two))
    return bool(one == two)
