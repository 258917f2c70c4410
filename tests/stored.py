"""What a checkpoint holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from torch import Tensor


def stored(place: Path) -> tuple[dict[str, Tensor], Any]:
    """All tensors by name, and what else Megatron-Core keeps."""
    found = dist_checkpointing.load_plain_tensors(str(place))
    tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    assert tensors
    return tensors, dist_checkpointing.load_common_state_dict(str(place))


def assert_same_stored(some: Path, other: Path) -> None:
    """To the last bit."""
    (tensors, rest), (others, other_rest) = stored(some), stored(other)
    assert tensors.keys() == others.keys()
    different = [n for n in tensors if not torch.equal(tensors[n], others[n])]
    assert not different
    assert rest == other_rest
