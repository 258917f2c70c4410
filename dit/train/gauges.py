"""What is measured between two log steps and read at each: one all-reduce for all of it.

It only reads. Training is bit for bit that of a run without it, and no step waits for the device on
its account.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from dit.batch import PackedBatch
from dit.config import RunConfig
from dit.data import dataset_sizes
from dit.objective import Objective
from dit.train.by_level import LossByLevel
from dit.train.learner import Learner
from dit.train.norms import Norms
from dit.train.progress import Progress
from dit.train.seen import Seen
from dit.train.step import Item, Report, Update


class Gauges:
    """Loss by noise level, norms, and samples seen; `read` has their values at log steps."""

    def __init__(self, config: RunConfig, learner: Learner, objective: Objective):
        self.config = config
        self.by_level = LossByLevel(objective, parts=config.validation.quantiles)
        self.norms = Norms(learner)
        self.seen = Seen(
            capacity=config.dataset.task_encoder_seq_length, sizes=dataset_sizes(config)
        )

    def is_due(self, step: int) -> bool:
        return step % self.config.logger.log_interval == 0 or step == self.config.train.train_iters

    def before_update(self, step: int) -> None:
        """Between gradient and update of a step."""
        if self.is_due(step):
            self.norms.keep()

    def add(self, items: Sequence[Item], report: Report) -> None:
        """Takes in the packs of a step that was not skipped, on all ranks."""
        self.by_level.add(items, report.measured)

    def saw(self, packs: Sequence[PackedBatch]) -> None:
        """Takes in the packs that this rank has read for its replica."""
        self.seen.add(packs)

    def read(self, progress: Progress, done: Update) -> dict[str, Any]:
        """The values over all ranks since the last log step; nothing between log steps."""
        if not self.is_due(progress.step):
            return {}
        parts = [self.by_level.take(), self.norms.take(), self.seen.take()]
        flat = torch.cat([part.flatten() for part in parts])
        dist.all_reduce(flat)
        sizes = [part.numel() for part in parts]
        level, squares, counts = (
            whole.view(part.shape) for whole, part in zip(flat.split(sizes), parts, strict=True)
        )
        values: dict[str, Any] = self.by_level.values(level)
        if not done.skipped:
            values |= self.norms.values(squares, grad_norm=done.grad_norm)
        return values | self.seen.values(counts, progress)
