"""The checks of each step of a start, for `--dry-run`, without building anything.

1. settings      inputs, noise levels and weights that the network does not have; also in `fit`
2. data          readers, null inputs, validation packs
3. start         the run folder can be written, holds no shards, and no other run writes to it;
                 checkpoints, adapters and their frozen weights
4. model         packages and devices; settings that need a GPU only give a notice without one
5. position      the position of a resumed run in its data

Checksums of weights are not compared, because that takes as long as reading them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dit.checkpoint_paths import has_adapters, saved_card
from dit.config import (
    AttentionBackend,
    CheckpointConfig,
    ContextComm,
    Implementation,
    ParameterGroup,
    Problems,
    RunConfig,
)
from dit.config_loading.validate import check_objective_inputs
from dit.data import PackLoader, build_train_loader, null_inputs, validation_groups
from dit.data.datasets import data_paths
from dit.data.preflight import validation_sets
from dit.models.compilation import check_compiler
from dit.models.layers.context_parallel import check_joint_context, check_ring
from dit.models.layers.parallel_linear import check_fusion
from dit.models.layers.transformer_engine import check_engine
from dit.models.parameter_groups import Weight, group_of_weights
from dit.models.patch_layout import PatchLayout
from dit.models.registry import network_spec
from dit.objectives.registry import sampling_path, training_objective
from dit.objectives.training_target import clean_network_level
from dit.safe_writing import check_no_writer
from dit.sizing.flops import work_of_packs
from dit.sizing.passes import absent_data
from dit.train.attention_choice import check_named
from dit.train.checkpoint.data_position import read_positions, restore_position
from dit.train.checkpoint.saving import disk_space_notes
from dit.train.checkpoint.starting_point import (
    StartingPoint,
    check_writable,
    saved_origin,
    starting_point,
)
from dit.train.checkpoint.state_dict import check_continues, check_starts_from, interval_sums
from dit.train.metrics.writers import check_wandb
from dit.train.optimizer.narrow_moments import check_moments
from dit.train.train_state import ReadFolder

if TYPE_CHECKING:
    from dit.lora.targets import Adapters


def start_lines(
    config: RunConfig, *, world_size: int, read_folder: ReadFolder | None = None
) -> str:
    """Checks the start of a run for `--dry-run`; returns lines about it, as YAML comments.

    Data that are not on this machine are not checked, because another machine may train.

    Raises:
        ValueError: of many kinds, as when a run starts.
    """
    data = config.dataset.mock or (data_paths(config.dataset) and not absent_data(config))
    lines = check_start(
        config, world_size=world_size, with_data=bool(data), read_folder=read_folder
    )
    return "".join(f"# {'start':<14}{line}\n" for line in lines)


def check_start(
    config: RunConfig,
    *,
    world_size: int,
    with_data: bool = True,
    read_folder: ReadFolder | None = None,
) -> list[str]:
    """Checks the start of a run; returns lines on its weights, and on what this machine lacks.

    Raises:
        ValueError: of many kinds, as when a run starts.
    """
    check_settings(config)
    with _opened(config, world_size=world_size) if with_data else nullcontext() as loader:
        point, lines = _check_start(config, read_folder)
        lines += _check_machine(config)
        if loader is not None and config.checkpoint.load_data_position:
            _check_position(point, loader)
    return lines


def check_settings(config: RunConfig) -> None:
    """Refuses settings that the network, the samples or the sampler cannot satisfy.

    Raises:
        Problems: names the keys.
        ValueError: the objective has no timestep for clean tokens, or ring attention divides a
            network with joint attention over context ranks.
    """
    check_objective_inputs(config)
    check_clean_level(config)
    groups = group_of_weights(config.model, config.optimizer)
    if config.model.blocks_to_swap and not config.lora.enabled:
        check_blocks_are_frozen(groups, config.model.blocks_to_swap)
    if network_spec(config.model).attends_jointly:
        check_joint_context(config.model.cp_comm_type, config.model.context_parallel_size)
    if config.samples:
        sampling_path(config.objective)


def check_blocks_are_frozen(groups: Mapping[Weight, ParameterGroup], swapped: int) -> None:
    """Refuses `model.blocks_to_swap` if `groups` freeze no weight of a block.

    `swapped` is the value of the key, for the message.

    Raises:
        Problems: names the keys.
    """
    if not any(group.frozen and layer is not None for (_, layer), group in groups.items()):
        raise Problems(
            [
                f"model.blocks_to_swap={swapped} keeps frozen matrices of blocks in host memory,"
                " but optimizer.groups freezes none; freeze blocks there, or set lora.rank, or"
                " model.blocks_to_swap=0"
            ]
        )


def check_clean_level(config: RunConfig) -> None:
    """Refuses an objective without a timestep for clean tokens, if samples may have such tokens.

    Raises:
        ValueError: the objective has no finite timestep for clean tokens.
    """
    layout = PatchLayout.of(config)
    if layout.has_clean_tokens and layout.clean_level is not None:
        clean_network_level(training_objective(config.objective), layout.clean_level)


def check_run_folder(folder: Path) -> None:
    """Checks that `folder`, which need not exist yet, can be a run folder; changes nothing.

    Raises:
        ValueError: the folder cannot be written, or holds shards.
        FolderInUseError: another run writes to it.
    """
    check_writable(folder)
    check_no_writer(folder, named=f"checkpoint.save={folder}")


@contextmanager
def _opened(config: RunConfig, *, world_size: int) -> Iterator[PackLoader]:
    """A context with the loader of data rank 0; validation packs are planned, but not read."""
    null_inputs(config)
    work, replicas = (
        work_of_packs(config.model, config.dataset),
        config.data_parallel_size(world_size),
    )
    loader = build_train_loader(config, rank=0, world_size=replicas, work=work)
    try:
        if not config.dataset.mock:
            for one in validation_sets(config).values():
                validation_groups(one, work=work).plan(config.train.eval_iters).packs([], late=())
        yield loader
    finally:
        loader.close()


def _to_fetch(checkpoint: CheckpointConfig) -> str | None:
    if not checkpoint.mirror:
        return None
    from dit.train.checkpoint.mirror import to_fetch

    return to_fetch(checkpoint)


def _check_start(
    config: RunConfig, read_folder: ReadFolder | None
) -> tuple[StartingPoint, list[str]]:
    """The checkpoint to start from, and lines about its weights; fetches none from the mirror."""
    if save := config.checkpoint.save:
        check_run_folder(Path(save))
    if name := _to_fetch(config.checkpoint):
        line = f"{name} will be fetched from {config.checkpoint.mirror}; it is not checked here"
        return StartingPoint(), [line]
    point = starting_point(config.checkpoint)
    lines, trained = _check_adapters(config, point, read_folder)
    if config.distill.method is not None:
        _check_distillation(config, trained, read_folder, new=point.continued is None)
    return point, [*lines, *_check_checkpoint(config, point)]


def _check_distillation(
    config: RunConfig, trained: Adapters | None, read_folder: ReadFolder | None, *, new: bool
) -> None:
    from dit.train.distill.critic import check_critic
    from dit.train.distill.teacher import check_teacher

    check_teacher(config, read_folder)
    if new:
        check_critic(config, trained, read_folder)


def _check_adapters(
    config: RunConfig, point: StartingPoint, read_folder: ReadFolder | None
) -> tuple[list[str], Adapters | None]:
    """Lines about adapters, and the adapters that the run trains; None: it trains all weights."""
    if not (config.lora.enabled or has_adapters(point.checkpoint)):
        return [], None
    from dit.train.checkpoint.adapters import check_adapters

    return check_adapters(config, point, read_folder)


def _check_checkpoint(config: RunConfig, point: StartingPoint) -> list[str]:
    if (found := point.continued) is not None:
        check_continues(found, config)
        interval_sums(found)
        saved_origin(found)
        saved_card(found)
        return disk_space_notes(found, Path(config.checkpoint.save or found))
    found = point.checkpoint
    if found is not None and (has_adapters(found) or not config.lora.enabled):
        check_starts_from(found, config)
    return []


def _check_position(point: StartingPoint, loader: PackLoader) -> None:
    if (found := point.continued) is not None:
        restore_position(loader, read_positions(found), found)


def _check_machine(config: RunConfig) -> Iterator[str]:
    check_wandb(config.logger)
    for check in _checks_of_devices(config):
        try:
            check()
        except ValueError as error:
            if torch.cuda.is_available():
                raise
            yield str(error)  # training is often on another machine than a dry run


def _checks_of_devices(config: RunConfig) -> Iterator[Callable[[], object]]:
    """The checks that are made when the configured layers and optimizer are built."""
    model = config.model
    of_engine = model.transformer_impl is Implementation.TRANSFORMER_ENGINE
    yield partial(check_moments, config.optimizer)
    yield partial(check_engine, model)
    if model.compile:
        yield check_compiler
    if model.cp_comm_type is ContextComm.P2P:
        yield partial(check_ring, model.context_parallel_size)
    if model.attention_backend is not AttentionBackend.AUTO:
        yield partial(check_named, config)
    if model.gradient_accumulation_fusion:
        yield partial(check_fusion, of_engine=of_engine)
