"""Weights with the products of adapters added, read one tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from dit.config import RunConfig, Weights
from dit.convert.adapters.stored import StoredAdapters, open_adapters
from dit.convert.diffusers_checkpoint import DiffusersFolder, open_folder
from dit.convert.errors import ConvertError
from dit.convert.lora import LoraFactors
from dit.convert.megatron_checkpoint import StoredWeights
from dit.models.diffusers_names import Pair
from dit.models.lora.targets import their_modules
from dit.models.registry import pairs
from dit.train.checkpoint.adapters import FrozenBase, checked_base, found_base


class MergedWeights:
    """W + alpha / r B A of a base, added in float32, each in the type that W is stored in."""

    def __init__(self, base: StoredWeights | _DiffusersBase, factors: Mapping[str, LoraFactors]):
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
    stored = _stored_base(checked_base(place, opened.config), opened)
    return MergedWeights(stored, opened.factors), opened.config, opened.weights


class _DiffusersBase:
    """The weights of a Diffusers folder as tensors of ours."""

    def __init__(self, source: DiffusersFolder):
        self.source = source

    def dtype(self, pair: Pair) -> torch.dtype:
        return self.source.headers[pair.theirs[0]].dtype

    def read(self, pair: Pair) -> Tensor:
        return pair.join([self.source.read(name) for name in pair.theirs])


def _stored_base(base: FrozenBase, opened: StoredAdapters) -> StoredWeights | _DiffusersBase:
    """The weights beside adapters.

    Raises:
        ConvertError: they were drawn from a seed, and are stored nowhere.
    """
    if base.path is None:
        raise ConvertError(
            f"the weights beside the adapters of {opened.path} were drawn from a seed, and are in"
            " no checkpoint; `python -m dit.convert export-lora` takes the adapters alone"
        )
    if base.diffusers:
        return _DiffusersBase(open_folder(base.path))
    stored = StoredWeights(base.path, averaged=base.averaged)
    stored.check(pairs(opened.config.model))
    return stored
