"""A run in memory: all its parts, and its progress."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist
from torch.nn import Module

from dit.batch import NullInputs
from dit.config import ModelConfig, RunConfig
from dit.data import PackLoader, ValidationPacks
from dit.distributed.data_parallel import ModelChunk
from dit.distributed.pack_broadcast import Replica
from dit.objectives.objective import TrainingObjective
from dit.train.checkpoint.state_dict import TrainProgress
from dit.watching import NotShown

if TYPE_CHECKING:
    import numpy as np
    from megatron.core.transformer.module import MegatronModule

    from dit.train.checkpoint.async_save import Saver
    from dit.train.checkpoint.mirror import Mirror
    from dit.train.checkpoint.starting_point import Origin
    from dit.train.metrics.interval_metrics import IntervalMetrics
    from dit.train.model_and_optimizer import ModelAndOptimizer

Export = Callable[[Path], Path]
"""Function that exports a checkpoint and returns the path of the export."""
Samples = Callable[["TrainState", Module], "DrawnSamples | None"]
"""Function of the run and a model, called on all ranks, that generates samples and writes them; it
returns them on the first rank."""


class InitialWeights(Protocol):
    """Interface of weights in another tool's format from which a new run starts."""

    def fill(self, model: MegatronModule) -> None:
        """Sets the weights of `model`, a model chunk on this rank; all ranks call it."""
        ...

    def origin(self) -> Origin:
        """The files from which the weights are read, with digests; all ranks call it."""
        ...

    @property
    def notes(self) -> list[str]:
        """Lines for the start of the log."""
        ...


ReadFolder = Callable[[Path, ModelConfig], InitialWeights]
"""Function that opens a Diffusers folder of frozen weights for the network of the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnSamples:
    """The samples that a validation generated, and their files."""

    grid: Path | None  # the first frames of all samples, in the folder with their files
    videos: list[tuple[Path, str]]  # the samples with several frames, and their prompts
    quality: dict[str, float]  # by the name of the metric
    firsts: list[np.ndarray] = field(default_factory=list)  # first frames, uint8 [H, W, 3]
    undrawn: list[NotShown] = field(default_factory=list)  # what could not be drawn


@dataclass(kw_only=True, slots=True)
class TrainState:
    """Everything that a run holds in memory."""

    config: RunConfig
    folder: Path | None  # the run folder; None writes nothing
    model: ModelAndOptimizer
    interval_metrics: IntervalMetrics
    replica: Replica
    loader: PackLoader | None  # on the rank that reads for its replica
    validation: Mapping[str, ValidationPacks]  # of this replica, by the name of the loss
    objective: TrainingObjective
    null: NullInputs  # the inputs of a sample without caption
    # The network of `distill.teacher`; empty if the key is not set
    teacher: Sequence[ModelChunk] = ()
    critic: ModelAndOptimizer | None = None  # of distill.method=dmd
    card: dict[str, Any] | None  # how to decode the data; mock data has none
    progress: TrainProgress = field(default_factory=TrainProgress)
    saver: Saver | None = None  # where there is a run folder
    mirror: Mirror | None = None  # of checkpoint.mirror, on the first rank
    saved_step: int = -1  # step of the newest checkpoint
    export: Export | None = None  # called with each complete checkpoint, by all ranks
    samples: Samples | None = None  # called at each validation, by all ranks
    notes: list[str] = field(default_factory=list)  # lines for the start of the log

    def at_step(self, step: int) -> None:
        """Sets the training step, counted from 1, in all networks that are trained."""
        for model in (self.model, self.critic):
            if model is not None:
                model.at_step(step)

    @property
    def data_ranks(self) -> dist.ProcessGroup:
        """The processes that read different samples: the data-parallel group."""
        return self.model.groups.dp
