"""The teacher of a distillation, whose weights nothing changes.

1. teacher_start   its weights: a checkpoint or a Diffusers folder (`distill.teacher`)
2. build_teacher   the network, all of it frozen, on the layout of the run
3. as_teacher      fills the critic of DMD with its weights
4. taught          the chunks that answer as the teacher; with adapters, those of the student
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule

from dit.checkpoint_paths import CheckpointError, has_adapters
from dit.config import (
    DistillConfig,
    EmaConfig,
    EmaKind,
    LoraConfig,
    OptimizerConfig,
    RunConfig,
    Weights,
)
from dit.distributed.collective_errors import from_first_rank
from dit.distributed.data_parallel import ModelChunk
from dit.lora.checkpoint import AdapterRun, FrozenBase
from dit.models.layers.adaptable import adapters_off
from dit.train.checkpoint.adapters import AdapterStart, check_base, opened_folder
from dit.train.checkpoint.starting_point import named_checkpoint
from dit.train.model_and_optimizer import Initialise, build_model, leave_to_checkpoint
from dit.train.train_state import ReadFolder

if TYPE_CHECKING:
    from dit.train.train_state import TrainState


def teacher_start(config: RunConfig, read_folder: ReadFolder | None) -> AdapterStart | None:
    """The weights of `distill.teacher`, without adapters; None without a teacher."""
    if config.distill.method is None or config.distill.teacher is None:
        return None
    base = from_first_rank(lambda: teacher_weights(config))
    folder = opened_folder(base, frozen_run(config).model, read_folder)
    return AdapterStart(run=AdapterRun(base=base, adapters={}), folder=folder, begins=False)


def check_teacher(config: RunConfig, read_folder: ReadFolder | None) -> None:
    """Refuses what `teacher_start` does, on one process.

    Raises:
        ValueError: as there.
    """
    if config.distill.method is not None and config.distill.teacher is not None:
        opened_folder(teacher_weights(config), frozen_run(config).model, read_folder)


def teacher_weights(config: RunConfig) -> FrozenBase:
    """The place of the weights of `distill.teacher`, of which it reads no tensor.

    Raises:
        CheckpointError: there is no such folder, or its checkpoint does not fit.
    """
    place = Path(config.distill.teacher or "")
    if (place / "config.json").is_file() or (place / "model_index.json").is_file():
        return FrozenBase(path=place.resolve(), diffusers=True, averaged=False, digest="")
    path = named_checkpoint(place, named=f"distill.teacher={place}")
    if has_adapters(path):
        raise CheckpointError(
            f"distill.teacher={place} holds adapters and no weights; add them to their base"
            " (`python -m dit.convert export --merged`), and name that folder"
        )
    averaged = config.distill.teacher_weights is Weights.EMA
    base = FrozenBase(path=path.resolve(), averaged=averaged, digest="")
    check_base(base, config.model)
    return base


def frozen_run(config: RunConfig) -> RunConfig:
    """The run's configuration for its teacher: the same network and layout, nothing trained."""
    return replace(
        config,
        lora=LoraConfig(),
        distill=DistillConfig(),
        ema=EmaConfig(kind=EmaKind.NONE),
        optimizer=OptimizerConfig(),
        train=replace(config.train, warm_start_ema=False),
        model=replace(config.model, blocks_to_swap=0),
    )


def build_teacher(
    config: RunConfig,
    groups: ProcessGroupCollection,
    start: AdapterStart | None,
    *,
    fill: Initialise = leave_to_checkpoint,
) -> list[ModelChunk]:
    """The parts of the teacher on this rank, filled by `fill`, then by `start`; all ranks call it.

    Raises:
        CheckpointError: a file has changed since it was saved.
    """
    config = frozen_run(config)

    def load_base(modules: Sequence) -> None:
        if start is not None:
            start.load_base(modules, config.model, groups)

    chunks = build_model(config, groups, fill=fill, adapters={}, load_base=load_base)
    for chunk in chunks:
        chunk.eval()
    return chunks


def as_teacher(
    module: MegatronModule, *, config: RunConfig, read_folder: ReadFolder | None
) -> None:
    """Fills a part of a network with the weights of `distill.teacher`; all ranks call it.

    Raises:
        CheckpointError: as `teacher_start`.
    """
    start, network = teacher_start(config, read_folder), module
    assert start is not None, "RunConfig asks for a teacher where all weights are trained"
    groups: Any = network.groups  # type: ignore[union-attr]
    start.load_base([network], frozen_run(config).model, groups)


@contextmanager
def taught(run: TrainState) -> Iterator[Sequence[ModelChunk]]:
    """The teacher's chunks; inside the context adapters are off if the teacher is their base."""
    if run.teacher:
        yield run.teacher
        return
    with ExitStack() as inside:
        for chunk in run.model.chunks:
            inside.enter_context(adapters_off(chunk))
        yield run.model.chunks
