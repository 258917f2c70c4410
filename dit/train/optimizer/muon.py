"""Muon: the momentum of whole matrices is orthogonalised (arXiv:2502.16982).

1. orthogonalise   Newton-Schulz iterations of one matrix
2. Muon            one update of the matrices that `orthogonalised` lists

One of our weights may join several linears, such as queries, keys and values, and so may one of
Diffusers' (FLUX.2). Each linear is orthogonalised separately: orthogonalising joined linears would
be another optimizer (arXiv:2608.02502), and so would orthogonalising the parts on tensor ranks.
"""

# O outputs, I inputs of a linear

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from dit.config import OptimizerConfig, Precision, RunConfig
from dit.config.training import NewtonSchulz
from dit.distributed.data_parallel import ModelChunk
from dit.models.diffusers.names import Pair
from dit.models.linears import orthogonalised
from dit.sizing.memory import trained_count
from dit.train.optimizer import foreach
from dit.train.optimizer.states import state_of, updates_made
from dit.train.optimizer.whole_matrices import SharedMatrix, WholeMatrices

_COEFFICIENTS = {
    # https://kellerjordan.github.io/posts/muon
    NewtonSchulz.SIMPLE: [(3.4445, -4.7750, 2.0315)],
    # Emerging-Optimizers (NVIDIA), `quintic`
    NewtonSchulz.QUINTIC: [
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ],
    # arXiv:2505.16932, Algorithm 1, rounded; then the iteration of Newton and Schulz itself
    NewtonSchulz.POLAR_EXPRESS: [
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.875, -1.25, 0.375),
    ],
}
RMS = 0.2
"""Root mean square of Muon's updates, about as large as AdamW's (arXiv:2502.16982, Eq. 4)."""
_FLOOR = 1e-3
"""Fraction of the root mean square of all gradients. A linear whose mean gradient is below it gets
a proportionally smaller step, and so does each row between two orthogonalisations. Such a gradient
is rounding noise (for example of queries and keys if there is only one key), and a full step would
depend on the layout."""
_TINY = torch.finfo(torch.float32).tiny


def coefficients(config: OptimizerConfig) -> list[tuple[float, float, float]]:
    """(a, b, c) of each of `config.muon_steps` iterations; the last known triple repeats."""
    named = _COEFFICIENTS[config.muon_coefficients]
    return [named[min(step, len(named) - 1)] for step in range(config.muon_steps)]


def orthogonalise(
    x_OI: Tensor, each: Sequence[tuple[float, float, float]], dtype: torch.dtype = torch.float32
) -> Tensor:
    """Approximately U V^T for the matrix `x_OI` = U S V^T, float32 [O, I].

    Singular values become about 1; a zero matrix stays zero. Each iteration is X <- a X + (b A + c
    A^2) X, A = X X^T, on the smaller side (arXiv:2502.16982, Eq. 2), with (a, b, c) from `each`, in
    `dtype`.
    """
    tall = x_OI.shape[0] > x_OI.shape[1]
    x = (x_OI.T if tall else x_OI) / x_OI.norm().clamp_min(_TINY)
    x = x.to(dtype)
    for a, b, c in each:
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if tall else x).float()


class Muon:
    """Updates the matrices that `orthogonalised` lists, and hides them from the other optimizer."""

    def __init__(
        self,
        config: RunConfig,
        chunks: Sequence[ModelChunk],
        optimizer: MegatronOptimizer,
        groups: ProcessGroupCollection,
    ):
        self._config, self._optimizer = config.optimizer, optimizer
        wide = config.model.precision is Precision.FP32
        self._type = torch.float32 if wide else torch.bfloat16
        self._floor = _FLOOR / math.sqrt(trained_count(config))
        self._each = coefficients(config.optimizer)
        pairs = orthogonalised(config.model, config.optimizer)
        self._whole = WholeMatrices(pairs, chunks, optimizer, groups, dtype=self._type)
        self._means = {
            matrix: state_of(optimizer, shard.value)["exp_avg"]
            for matrix, shard in self._whole.mine.items()
        }

    @contextmanager
    def updated(self, *, norm: float) -> Iterator[None]:
        """A context that first updates this rank's shards of matrices, then hides their gradients.

        AdamW, which steps inside the context, therefore skips these matrices. At its end the
        gradients are back, for metrics. `norm` is the norm of the whole gradient after clipping.
        All ranks call it.
        """
        values: list[Any] = [shard.value for shard in self._whole.mine.values()]
        gradients = [value.grad for value in values]
        updates = updates_made(self._optimizer.param_groups)
        by_rows = updates % self._config.muon_period > 0
        self._update(gradients, floor=self._floor * norm, by_rows=by_rows)
        for value in values:
            value.grad = None
        yield
        for group in self._optimizer.param_groups:
            # Some optimizers count only groups that have a weight on this rank. If counts differed,
            # ranks would disagree on `by_rows` and wait for each other.
            group["step"] = updates + 1
        for value, gradient in zip(values, gradients, strict=True):
            value.grad = gradient  # metrics compute its norm

    @torch.no_grad()
    def _update(self, gradients: Sequence[Tensor], *, floor: float, by_rows: bool) -> None:
        foreach.lerp([*self._means.values()], gradients, 1 - self._config.muon_momentum)
        groups = self._optimizer.param_groups
        group_of = {value: group for group in groups for value in group["params"]}
        for matrix, update in (self._by_rows if by_rows else self._by_matrices)(floor):
            value = self._whole.mine[matrix].value
            rate, decay = (group_of[value][name] for name in ("lr", "weight_decay"))
            value.mul_(1 - rate * decay).view(-1).add_(update, alpha=-rate)

    def _momentum(self, matrix: SharedMatrix) -> Tensor:
        """This rank's shard of the momentum that Muon orthogonalises for `matrix`, flat."""
        mean, gradient = self._means[matrix], self._whole.mine[matrix].value.grad
        if self._config.muon_nesterov:
            assert gradient is not None
            mean = torch.lerp(gradient, mean, self._config.muon_momentum)
        return mean.view(-1)

    def _by_matrices(self, floor: float) -> Iterator[tuple[SharedMatrix, Tensor]]:
        """(matrix, this rank's update), computed from whole matrices, each linear separately.

        The root mean square of updates is that of AdamW's, whatever the shape (arXiv:2502.16982,
        Eq. 4).
        """

        def of_linear(momentum_OI: Tensor) -> Tensor:
            size = RMS * math.sqrt(max(momentum_OI.shape))
            above = momentum_OI.norm() / (floor * math.sqrt(momentum_OI.numel()) + _TINY)
            update_OI = orthogonalise(momentum_OI, self._each, self._type)
            return update_OI * (size * above.clamp(max=1))

        def update(pair: Pair, whole_OI: Tensor) -> Tensor:
            parts = zip(pair.split(whole_OI.float()), pair.linears, strict=True)
            return pair.join(
                [torch.cat([of_linear(x_OI) for x_OI in part.split(rows)]) for part, rows in parts]
            )

        return self._whole.applied(self._momentum, update)

    def _by_rows(self, floor: float) -> Iterator[tuple[SharedMatrix, Tensor]]:
        """(matrix, this rank's update), from separately normalised rows (arXiv:2608.20818)."""
        squares = self._whole.squares_of_rows(self._momentum)
        for matrix, shard in self._whole.mine.items():
            part, momentum = shard.part, self._momentum(matrix)
            width, inputs = matrix.shape[1], matrix.pair.shape[1]
            norms = squares[matrix].sqrt()
            above = (norms / (floor * math.sqrt(inputs) + _TINY)).clamp(max=1)
            factors = RMS * math.sqrt(inputs) * above / norms.clamp_min(_TINY)
            first, last = part.start // width, -(-part.stop // width)
            each = factors[first:last].repeat_interleave(width)
            start = part.start - first * width
            yield matrix, momentum * each[start : start + len(momentum)]
