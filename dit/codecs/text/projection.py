"""The text projection of a Diffusers transformer, for texts that are stored projected."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import safetensors
from safetensors import SafetensorError
from torch import Tensor

from dit.codecs.dataset_card import CodecError

_WEIGHT, _BIAS = "crossattn_proj.0.weight", "crossattn_proj.0.bias"


@lru_cache
def projection_of(folder: str) -> tuple[Tensor, Tensor]:
    """Weight and bias of a Diffusers transformer's `crossattn_proj`, float32.

    Raises:
        CodecError: the folder has none.
    """
    found = dict[str, Tensor]()
    try:
        for path in sorted(Path(folder).glob("*.safetensors")):
            with safetensors.safe_open(path, "pt") as file:
                names = {_WEIGHT, _BIAS} & set(file.keys())
                found |= {name: file.get_tensor(name).float() for name in names}
    except (OSError, SafetensorError) as error:
        raise CodecError(f"--text_projection {folder}: {error}") from None
    if len(found) < 2:
        raise CodecError(
            f"--text_projection {folder}: no *.safetensors in it has {_WEIGHT} and {_BIAS}; give"
            " the folder transformer of a Cosmos-Predict2.5 pipeline"
        )
    return found[_WEIGHT], found[_BIAS]
