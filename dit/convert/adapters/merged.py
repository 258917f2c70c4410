"""Weights with the products of adapters added, read one tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from dit.config import RunConfig, Weights
from dit.convert.adapters.stored import open_adapters
from dit.convert.errors import ConvertError
from dit.convert.lora import LoraFactors
from dit.convert.megatron_checkpoint import StoredWeights
from dit.models.diffusers_names import Pair, pairs
from dit.models.lora.targets import their_modules
from dit.train.checkpoint.adapters import found_base


class MergedWeights:
    """W + alpha / r B A of a base, added in float32, each in the type that W is stored in."""

    def __init__(self, base: StoredWeights, factors: Mapping[str, LoraFactors]):
        self.base, self.factors = base, factors

    def dtype(self, pair: Pair) -> torch.dtype:
        return self.base.dtype(pair)

    def read(self, pair: Pair) -> Tensor:
        """One whole tensor of ours."""
        stored = self.base.read(pair)
        names = their_modules(pair)
        if stored.ndim != 2 or not any(name in self.factors for name in names):
            return stored
        parts = pair.split(stored.float())
        for number, name in enumerate(names):
            if (one := self.factors.get(name)) is not None:
                parts[number] = parts[number] + one.product()
        return pair.join(parts).to(stored.dtype)


def open_merged(
    checkpoint: Path, weights: Weights | None, *, base: str | None = None
) -> tuple[MergedWeights, RunConfig, Weights]:
    """The merged weights of a checkpoint of adapters, its configuration, and which adapters.

    `base` says where the base is now, if it was moved.

    Raises:
        ConvertError: there are no adapters.
        CheckpointError: the checkpoint is damaged, or its base is not found.
    """
    opened = open_adapters(checkpoint, weights)
    place = found_base(opened.run.base, moved_to=base or opened.config.lora.base)
    stored = stored_base(place.path, averaged=place.averaged, checkpoint=opened.path)
    stored.check(pairs(opened.config.model))
    return MergedWeights(stored, opened.factors), opened.config, opened.weights


def stored_base(path: Path | None, *, averaged: bool, checkpoint: Path) -> StoredWeights:
    """The weights beside adapters.

    Raises:
        ConvertError: they were drawn from a seed, and are stored nowhere.
    """
    if path is None:
        raise ConvertError(
            f"the weights beside the adapters of {checkpoint} were drawn from a seed, and are in no"
            " checkpoint; `python -m dit.convert export-lora` takes the adapters alone"
        )
    return StoredWeights(path, averaged=averaged)
