"""Step 5 of a run's start: loads the checkpoint and the position in the data into a `TrainState`.

1. restore  the parts become a run, with its saver
2. resume   the run continues from a checkpoint, starts from its weights, or starts at step 0
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from dit.checkpoint_paths import (
    CheckpointError,
    has_adapters,
    manifest_of,
    saved_card,
    saved_config,
)
from dit.config import EmaKind, RunConfig, Weights
from dit.config.resume import Resume
from dit.config_loading import changes
from dit.config_loading.schema import schema_of
from dit.data import DataError, LoaderLayout, PackLoader, dataset_sizes
from dit.data.preflight import made_otherwise
from dit.distributed.collective_errors import on_all_ranks
from dit.distributed.watchdog import heartbeat
from dit.objectives.registry import training_objective
from dit.train.checkpoint.async_save import Saver
from dit.train.checkpoint.data_position import Position, data_positions, restore_position
from dit.train.checkpoint.saving import disk_space_notes
from dit.train.checkpoint.starting_point import Origin, saved_origin
from dit.train.checkpoint.state_dict import interval_sums, load_checkpoint, start_from
from dit.train.checkpoint.without_tensors import CRITIC
from dit.train.metrics.interval_metrics import IntervalMetrics
from dit.train.opening.data import Data
from dit.train.opening.machine import Machine
from dit.train.opening.model import Built
from dit.train.opening.start import NETWORK, Start, Starts
from dit.train.train_state import TrainState

if TYPE_CHECKING:
    from dit.train.checkpoint.adapters import AdapterStart


def restore(machine: Machine, data: Data, starts: Starts, built: Built) -> TrainState:
    """The run, with the content of its checkpoint; all ranks call it.

    Raises:
        CheckpointError: there are no weights to start from, or the checkpoint cannot be used.
    """
    run, start = _in_memory(machine, data, starts, built), starts.networks[NETWORK]
    if run.folder is not None:
        _open_saver(run, run.folder, start.adapters)
    heartbeat("load of the checkpoint")
    resume(run, start)
    run.at_step(run.progress.step)
    dist.barrier()  # nothing is written before every rank is ready
    return run


def _in_memory(machine: Machine, data: Data, starts: Starts, built: Built) -> TrainState:
    """The run at step 0, which has read and written no file yet."""
    config, model = built.config, built.networks[NETWORK]
    objective = training_objective(config.objective)
    return TrainState(
        config=config,
        folder=starts.folder,
        replica=data.replica,
        loader=data.loader,
        validation=data.validation,
        model=model,
        interval_metrics=IntervalMetrics(config, model, objective),
        objective=objective,
        null=data.null,
        teacher=built.teacher,
        critic=built.networks.get(CRITIC),
        card=data.card,
        notes=[*machine.notes, *data.notes, *starts.notes, *built.notes],
    )


def _open_saver(run: TrainState, folder: Path, adapters: AdapterStart | None) -> None:
    lora_json = adapters.run.as_json() if adapters is not None else None
    run.saver = Saver(folder, run.config, adapters=lora_json)
    if dist.get_rank() == 0:
        run.saver.clear()  # frees space before anything is written
        if run.config.checkpoint.mirror:
            from dit.train.checkpoint.mirror import Mirror

            run.mirror = Mirror(run.config.checkpoint)


def resume(run: TrainState, start: Start) -> None:
    """Continues from a checkpoint, loads only its weights, or records another source of weights.

    The frozen weights of adapters must be loaded before.

    Raises:
        CheckpointError: there are no weights to start from, or the checkpoint cannot be used.
    """
    point = start.point
    if point.continued is not None:
        _continue_from(run, point.continued, own=point.own)
    elif point.checkpoint is not None:
        _begin_with(run, point.checkpoint)
    elif start.weights is not None:
        run.notes += start.weights.notes
        if start.adapters is None:  # else `lora.json` has it
            _keep_origin(run, start.weights.origin())


def _begin_with(run: TrainState, path: Path) -> None:
    """Starts at step 0 with the weights of the checkpoint `path` (checkpoint.finetune)."""
    if run.model.adapters is None or has_adapters(path):
        run.progress = start_from(path, run.model, config=run.config)
    run.notes += _finetune_notes(path, run.config)
    if before := run.progress.updates_before:
        run.notes.append(f"the average goes on from the checkpoint's, after {before} updates")


_MEASURE = ("objective.", "ema.kind", "dataset.use_train_split_for_val", "train.eval_iters")
_MEASURE += ("validation.quantiles", "validation.fixed_levels", "validation.text_dropout")
_MEASURE += ("validation.latents",)
"""Keys, or prefixes of keys, whose change makes validation losses incomparable."""


def _continue_from(run: TrainState, path: Path, *, own: bool) -> None:
    """Continues from the checkpoint `path`: the run's `own`, or else that of `checkpoint.load`."""
    run.progress = load_checkpoint(path, run.model, config=run.config, critic=run.critic)
    run.saved_step = run.progress.step
    _keep_origin(run, saved_origin(path))
    run.notes.append(f"continuing after step {run.progress.step}")
    run.notes += _change_notes(path, run.config, own=own)
    _continue_metrics(run, path)
    if other := made_otherwise(saved_card(path) or {}, run.card or {}):
        run.notes.append(
            f"WARNING: the data were prepared otherwise when the checkpoint was saved ({other}):"
            " the network has learned other latents or texts; pack the data as before"
        )
    if run.folder is not None:
        run.notes += disk_space_notes(path, run.folder)
    _continue_data(run, path, own=own)


def _continue_metrics(run: TrainState, path: Path) -> None:
    """Restores lowest loss and sums since the last log step, if they can still be compared."""
    measured_otherwise = any(key.startswith(_MEASURE) for key in _changed(path, run.config))
    if measured_otherwise and run.progress.lowest_val_loss < math.inf:
        run.progress = replace(run.progress, lowest_val_loss=math.inf)
        run.notes.append(
            "settings of the validation loss have changed: the lowest loss is sought anew"
        )
    if other := run.interval_metrics.load_state_dict(interval_sums(path)):
        run.notes.append(
            f"{' and '.join(other)} have other bins than in the checkpoint (validation.quantiles,"
            " dataset.task_encoder_seq_length): at the next log step they count only the steps from"
            f" {run.progress.step + 1} on"
        )


def _changed(path: Path, config: RunConfig) -> dict[str, str]:
    return changes(saved_config(path), config)


def _continue_data(run: TrainState, path: Path, *, own: bool) -> None:
    """Restores the position in the data from `path`, or restarts the data; all ranks call it."""
    if _restarts_data(run, path, own=own):
        run.progress = run.progress.with_other_data()
        run.notes.append(
            "the data begin anew, since checkpoint.load_data_position=false; weights, optimizer,"
            " schedule and average go on"
        )
    else:
        _load_data_position(run, path)
        _take_new_names(run)


def _keep_origin(run: TrainState, origin: Origin | None) -> None:
    """Records the origin of the run's first weights, which each of its checkpoints stores."""
    if run.saver is not None:
        run.saver.origin = origin


def _load_data_position(run: TrainState, path: Path) -> None:
    """Restores the position in the data from the checkpoint `path`; all ranks call it.

    Raises:
        CheckpointError: the position was saved with other data, or these ranks cannot divide it.
    """
    states, loader = _data_positions(run, path), run.loader
    if loader is None:
        return
    restore_position(loader, states, path)
    run.notes += [loader.resharded] if loader.resharded else []


def _take_new_names(run: TrainState) -> None:
    """Moves the sample counts of a blend's renamed folders to their new names."""
    then, now = run.progress.of_datasets, [*dataset_sizes(run.config.dataset)]
    renamed = [f"{old} -> {new}" for old, new in zip(then, now, strict=False) if old != new]
    if renamed and len(then) == len(now):
        counts = dict(zip(now, then.values(), strict=True))
        run.progress = replace(run.progress, of_datasets=counts)
        run.notes.append(
            "WARNING: folders of the blend have other names than in the checkpoint"
            f" ({', '.join(renamed)}): the same samples come, with other noise, which follows from"
            " their keys; rename the folders back for the same numbers"
        )


def _data_positions(run: TrainState, path: Path) -> list[Position]:
    ranks = run.data_ranks
    layout = LoaderLayout(ranks=ranks.size(), workers=run.config.dataset.num_workers)
    return data_positions(path, layout, rank=ranks.rank() if run.loader is not None else None)


def _restarts_data(run: TrainState, path: Path, *, own: bool) -> bool:
    """Whether the run restarts its data from the beginning; all ranks call it.

    A run that has restarted its data before, and is started again, continues in the new data.
    """
    if run.config.checkpoint.load_data_position:
        return False
    if not own or saved_config(path).checkpoint.load_data_position:
        return True
    try:
        states = _data_positions(run, path)
    except CheckpointError:
        return True
    return not on_all_ranks(lambda: run.loader is None or _fits(run.loader, states))[0]


def _fits(loader: PackLoader, states: list[Position]) -> bool:
    try:
        return loader.fits(states)
    except DataError:  # states of another version belong to other data
        return False


def _change_notes(path: Path, config: RunConfig, *, own: bool) -> list[str]:
    """Log lines about settings that differ from the checkpoint's, and about what it lacks."""
    lines, (live, idle) = [], _live_and_idle(path, config, own=own)
    if live:
        lines.append(f"changed since then: {', '.join(live)}")
    if idle:
        said = ", ".join(idle)
        lines.append(f"changed without effect, because only a new run reads it: {said}")
    if saved_config(path).ema.kind is EmaKind.NONE and config.ema.kind is not EmaKind.NONE:
        lines.append("the checkpoint has no average of the weights: it starts from the weights")
    if manifest_of(path) is None:
        lines.append("the checkpoint is of an earlier version, without checksums: not verified")
    return lines


def _live_and_idle(path: Path, config: RunConfig, *, own: bool) -> tuple[list[str], list[str]]:
    """Texts of changed settings that take effect, and of settings that only a new run reads."""
    changed, schema = _changed(path, config), schema_of(config)
    idle = [key for key in changed if schema.resume_class(key) is Resume.AT_START]
    if not own and "checkpoint.load" in idle:
        idle.remove("checkpoint.load")  # the checkpoint from which the run continues
    live = [text for key, text in changed.items() if key not in idle]
    return live, [changed[key] for key in idle]


def _finetune_notes(path: Path, config: RunConfig) -> list[str]:
    averaged = config.checkpoint.finetune_weights is Weights.EMA
    kind = "average of the weights" if averaged else "weights"
    return [
        f"starting at step 0 from the {kind} of {path}",
        f"other than there: {', '.join(_changed(path, config).values())}",
    ]
