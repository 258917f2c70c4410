"""How far a run has come: what a checkpoint counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from dit.config import RunConfig
from dit.data import PackLoader, ValidationPacks
from dit.distributed.pack_broadcast import Replica
from dit.drawing import Undrawn
from dit.objectives import Objective

if TYPE_CHECKING:
    from dit.train.checkpoint.async_save import Saver
    from dit.train.metrics.interval_metrics import IntervalMetrics
    from dit.train.model_and_optimizer import ModelAndOptimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainProgress:
    """Steps and samples since the start of the run."""

    step: int = 0
    consumed_samples: int = 0  # over all ranks
    samples_before: int = 0  # of them, those from before the data began anew
    of_datasets: dict[str, int] = field(default_factory=dict)  # since then, for each of a blend
    skipped_steps: int = 0  # that changed nothing: loss or gradient was not finite
    skipped_in_a_row: int = 0  # the last of them
    lowest_val_loss: float = math.inf  # of the checkpoints so far

    @property
    def updates(self) -> int:
        """Steps that changed the weights. Learning rate, Adam and average count these."""
        return self.step - self.skipped_steps

    def with_other_data(self) -> TrainProgress:
        """The same steps, where the data begin anew: passes and validation losses are of others."""
        return replace(
            self,
            samples_before=self.consumed_samples,
            of_datasets={},
            lowest_val_loss=math.inf,
        )

    def after(
        self, *, samples: int, of_datasets: Mapping[str, int], skipped: bool
    ) -> TrainProgress:
        """One step later."""
        so_far = self.of_datasets
        return replace(
            self,
            step=self.step + 1,
            consumed_samples=self.consumed_samples + samples,
            of_datasets={name: so_far.get(name, 0) + n for name, n in of_datasets.items()},
            skipped_steps=self.skipped_steps + skipped,
            skipped_in_a_row=self.skipped_in_a_row + 1 if skipped else 0,
        )


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
    objective: Objective
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
