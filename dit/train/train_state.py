"""A run in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from dit.config import RunConfig
from dit.data import PackLoader, ValidationPacks
from dit.distributed.pack_broadcast import Replica
from dit.drawing import Undrawn
from dit.objectives import TrainingObjective
from dit.train.checkpoint.async_save import Saver
from dit.train.metrics.interval_metrics import IntervalMetrics
from dit.train.model_and_optimizer import ModelAndOptimizer
from dit.train.progress import TrainProgress

Export = Callable[[Path], Path]
"""Checkpoint -> where it is for others to read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnSamples:
    """What was sampled at one validation."""

    grid: Path | None  # the first frames of all, in the folder with their files, if there is one
    videos: list[tuple[Path, str]]  # those that move, with what they are to show
    quality: dict[str, float]  # by the name of the metric
    undrawn: list[Undrawn] = field(default_factory=list)  # what could not be drawn


Samples = Callable[["TrainState", Module], DrawnSamples | None]
"""Writes samples of a model; the first rank gets where they are."""


@dataclass(kw_only=True, slots=True)
class TrainState:
    """All that a run holds in memory."""

    config: RunConfig
    folder: Path | None  # where it is written down; None writes nothing
    learner: ModelAndOptimizer
    gauges: IntervalMetrics
    replica: Replica
    loader: PackLoader | None  # of the rank that reads for its replica
    validation: dict[str, ValidationPacks]  # this replica's, by the name of the loss
    objective: TrainingObjective
    null_text_LE: Tensor
    card: dict[str, Any] | None
    progress: TrainProgress = field(default_factory=TrainProgress)
    saver: Saver | None = None  # where there is a folder
    saved_step: int = -1
    export: Export | None = None  # called with each checkpoint that is whole, by all ranks
    samples: Samples | None = None  # called at each validation, by all ranks
    notes: list[str] = field(default_factory=list)  # how it came to its first step, in words

    @property
    def data_ranks(self) -> dist.ProcessGroup:
        """The processes that read different samples."""
        return self.learner.groups.dp
