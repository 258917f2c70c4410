"""Who gets which samples, and whether a saved state is of the same order of samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def share_of(members: np.ndarray, *, rank: int, world: int) -> np.ndarray:
    """Every `world`-th, from `rank`, of members that repeat until ranks divide them."""
    return np.resize(members, -(-len(members) // world) * world)[rank::world]


def check_rank(rank: int, world: int) -> None:
    """Raises ValueError where there is no such rank."""
    if not 0 <= rank < world:
        raise ValueError(f"dp_rank={rank} must lie in 0 to {world - 1}: dp_world_size={world}")


def check_same_order(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raises ValueError where a state belongs to another order of samples, or to another loader."""
    stored = state.get("order")
    if not isinstance(stored, Mapping):
        raise ValueError(
            f"this is no state of dit.data.export, but one with {sorted(state)}; begin an epoch"
            " without the state"
        )
    if changes := [f"{n}={stored.get(n)!r} -> {own[n]!r}" for n in own if stored.get(n) != own[n]]:
        raise ValueError(
            f"this state is of another order of samples ({', '.join(changes)}), so that going on"
            " would repeat some and leave out others; give the values and the data of the stopped"
            " run, or begin an epoch without the state"
        )
