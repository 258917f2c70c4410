"""Norms of weights, gradient and update, from the optimizer's float32 parameters."""

# G parts of the model, 4 kinds of SQUARES, W shards of weights on this rank

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dit.distributed.data_parallel import MainParamShard, main_param_shards, state_copy
from dit.distributed.process_groups import device
from dit.models.registry import family_of
from dit.pack_wire import to_device
from dit.train.optimizer import foreach

if TYPE_CHECKING:
    from dit.train.model_and_optimizer import ModelAndOptimizer

EMBEDDERS = "embedders"
"""Part of the model for weights that belong to no other part."""
SQUARES = ("gradient", "weight", "update", "distance")
"""Quantities whose squares are summed; `distance` is the weights minus their EMA."""


def part_of(name: str, parts: Mapping[str, str]) -> str:
    """The part of the model to which the weight `name` belongs, or `EMBEDDERS`.

    `parts` maps a word of a weight's name to the part.
    """
    return next((parts[word] for word in name.split(".") if word in parts), EMBEDDERS)


class Norms:
    """Sums of squares over this rank's shards of weights, gradients and updates."""

    def __init__(self, model: ModelAndOptimizer):
        self.model = model
        names = {w: name for chunk in model.chunks for name, w in chunk.named_parameters()}
        is_copy = state_copy(model.chunks, model.groups) > 0
        shards = main_param_shards(model.optimizer)
        network: Any = model.chunks[0].module
        words = family_of(network.model).parts
        self.parts = [EMBEDDERS, *dict.fromkeys(words.values())]
        self.counted = [
            (index, shard, self.parts.index(part_of(names[shard.weight], words)))
            for index, shard in enumerate(shards)
            if not is_copy and self._counts(shard)
        ]
        self.before: list[Tensor] = []

    def _counts(self, shard: MainParamShard) -> bool:
        split = getattr(shard.weight, "tensor_model_parallel", False)
        copy = getattr(shard.weight, "shared", False)
        return not copy and (split or self.model.groups.tp.rank() == 0)

    @torch.no_grad()
    def keep_weights(self) -> None:
        """Copies this rank's float32 weights before an update; `take` frees the copy."""
        self.before = [shard.value.detach().clone() for _, shard, _ in self.counted]

    @torch.no_grad()
    def take(self) -> dict[str, Tensor]:
        """This rank's sums of squares [G] by part of the model, for each of `SQUARES`.

        Call it after the update; it frees the copy of `keep_weights`.
        """
        squares_G4 = torch.zeros(len(self.parts), 4, dtype=torch.float64, device=device())
        if self.counted:
            squares_W4 = torch.stack(self._norms(), dim=1).double().square()
            part_W = torch.tensor([part for *_, part in self.counted])
            squares_G4.index_add_(0, to_device(part_W, squares_G4.device), squares_W4)
        self.before = []
        return dict(zip(SQUARES, squares_G4.unbind(1), strict=True))

    def _norms(self) -> list[Tensor]:
        """For each of `SQUARES`, the norms [W] of this rank's shards of the weights."""
        weights = [shard.value for _, shard, _ in self.counted]
        nothing = weights[0].new_zeros(())
        gradients = [nothing if value.grad is None else value.grad for value in weights]
        found = [foreach.norms(gradients), foreach.norms(weights)]
        # Differences overwrite the copies of the weights, so they take no further memory.
        foreach.subtract(self.before, weights)
        found.append(foreach.norms(self.before))
        if self.model.ema is None:
            return [*found, torch.zeros_like(found[0])]
        averages = self.model.ema.averages
        foreach.copy(self.before, weights)
        foreach.subtract(self.before, [averages[index] for index, *_ in self.counted])
        return [*found, foreach.norms(self.before)]

    def values(self, squares: Mapping[str, Tensor], *, grad_norm: float) -> dict[str, float]:
        """Norms as metrics, from the `squares` [G] of all ranks, by kind.

        Clipping has scaled all gradients by one factor, so each part's fraction of the whole
        `grad_norm` is unchanged.
        """
        gradient, weight, update, distance = (float(squares[name].sum()) for name in SQUARES)
        values = {
            f"grad_norm_{name}": grad_norm * math.sqrt(square / gradient)
            for name, square in zip(self.parts, squares["gradient"].tolist(), strict=True)
            if gradient
        }
        values |= {"weight_norm": math.sqrt(weight), "update_ratio": math.sqrt(update / weight)}
        if self.model.ema is not None:
            values["ema_distance"] = math.sqrt(distance / weight)
        return values
