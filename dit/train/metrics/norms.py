"""How large weights, gradient and update are, from the optimizer's own float32 values.

    grad_norm_attention, grad_norm_mlp, ...  of a part of the model, before clipping: their squares
                                             add up to that of grad_norm
    weight_norm   of all weights
    update_ratio  norm of what the step changed, over weight_norm
    ema_distance  norm of weights - average, over weight_norm

Every weight counts once, whatever the layout: replicas over tensor ranks are left out, and those
over data ranks where the optimizer is not distributed.
"""

# G parts of the model; the 4 are those of SQUARES

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dit.distributed.process_groups import device
from dit.models.family import family_of
from dit.train.main_params import MainParamShard, main_param_shards
from dit.train.model_and_optimizer import ModelAndOptimizer

SQUARES = ("gradient", "weight", "update", "distance")
"""Of what there are norms; the last is to the average."""
EMBEDDERS = "embedders"
"""The part of weights that no word of their family's `parts` names."""


def part_of(name: str, parts: Mapping[str, str]) -> str:
    """The part of the model that a weight belongs to."""
    return next((parts[word] for word in name.split(".") if word in parts), EMBEDDERS)


class Norms:
    """Sums of squares over this rank's share of the weights."""

    def __init__(self, learner: ModelAndOptimizer):
        self.learner = learner
        names = {w: name for chunk in learner.chunks for name, w in chunk.named_parameters()}
        once = learner.chunks[0].ddp_config.use_distributed_optimizer
        replica = not once and learner.groups.dp_cp.rank() > 0
        shards = main_param_shards(learner.optimizer)
        network: Any = learner.chunks[0].module
        words = family_of(network.model).parts
        self.parts = [EMBEDDERS, *dict.fromkeys(words.values())]
        self.counted = [
            (index, shard, self.parts.index(part_of(names[shard.weight], words)))
            for index, shard in enumerate(shards)
            if not replica and self._is_ours(shard)
        ]
        self.before: list[Tensor] = []

    def _is_ours(self, shard: MainParamShard) -> bool:
        split = getattr(shard.weight, "tensor_model_parallel", False)
        copy = getattr(shard.weight, "shared", False)
        return not copy and (split or self.learner.groups.tp.rank() == 0)

    @torch.no_grad()
    def keep(self) -> None:
        """Keeps the weights until `take`: as much memory as an evaluation of the average needs."""
        self.before = [shard.value.detach().clone() for _, shard, _ in self.counted]

    @torch.no_grad()
    def take(self) -> dict[str, Tensor]:
        """This rank's sums of squares [G] by name, float64; after an update."""
        squares_G4 = torch.zeros(len(self.parts), 4, dtype=torch.float64, device=device())
        for (index, shard, part), before in zip(self.counted, self.before, strict=True):
            of = {"weight": shard.value, "update": before.sub_(shard.value).neg_()}
            if shard.value.grad is not None:
                of["gradient"] = shard.value.grad
            if self.learner.ema is not None:
                of["distance"] = torch.sub(shard.value, self.learner.ema.averages[index])
            norms = [
                torch.linalg.vector_norm(of[name]) if name in of else shard.value.new_zeros(())
                for name in SQUARES
            ]
            squares_G4[part] += torch.stack(norms).double().square()
        self.before = []
        return dict(zip(SQUARES, squares_G4.unbind(1), strict=True))

    def values(self, squares: Mapping[str, Tensor], *, grad_norm: float) -> dict[str, float]:
        """The numbers of the module's page from the sums of all ranks.

        Gradients have been clipped by now, all by one factor, so that their shares are as before.
        """
        gradient, weight, update, distance = (float(squares[name].sum()) for name in SQUARES)
        values = {
            f"grad_norm_{name}": grad_norm * math.sqrt(square / gradient)
            for name, square in zip(self.parts, squares["gradient"].tolist(), strict=True)
            if gradient
        }
        values |= {"weight_norm": math.sqrt(weight), "update_ratio": math.sqrt(update / weight)}
        if self.learner.ema is not None:
            values["ema_distance"] = math.sqrt(distance / weight)
        return values
