"""Training loss by quantile of the noise level, added up on the device between two log steps.

    loss_q10   mean over the samples whose level is in the lowest fifth of its density; q90 is much
               noise

The parts are those of `validation.quantiles`, so that `val_loss_q10` is their counterpart.
"""

# N samples of a pack, Q parts of the density of the levels

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dit.distributed.process_groups import device
from dit.objectives import TrainingObjective
from dit.train.step import Item, PackLoss
from dit.train.validation import quantiles


class LossByLevel:
    """Errors and what they are divided by, for each part; nothing here waits for the device."""

    def __init__(self, objective: TrainingObjective, *, parts: int):
        self.objective = objective
        self.edges = [index / parts for index in range(1, parts)]
        self.names = [f"loss_q{100 * middle:.3g}" for middle in quantiles(parts)]
        self.error_Q, self.count_Q = torch.zeros(2, parts, dtype=torch.float64, device=device())

    @property
    def sums(self) -> dict[str, Tensor]:
        """What is added up, by the metric that it makes."""
        return {"loss_q.error": self.error_Q, "loss_q.count": self.count_Q}

    def add(self, items: Sequence[Item], losses: Sequence[PackLoss]) -> None:
        """Takes the packs of a step in; `losses` are empty on ranks that count none."""
        for (whole, problem), (loss, part) in zip(items, losses, strict=False):
            part_N = self._part_of(problem.noise_N, whole.num_tokens)
            error_N, count_N = loss.of_samples(part).unbind(1)
            self.error_Q.index_add_(0, part_N, error_N)
            self.count_Q.index_add_(0, part_N, count_N)

    def _part_of(self, noise_N: Tensor, num_tokens: Sequence[int]) -> Tensor:
        """Part that each sample's level is in; levels rise with their quantiles."""
        part_N = torch.zeros(len(num_tokens), dtype=torch.int64, device=noise_N.device)
        for edge in self.edges:
            quantile_N = torch.full((len(num_tokens),), edge, dtype=torch.float64)
            border_N = self.objective.levels(quantile_N, num_tokens)
            part_N += noise_N >= border_N.to(noise_N.device, non_blocking=True)
        return part_N

    def values(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Means from the sums of all ranks; a part that no sample was in has none."""
        errors, counts = sums["loss_q.error"].tolist(), sums["loss_q.count"].tolist()
        rows = zip(self.names, errors, counts, strict=True)
        return {name: error / count for name, error, count in rows if count}
