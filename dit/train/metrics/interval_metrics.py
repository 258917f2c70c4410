"""What is measured between two log steps and read at each: one all-reduce for all of it.

It only reads. Training is bit for bit that of a run without it, and no step waits for the device on
its account.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dit.batch import PackedBatch
from dit.config import RunConfig
from dit.data import dataset_sizes
from dit.distributed.process_groups import device
from dit.objectives import TrainingObjective
from dit.train.metrics.data_stats import DataStats
from dit.train.metrics.loss_by_noise_level import LossByLevel
from dit.train.metrics.norms import Norms
from dit.train.model_and_optimizer import ModelAndOptimizer
from dit.train.progress import TrainProgress
from dit.train.step import Item, RankLoss, Update


class IntervalMetrics:
    """Loss by noise level, norms, and samples seen; `read` has their values at log steps."""

    def __init__(self, config: RunConfig, learner: ModelAndOptimizer, objective: TrainingObjective):
        self.config = config
        self.by_level = LossByLevel(objective, parts=config.validation.quantiles)
        self.norms = Norms(learner)
        self.seen = DataStats(
            capacity=config.dataset.task_encoder_seq_length, sizes=dataset_sizes(config)
        )

    def is_due(self, step: int) -> bool:
        return step % self.config.logger.log_interval == 0 or step == self.config.train.train_iters

    def before_update(self, step: int) -> None:
        """Between gradient and update of a step."""
        if self.is_due(step):
            self.norms.keep()

    def add(self, items: Sequence[Item], report: RankLoss) -> None:
        """Takes in the packs of a step that was not skipped, on all ranks."""
        self.by_level.add(items, report.measured)

    def saw(self, packs: Sequence[PackedBatch]) -> None:
        """Takes in the packs that this rank has read for its replica."""
        self.seen.add(packs)

    def read(self, progress: TrainProgress, done: Update) -> dict[str, Any]:
        """The values over all ranks since the last log step; nothing between log steps."""
        if not self.is_due(progress.step):
            return {}
        running = self._running()
        sums = _over_ranks(running | self.norms.take())
        for mine in running.values():
            mine.zero_()
        values: dict[str, Any] = self.by_level.values(sums)
        if not done.skipped:
            values |= self.norms.values(sums, grad_norm=done.grad_norm)
        return values | self.seen.values(sums, progress)

    def interval(self) -> dict[str, Tensor]:
        """What each rank has added up since the last log step, [ranks, ...]; all ranks call it.

        A checkpoint keeps it, so that a run that goes on writes what one that never stopped does.
        """
        running = self._running()
        flat = _flat(running)
        of_ranks = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(of_ranks, flat)
        rows = _by_name(torch.stack(of_ranks).cpu(), running)
        return {name: x.clone(memory_format=torch.contiguous_format) for name, x in rows.items()}

    def go_on(self, interval: Mapping[str, Tensor]) -> list[str]:
        """Continues an `interval`; returns the metrics that cannot, as they have other parts now.

        With as many ranks as then each has its own share again, and sums are the same to the bit.
        """
        running, rank, ranks = self._running(), dist.get_rank(), dist.get_world_size()
        other = {
            name.partition(".")[0]
            for name, of_ranks in interval.items()
            if name not in running or of_ranks.shape[1:] != running[name].shape
        }
        for name in (n for n in interval if n.partition(".")[0] not in other):
            of_ranks = interval[name]
            if len(of_ranks) == ranks:
                running[name].copy_(of_ranks[rank])
            elif rank == 0:
                running[name].copy_(of_ranks.sum(0))
        return sorted(other)

    def _running(self) -> dict[str, Tensor]:
        return self.by_level.sums | self.seen.sums


def _over_ranks(mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sum of each over all ranks; all have the same names."""
    flat = _flat(mine)
    dist.all_reduce(flat)
    return _by_name(flat, mine)


def _flat(parts: Mapping[str, Tensor]) -> Tensor:
    """All parts end to end, in the order of their names."""
    return torch.cat([parts[name].flatten().to(device()) for name in sorted(parts)])


def _by_name(flat: Tensor, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `_flat`, of the last axis."""
    names = sorted(parts)
    pieces = flat.split([parts[name].numel() for name in names], dim=-1)
    rows = flat.shape[:-1]
    return {n: x.reshape(*rows, *parts[n].shape) for n, x in zip(names, pieces, strict=True)}
