"""How large the adapters of a file are, by its header alone: estimates open no tensors."""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path

from safetensors import SafetensorError, safe_open

_MATRIX = 2  # axes; alphas and magnitudes have fewer


@lru_cache(maxsize=8)  # a plan asks for each of its layouts
def adapter_numbers_of(place: str) -> int | None:
    """Numbers of all factors of a LoRA file, or of a folder's first one.

    None where there is no such file: an estimate can be made where the file is not.
    """
    path = Path(place)
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    try:
        with safe_open(files[0], framework="numpy") as opened:
            shapes = [opened.get_slice(name).get_shape() for name in opened.keys()]  # noqa: SIM118
    except (IndexError, SafetensorError, OSError):
        return None
    return sum(math.prod(shape) for shape in shapes if len(shape) >= _MATRIX) or None
