"""Norms of weights, gradient and update, from the optimizer's float32 parameters.

    grad_norm_attention, grad_norm_mlp, ...  of parts of the model, before clipping; their squares
                                             add up to that of grad_norm
    weight_norm   of all weights
    update_ratio  norm of the change by the step, over weight_norm
    ema_distance  norm of weights - average, over weight_norm

Every weight counts once on every layout: copies on tensor ranks are left out, and copies on data
ranks where the optimizer is not sharded.
"""

# G parts of the model, 4 kinds of SQUARES

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dit.distributed.data_parallel import MainParamShard, is_sharded, main_param_shards
from dit.distributed.process_groups import device
from dit.models.family import family_of

if TYPE_CHECKING:
    from dit.train.model_and_optimizer import ModelAndOptimizer

SQUARES = ("gradient", "weight", "update", "distance")
"""Kinds of sums of squares; `distance` is that to the average."""
EMBEDDERS = "embedders"
"""The part of weights that no word of their family's `parts` names."""


def part_of(name: str, parts: Mapping[str, str]) -> str:
    """The part of the model of a weight; weights of no other part are embedders."""
    return next((parts[word] for word in name.split(".") if word in parts), EMBEDDERS)


class Norms:
    """Sums of squares over this rank's shards of the weights."""

    def __init__(self, model: ModelAndOptimizer):
        self.model = model
        names = {w: name for chunk in model.chunks for name, w in chunk.named_parameters()}
        is_copy = not is_sharded(model.chunks) and model.groups.dp_cp.rank() > 0
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
        """Keeps a copy of the weights until `take`; validation of the average takes as much."""
        self.before = [shard.value.detach().clone() for _, shard, _ in self.counted]

    @torch.no_grad()
    def take(self) -> dict[str, Tensor]:
        """This rank's sums of squares after an update, float64 [G], by kind."""
        squares_G4 = torch.zeros(len(self.parts), 4, dtype=torch.float64, device=device())
        for (index, shard, part), before in zip(self.counted, self.before, strict=True):
            of = {"weight": shard.value, "update": before.sub_(shard.value).neg_()}
            if shard.value.grad is not None:
                of["gradient"] = shard.value.grad
            if self.model.ema is not None:
                of["distance"] = torch.sub(shard.value, self.model.ema.averages[index])
            norms = [
                torch.linalg.vector_norm(of[name]) if name in of else shard.value.new_zeros(())
                for name in SQUARES
            ]
            squares_G4[part] += torch.stack(norms).double().square()
        self.before = []
        return dict(zip(SQUARES, squares_G4.unbind(1), strict=True))

    def values(self, squares: Mapping[str, Tensor], *, grad_norm: float) -> dict[str, float]:
        """The norms from the sums of all ranks.

        Clipping has scaled all gradients by one factor, so their parts of the norm are unchanged.
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
