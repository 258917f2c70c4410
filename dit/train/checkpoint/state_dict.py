"""Content and loading of a checkpoint: weights, EMA, optimizer, position in the data.

The files are listed in `dit.train.checkpoint`. `TrainProgress` counts the steps of a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from dit.batch import NullInputs
from dit.checkpoint_paths import (
    CheckpointError,
    damaged,
    has_adapters,
    saved_config,
    verify,
)
from dit.config import EmaKind, RunConfig, Weights
from dit.distcp import common_values, load, tensor_names
from dit.distributed.watchdog import is_lost_peer
from dit.models.layers.adaptable import is_stored
from dit.models.parameter_groups import NOTHING_FROZEN, FrozenWeights, frozen_weights
from dit.train.checkpoint.exchange import WEIGHT, StateExchange
from dit.train.checkpoint.shares import stored_by
from dit.train.checkpoint.without_tensors import (
    AVERAGE,
    CRITIC,
    check_average,
    check_same_model,
    check_same_weights,
    from_index,
    has_average,
)
from dit.train.model_and_optimizer import ModelAndOptimizer
from dit.train.optimizer.narrow_moments import put_moments
from dit.train.optimizer.states import load_optimizer_groups, optimizer_groups, optimizer_values


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainProgress:
    """Counts of steps and samples since the start of the run; a checkpoint stores every field."""

    step: int = 0
    consumed_samples: int = 0  # over all ranks
    samples_before: int = 0  # consumed before the data were last restarted
    of_datasets: dict[str, int] = field(default_factory=dict)  # since then, by dataset of a blend
    skipped_steps: int = 0  # steps without an update: loss or gradient was not finite
    skipped_in_a_row: int = 0  # skipped steps since the last update
    updates_before: int = 0  # updates of the EMA before this run (`train.warm_start_ema`)
    lowest_val_loss: float = math.inf  # of all checkpoints so far

    @property
    def updates(self) -> int:
        """Number of steps that changed the weights: the count for learning rate, Adam and EMA."""
        return self.step - self.skipped_steps

    def with_other_data(self) -> TrainProgress:
        """The progress after a change of data: steps go on; epochs and lowest loss restart."""
        return replace(
            self,
            samples_before=self.consumed_samples,
            of_datasets={},
            lowest_val_loss=math.inf,
        )

    def after(
        self, *, samples: int, of_datasets: Mapping[str, int], skipped: bool
    ) -> TrainProgress:
        """The progress after one more step, in which `samples` samples were consumed."""
        so_far = self.of_datasets
        return replace(
            self,
            step=self.step + 1,
            consumed_samples=self.consumed_samples + samples,
            of_datasets={name: so_far.get(name, 0) + n for name, n in of_datasets.items()},
            skipped_steps=self.skipped_steps + skipped,
            skipped_in_a_row=self.skipped_in_a_row + 1 if skipped else 0,
        )


INTERVAL = "log_interval.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class DataState:
    """What a checkpoint stores about the data: position, card, null inputs, running metrics."""

    position: dict[str, Any] | None  # this rank's loader state; None where another rank reads
    card: dict[str, Any] | None  # how to rebuild text encoder and decoder; mock data has none
    null: NullInputs  # the inputs of a sample without caption
    interval: Mapping[str, Tensor] = field(default_factory=dict)  # of IntervalMetrics, by rank


def load_checkpoint(
    path: Path,
    model: ModelAndOptimizer,
    *,
    config: RunConfig,
    critic: ModelAndOptimizer | None = None,
) -> TrainProgress:
    """Loads weights, optimizer and EMA from `path`, and returns the progress; all ranks call it.

    An EMA that the checkpoint lacks starts from the weights. A `critic` is loaded from the same
    checkpoint. The loaders' states are read by `data_positions`.

    Raises:
        CheckpointError: the checkpoint is damaged, belongs to another model, or has only weights.
    """
    check_continues(path, config)
    verify(path)
    averaged = saved_config(path).ema.kind is not EmaKind.NONE
    progress = _progress(_load_network(path, model, config=config, averaged=averaged))
    if critic is not None:
        kept = has_average(path, among=CRITIC)
        _load_network(path, critic, config=config, averaged=kept, among=CRITIC)
        if critic.ema is not None and not kept:
            critic.ema.restart()
    if model.ema is not None and not averaged:
        model.ema.restart()
    if model.ema is not None:
        model.ema.updates_before = progress.updates_before
    return progress


def _load_network(
    path: Path,
    model: ModelAndOptimizer,
    *,
    config: RunConfig,
    averaged: bool,
    among: str | None = None,
) -> dict[str, Any]:
    """Loads a network and its optimizer; returns all entries that were read.

    `among` is the prefix of a critic's entries in the checkpoint; None for the main network.
    """
    values = stored_values(model, averaged=averaged)
    exchange = StateExchange(
        model.modules,
        model.groups,
        optimizer=model.optimizer,
        values=values,
        chosen=_stored_by(path),
        frozen=frozen_weights(config),
    )
    loaded, own = _read_network(path, exchange.wanted(), among)
    exchange.hand_out(own.get("share", {}))
    put_moments(model.optimizer, values)
    load_optimizer_groups(model.optimizer, own["optimizer"])
    return loaded


def _read_network(
    path: Path, share: Mapping[str, Any], among: str | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads the tensors in `share`; returns all entries, and those of the requested network.

    A critic's entries are under the key `among`; with None, both results are the same.
    """
    wanted = {"share": share}
    loaded = _read(wanted if among is None else {among: _named(wanted, among)}, path)
    return loaded, loaded if among is None else loaded[among]


def _named(state: dict[str, Any], among: str) -> dict[str, Any]:
    """Adds `among.` before the name of each tensor in `state`, and returns it."""
    add_prefix_for_sharding(state, f"{among}.")
    return state


def _progress(loaded: Mapping[str, Any]) -> TrainProgress:
    """The progress of a checkpoint; counters that it lacks start at 0."""
    names = [f.name for f in fields(TrainProgress) if f.name in loaded]
    return TrainProgress(**{name: loaded[name] for name in names})


def saved_step(path: Path) -> int:
    """Number of training steps in the checkpoint `path`, whatever its folder is called.

    It is 0 for imported weights.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    return _progress(from_index(path, common_values)).step


def start_from(path: Path, model: ModelAndOptimizer, *, config: RunConfig) -> TrainProgress:
    """Loads only the weights, or adapters, of a checkpoint for a new run; all ranks call it.

    Returns the progress at step 0. With `train.warm_start_ema` the EMA continues from that of the
    checkpoint, or from its weights if it has no EMA, and the progress has their number of updates.

    Raises:
        CheckpointError: the checkpoint is damaged, belongs to another model, or lacks the EMA; or
            its number of updates is unknown.
    """
    check_starts_from(path, config)
    verify(path)
    ema = model.ema if config.train.warm_start_ema else None
    goes_on = ema is not None and has_average(path)
    exchange = StateExchange(
        model.modules,
        model.groups,
        optimizer=model.optimizer,
        values={AVERAGE: ema.averages} if ema is not None and goes_on else {},
        chosen=_stored_by(path),
        frozen=frozen_weights(saved_config(path)),
    )
    averaged = config.checkpoint.finetune_weights is Weights.EMA
    loaded = _progress(_load_weights(path, exchange, averaged=averaged))
    model.optimizer.reload_model_params()
    if model.ema is not None and not goes_on:
        model.ema.restart()
    if ema is None:
        return TrainProgress()
    ema.updates_before = loaded.updates_before + loaded.updates
    return TrainProgress(updates_before=ema.updates_before)


def load_weights(
    path: Path,
    modules: Sequence[MegatronModule],
    groups: ProcessGroupCollection,
    *,
    averaged: bool,
    among: str | None = None,
) -> None:
    """Loads weights, or (`averaged`) their EMA, from the checkpoint `path` into `modules`.

    A checkpoint of adapters gives its adapters, any other one all weights except adapters. `among`
    is the prefix of a second network, such as a critic. All ranks call it; each reads a shard.

    Raises:
        CheckpointError: the checkpoint has no EMA.
    """
    frozen = frozen_weights(saved_config(path))
    exchange = StateExchange(modules, groups, chosen=_stored_by(path), frozen=frozen)
    _load_weights(path, exchange, averaged=averaged, among=among)


def _load_weights(
    path: Path, exchange: StateExchange, *, averaged: bool, among: str | None = None
) -> dict[str, Any]:
    """Loads the weights, or (`averaged`) their EMA, and the state that `exchange` asks for.

    Returns all that was read.

    Raises:
        CheckpointError: the checkpoint has no EMA.
    """
    check_average(path, averaged=averaged)
    wanted = exchange.wanted(weights=AVERAGE if averaged else WEIGHT, everywhere=True)
    loaded, own = _read_network(path, wanted, among)
    exchange.hand_out(own.get("share", {}))
    return loaded


def check_continues(path: Path, config: RunConfig) -> None:
    """Refuses a checkpoint `path` from which the run cannot resume; reads no tensors.

    Raises:
        CheckpointError: the checkpoint belongs to another model, or has only weights.
    """
    check_same_model(path, config)
    if not any(name.startswith("optimizer.") for name in from_index(path, tensor_names)):
        raise CheckpointError(
            f"{path} holds weights and no optimizer, as an import does; start a new run from them:"
            f" checkpoint.finetune=true checkpoint.load={path}"
        )


def check_starts_from(path: Path, config: RunConfig) -> None:
    """Refuses a checkpoint `path` whose weights or adapters a new run cannot use; reads no tensors.

    Raises:
        CheckpointError: the checkpoint belongs to another model, lacks the EMA, or does not say its
            number of updates.
    """
    check_same_weights(path, config.model)
    check_average(path, averaged=config.checkpoint.finetune_weights is Weights.EMA)
    if config.train.warm_start_ema and config.ema.kind is EmaKind.POWER:
        progress = _progress(from_index(path, common_values))
        if not progress.updates_before + progress.updates:
            raise CheckpointError(
                f"{path} does not say after how many updates its weights were saved (imports do not"
                " know it), but train.warm_start_ema=true with ema.kind=power needs the number; set"
                " ema.kind=constant or train.warm_start_ema=false"
            )


def _stored_by(path: Path) -> Callable[[str], bool]:
    """A function that says whether the checkpoint `path` stores the weight of a given name.

    A checkpoint of adapters stores only adapters, another one all other weights.
    """
    adapted = has_adapters(path)
    return partial(is_stored, adapted=adapted)


def interval_sums(path: Path) -> dict[str, Tensor]:
    """The state of `IntervalMetrics` in the checkpoint `path`; empty if it has none.

    Raises:
        CheckpointError: the file is damaged.
    """
    file = path / INTERVAL
    try:
        return load_file(file) if file.is_file() else {}
    except (SafetensorError, OSError) as error:
        raise damaged(file, error) from error


def _read(state: dict[str, Any], path: Path) -> Any:
    """The values that Megatron-Core stored in the checkpoint `path` for the entries of `state`.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    from_index(path, tensor_names)  # for a damaged index torch would print tracebacks
    try:
        return load(state, path)
    except CheckpointException as error:
        first = next((cause for cause, _ in error.failures.values()), error)  # of the ranks
        raise damaged(path, first) from error
    except Exception as error:
        if is_lost_peer(error):
            raise
        raise damaged(path, error) from error


def share_of_state(
    model: ModelAndOptimizer,
    *,
    frozen: FrozenWeights = NOTHING_FROZEN,
    critic: ModelAndOptimizer | None = None,
) -> dict[str, Any]:
    """Copy in host memory of this rank's shard of the weights, EMA and optimizer of `model`.

    Returns a dict that Megatron-Core can store, with the keys share (tensors), extra and optimizer.
    The state of a `critic` is under the key `CRITIC`. All ranks call it.
    """
    if critic is not None:
        beside = share_of_state(critic, frozen=frozen)
        # The critic's entries are empty, and have the same names as the student's.
        beside.pop("extra")
        return share_of_state(model, frozen=frozen) | {CRITIC: _named(beside, CRITIC)}
    values = stored_values(model)
    adapted = model.adapters is not None
    exchange = StateExchange(
        model.modules,
        model.groups,
        optimizer=model.optimizer,
        values=values,
        chosen=partial(is_stored, adapted=adapted),
        frozen=frozen,
    )
    # Empty here, but Megatron-Core's own loaders ask for them.
    extra = [e for module in model.modules for e in stored_by(module)]
    return {
        "share": exchange.gather(),
        "extra": [e for e in extra if isinstance(e, ShardedObject)],
        "optimizer": optimizer_groups(model.optimizer, model.groups),
    }


def stored_values(
    model: ModelAndOptimizer, *, averaged: bool = True
) -> dict[str, Sequence[Tensor]]:
    """Tensors stored besides weights, by name prefix: optimizer state and, if `averaged`, EMA."""
    kept = optimizer_values(model.optimizer, model.states.names)
    values: dict[str, Sequence[Tensor]] = {**kept}
    if model.ema is not None and averaged:
        values[AVERAGE] = model.ema.averages
    return values
