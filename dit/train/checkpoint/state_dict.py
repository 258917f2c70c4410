"""The whole run on disk: weights, averages, optimizer, position in the data, configuration.

RUN/checkpoints/step_00000500/   one complete checkpoint; appears when it is whole
metadata.json, common.pt, *.distcp          Megatron-Core's sharded checkpoint
config.yaml                                 the resolved configuration
loader_00000.pt                             the loader's position, one per data rank
log_interval.safetensors                    sums since the last log step, by rank
dataset_card.json, null_text.safetensors    what generation needs of the dataset
manifest.json                               format, sizes and checksums of all these
RUN/checkpoints/LATEST           name of the newest complete checkpoint
RUN/checkpoints/LOWEST_VAL       name of that with the lowest validation loss, which is kept

Here is what is stored, and how it comes back; saving.py writes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.module import MegatronModule
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from dit.config import EmaKind, RunConfig, Weights
from dit.distributed.collective_errors import RankError, on_all_ranks
from dit.train.checkpoint.paths import (
    CheckpointError,
    changed,
    changed_files,
    damaged,
    manifest_of,
    other_than,
    saved_config,
)
from dit.train.model_and_optimizer import ModelAndOptimizer
from dit.train.train_state import TrainProgress

INTERVAL = "log_interval.safetensors"
# Held together by Megatron-Core in the shape of the model, so that any layout can load them.
_SHARDING = {"distrib_optim_sharding_type": "fully_reshardable"}


@dataclass(frozen=True, kw_only=True, slots=True)
class DataState:
    """What a checkpoint keeps of the data."""

    position: dict[str, Any] | None  # of this rank's loader; None where another rank reads
    card: dict[str, Any] | None  # how to rebuild text encoder and decoder; mock data has none
    null_text_LE: Tensor
    interval: Mapping[str, Tensor] = field(default_factory=dict)  # of `Gauges`, by rank


def load_checkpoint(path: Path, learner: ModelAndOptimizer, *, config: RunConfig) -> TrainProgress:
    """Brings weights, optimizer and averages back; `data_positions` has the loaders' states.

    Averages that the checkpoint does not have start from its weights. All ranks call it.

    Raises:
        CheckpointError: the checkpoint is damaged, belongs to another model, or has weights alone.
    """
    check_same_model(path, config)
    verify(path)
    if not any(name.startswith("optimizer.") for name in _stored_names(path)):
        raise CheckpointError(
            f"{path} holds weights and no optimizer, as an import does; start a new run from them:"
            f" checkpoint.finetune=true checkpoint.load={path}"
        )
    state = sharded_state(learner, loading=True)
    if saved_config(path).ema.kind is EmaKind.NONE:
        state.pop("ema", None)
    # Taken now: loading puts other tensors into the entries of `state`.
    names: dict[Any, tuple[str, str]] = {
        entry.data: (chunk, name)
        for chunk, entries in state["model"].items()
        for name, entry in entries.items()
        if isinstance(entry, ShardedTensor)
    }
    loaded = _read(state, path)
    for number, chunk in enumerate(learner.chunks):
        module: Any = chunk.module
        module.load_state_dict(loaded["model"][str(number)])
    learner.optimizer.load_state_dict(loaded["optimizer"])
    if learner.ema is not None and "ema" in state:
        averages = loaded["ema"]
        learner.ema.load({weight: averages[c][name] for weight, (c, name) in names.items()})
    elif learner.ema is not None:
        learner.ema.restart()
    # Earlier versions did not count skipped steps.
    return TrainProgress(
        **{f.name: loaded[f.name] for f in fields(TrainProgress) if f.name in loaded}
    )


def start_from(path: Path, learner: ModelAndOptimizer, *, config: RunConfig) -> None:
    """Takes the weights of a checkpoint into a new run, and nothing else; all ranks call it.

    Raises:
        CheckpointError: the checkpoint is damaged, of another model, or has no such weights.
    """
    check_same_weights(path, config)
    verify(path)
    averaged = config.checkpoint.finetune_weights is Weights.EMA
    modules: list[Any] = [chunk.module for chunk in learner.chunks]
    load_weights(path, modules, averaged=averaged)
    learner.optimizer.reload_model_params()
    if learner.ema is not None:
        learner.ema.restart()


def verify(path: Path) -> None:
    """Compares every file with its checksum; the ranks share the reading, and all call it.

    Raises:
        CheckpointError: a file is not as it was saved.
    """
    manifest = manifest_of(path)
    if manifest is None:
        return
    part = slice(dist.get_rank(), None, dist.get_world_size())
    try:
        wrong = on_all_ranks(lambda: changed_files(path, manifest, part=part))
    except RankError as error:
        raise damaged(path, error) from error
    if names := [name for of_rank in wrong for name in of_rank]:
        raise changed(path, names)


def load_weights(path: Path, modules: Sequence[MegatronModule], *, averaged: bool) -> None:
    """Fills the parts of a model with the weights of a checkpoint, or with their average.

    Raises:
        CheckpointError: the average is asked for and the run kept none.
    """
    if averaged and not any(name.startswith("ema.") for name in _stored_names(path)):
        raise CheckpointError(
            f"{path} holds no average of the weights; ask for the model's own (weights=model)"
        )
    prefix = "ema." if averaged else ""
    entries = [module.sharded_state_dict() for module in modules]
    state = {
        str(number): {n: _renamed(e, prefix) for n, e in of.items() if isinstance(e, ShardedTensor)}
        for number, of in enumerate(entries)
    }
    loaded = _read(state, path)
    for number, (module, of) in enumerate(zip(modules, entries, strict=True)):
        # The rest is the extra state of Megatron-Core's linears: nothing, and no import has it.
        module.load_state_dict({name: loaded[str(number)].get(name) for name in of})


def data_positions(path: Path) -> list[dict[str, Any]]:
    """Where the loaders of all data-parallel ranks stood, in the order of the ranks.

    Raises:
        CheckpointError: a file is lost or damaged.
    """
    first = _data_position(path / loader_file(0))
    ranks = first.get("ranks", 1)
    if type(ranks) is not int:
        raise damaged(path / loader_file(0), ValueError(f"ranks is {ranks!r}"))
    return [first, *(_data_position(path / loader_file(rank)) for rank in range(1, ranks))]


def _data_position(file: Path) -> dict[str, Any]:
    if not file.is_file():
        path = file.parent
        raise CheckpointError(f"{path} has no {file.name}; {other_than(path.parent, path.name)}")
    try:
        position = torch.load(file, weights_only=True)
    except Exception as error:
        raise damaged(file, error) from error
    if not isinstance(position, dict):
        raise damaged(file, ValueError(f"it holds a {type(position).__name__}"))
    return position


def interval_sums(path: Path) -> dict[str, Tensor]:
    """What `Gauges` had added up since the last log step; empty in those of earlier versions.

    Raises:
        CheckpointError: the file is damaged.
    """
    file = path / INTERVAL
    try:
        return load_file(file) if file.is_file() else {}
    except (SafetensorError, OSError) as error:
        raise damaged(file, error) from error


def loader_file(data_rank: int) -> str:
    """Name of the file with the position of a data-parallel rank."""
    return f"loader_{data_rank:05d}.pt"


def _stored_names(path: Path) -> list[str]:
    """Names of the tensors in a checkpoint.

    Raises:
        CheckpointError: its index is damaged.
    """
    try:
        return list(dist_checkpointing.load_tensors_metadata(str(path)))
    except Exception as error:
        raise damaged(path, error) from error


def _read(state: dict[str, Any], path: Path) -> Any:
    """What Megatron-Core stored for `state`.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    _stored_names(path)  # a damaged index is an error here; torch would print tracebacks
    try:
        return dist_checkpointing.load(state, str(path))
    except CheckpointException as error:
        raise damaged(path, _first_cause(error)) from error
    except Exception as error:
        raise damaged(path, error) from error


def _first_cause(error: CheckpointException) -> BaseException:
    """What happened on the first of the ranks that failed."""
    return next((cause for cause, _ in error.failures.values()), error)


def sharded_state(learner: ModelAndOptimizer, *, loading: bool) -> dict[str, Any]:
    """All that learns, in the form that Megatron-Core stores; all ranks call it."""
    modules: list[Any] = [chunk.module for chunk in learner.chunks]
    model = {str(number): module.sharded_state_dict() for number, module in enumerate(modules)}
    state: dict[str, Any] = {"model": model}
    if learner.ema is not None:
        state["ema"] = {
            number: learner.ema.sharded_state_dict(chunk, loading=loading)
            for number, chunk in model.items()
        }
    state["optimizer"] = learner.optimizer.sharded_state_dict(
        model, is_loading=loading, metadata=_SHARDING
    )
    return state


def _renamed(shard: ShardedTensor, prefix: str) -> ShardedTensor:
    return replace(shard, key=f"{prefix}{shard.key}")


# Of the model: what changes neither the shape nor the meaning of a weight.
_FREE = {"name", "precision", "vae_cache_folder", "init_method_std", "cp_comm_type"}
# How the same numbers are computed.
_FREE |= {"transformer_impl", "fp8", "fp8_recipe", "gradient_accumulation_fusion", "compile"}
_FREE |= {"cpu_offloading_num_layers"}


def check_same_model(path: Path, config: RunConfig) -> None:
    """Refuses to go on with weights of another shape or another meaning.

    Raises:
        CheckpointError: names every setting that differs, with both values.
    """
    saved = saved_config(path)
    before, here = _fixed(saved), _fixed(config)
    if not (saved.ddp.use_distributed_optimizer or config.ddp.use_distributed_optimizer):
        # Megatron-Core then stores float32 weights for bf16 only.
        before["model.precision"] = saved.model.precision
        here["model.precision"] = config.model.precision
    different = _different(before, here)
    if different:
        raise CheckpointError(
            f"{path} was trained with other settings:{different}\nUse its settings. Or start a new"
            " run, with another checkpoint.save: from the beginning, or from these weights"
            f" (checkpoint.finetune=true checkpoint.load={path}), where only the model must agree"
        )


def check_same_weights(path: Path, config: RunConfig) -> None:
    """Refuses to start a new run from weights of another shape.

    Raises:
        CheckpointError: names every setting that differs, with both values.
    """
    different = _different(_of_model(saved_config(path)), _of_model(config))
    if different:
        raise CheckpointError(
            f"{path} holds the weights of another model:{different}\nUse its settings;"
            " checkpoint.finetune=true leaves free all that is not the model: objective, data,"
            " batch size, learning rate, average, precision and parallelism"
        )


def _different(saved: dict[str, Any], here: dict[str, Any]) -> str:
    return "".join(
        f"\n  {name}: {saved[name]} in the checkpoint, {here[name]} here"
        for name in sorted(saved)
        if saved[name] != here[name]
    )


def _of_model(config: RunConfig) -> dict[str, Any]:
    return {
        f"model.{f.name}": getattr(config.model, f.name)
        for f in fields(config.model)
        if f.name not in _FREE and not f.name.startswith("recompute") and "parallel" not in f.name
    }


def _fixed(config: RunConfig) -> dict[str, Any]:
    """What a checkpoint fixes: the shape and the meaning of all that it stores."""
    fixed = _of_model(config)
    for name in ("name", "sigma_data", "timestep_scale"):
        fixed[f"objective.{name}"] = getattr(config.objective, name)
    fixed["ddp.use_distributed_optimizer"] = config.ddp.use_distributed_optimizer
    return fixed
