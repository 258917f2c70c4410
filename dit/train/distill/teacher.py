"""The teacher of a distillation, whose weights are frozen.

1. teacher_start   its weights: a checkpoint or a Diffusers folder (`distill.teacher`)
2. build_teacher   its frozen network, on the layout of the run
3. taught          its model chunks; with adapters, the student's chunks without adapters
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.core.process_groups_config import ProcessGroupCollection

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
    """The weights of `distill.teacher`; None if the key is not set. All ranks call it.

    Raises:
        ValueError: there are no weights, or they do not fit the student's network.
    """
    if config.distill.method is None or config.distill.teacher is None:
        return None
    return start_at(config.distill.teacher, config, read_folder)


def start_at(
    place: str, config: RunConfig, read_folder: ReadFolder | None, *, key: str = "teacher"
) -> AdapterStart:
    """The weights at `place`, the value of `distill.KEY`; all ranks call it.

    Raises:
        ValueError: there are no weights, or they do not fit the student's network.
    """
    base = from_first_rank(lambda: weights_at(place, config, key=key))
    folder = opened_folder(base, frozen_run(config).model, read_folder)
    return AdapterStart(run=AdapterRun(base=base, adapters={}), folder=folder, begins=False)


def check_teacher(config: RunConfig, read_folder: ReadFolder | None) -> None:
    """Checks `distill.teacher` as `teacher_start` does, but on one process, for a dry run.

    Raises:
        ValueError: there are no weights, or they do not fit the student's network.
    """
    if config.distill.method is not None and config.distill.teacher is not None:
        check_place(config.distill.teacher, config, read_folder)


def check_place(
    place: str, config: RunConfig, read_folder: ReadFolder | None, *, key: str = "teacher"
) -> None:
    """Checks `place`, the value of `distill.KEY`, as `start_at` does, but on one process.

    Raises:
        ValueError: there are no weights, or they do not fit the student's network.
    """
    opened_folder(weights_at(place, config, key=key), frozen_run(config).model, read_folder)


def weights_at(named: str, config: RunConfig, *, key: str) -> FrozenBase:
    """The frozen weights in the folder `named`, the value of `distill.KEY`; reads no tensors.

    Raises:
        CheckpointError: there is no such folder, or its checkpoint does not fit.
    """
    place = Path(named)
    if (place / "config.json").is_file() or (place / "model_index.json").is_file():
        return FrozenBase(path=place.resolve(), diffusers=True, averaged=False, digest="")
    path = named_checkpoint(place, named=f"distill.{key}={place}")
    if has_adapters(path):
        raise CheckpointError(
            f"distill.{key}={place} holds adapters and no weights; add them to their base"
            " (`python -m dit.convert export --merged`), and name that folder"
        )
    averaged = config.distill.teacher_weights is Weights.EMA
    base = FrozenBase(path=path.resolve(), averaged=averaged, digest="")
    check_base(base, config.model)
    return base


def frozen_run(config: RunConfig) -> RunConfig:
    """The configuration of the teacher: the student's network without adapters, EMA or training."""
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
    """The teacher's model chunks on this rank; all ranks call it.

    `fill` sets their initial values; `start`, if not None, then loads weights into them.

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


@contextmanager
def taught(run: TrainState) -> Iterator[Sequence[ModelChunk]]:
    """A context that yields the teacher's model chunks.

    If the teacher is the base of the student's adapters, it yields the student's chunks, with their
    adapters switched off inside the context.
    """
    if run.teacher:
        yield run.teacher
        return
    with ExitStack() as inside:
        for chunk in run.model.chunks:
            inside.enter_context(adapters_off(chunk))
        yield run.model.chunks
