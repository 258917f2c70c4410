"""A bound of the effect that rounding of gradients may have on the weights of two layouts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from dit.config import OptimizerConfig, OptimizerKind
from dit.distributed.data_parallel import main_param_shards
from dit.layout_check.adam_gaps import update_gaps
from dit.train.optimizer.muon import RMS, coefficients
from dit.train.optimizer.states import state_of

_SMALL = 1e-2
"""Least assumed size of a tensor's gradients, as a fraction of the root mean square of all
gradients. The gradient of queries with one key each is 2e-7 of it, mere rounding."""


def gradient_sizes(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Estimates the size of the terms of each gradient element, which bounds its rounding error.

    An element is a sum, whose terms are not known. Their size is taken as the absolute value of the
    element plus the root mean square of its tensor. A tensor may be nothing but rounding error,
    such as the gradient of the norm of keys if there is one key; its root mean square therefore
    counts as at least `_SMALL` of that of all gradients.
    """
    squares = [gradient.double().square() for gradient in gradients]
    count = sum(square.numel() for square in squares)
    least = _SMALL * math.sqrt(sum(float(square.sum()) for square in squares) / count)
    return [
        gradient.abs() + max(float(square.mean()) ** 0.5, least)
        for gradient, square in zip(gradients, squares, strict=True)
    ]


class Reach:
    """Upper bounds of the differences that rounding has made in each weight since the first update.

    Two layouts' gradients of an element differ by at most `rounding` times the largest of
    `gradient_sizes` of all updates so far, and their updates by AdamW by at most `update_gaps`. The
    bounds of all updates are summed, each times its learning rate. The class works on one process
    only.

    Muon updates a matrix as a whole. Its iterations begin with a matrix of norm 1, and each
    enlarges a small difference by at most its first coefficient.
    """

    def __init__(
        self, optimizer: MegatronOptimizer, config: OptimizerConfig, *, rounding: float
    ) -> None:
        self._optimizer, self._rounding = optimizer, rounding
        self._params = [shard.value for shard in main_param_shards(optimizer)]
        self._gradients = [torch.zeros_like(p) for p in self._params]  # the largest size so far
        self._kind = config.kind
        self._enlarged = math.prod(first for first, _, _ in coefficients(config))
        self.bounds = [torch.zeros_like(p) for p in self._params]
        """Upper bound of the difference between two layouts for each element of a weight, in the
        order of `main_param_shards`."""

    @torch.no_grad()
    def add_update(self) -> None:
        """Adds the effect of the optimizer's latest update, while its gradients exist.

        Raises:
            NotImplementedError: the optimizer is neither AdamW nor Muon.
        """
        group_of = {p: group for group in self._optimizer.param_groups for p in group["params"]}
        sizes = gradient_sizes([p.grad for p in self._params if p.grad is not None])
        each = zip(self._params, sizes, self._gradients, self.bounds, strict=True)
        for p, size, largest, bound in each:
            largest.copy_(torch.maximum(largest, size))
            group, state = group_of[p], state_of(self._optimizer, p)
            if "exp_avg_sq" in state:
                mean_square = state["exp_avg_sq"] / (1 - group["betas"][1] ** group["step"])
                gaps = update_gaps(self._rounding * largest, mean_square, eps=group["eps"])
            elif self._kind is OptimizerKind.MUON:
                gaps = torch.full_like(p, self._rounding * self._enlarged * RMS)
            else:
                raise NotImplementedError(
                    f"an update of optimizer.kind={self._kind} with the states"
                    f" {', '.join(state) or 'none'} has no bound: add what a difference between"
                    " gradients may do to it to dit/layout_check/rounding.py"
                )
            # Both sums of weight and update are rounded, to half a unit in the last place.
            bound += group["lr"] * gaps + torch.finfo(p.dtype).eps * p.abs()
