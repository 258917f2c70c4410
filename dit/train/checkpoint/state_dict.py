"""What a checkpoint holds and how it loads: weights, averages, optimizer, position in the data.

RUN/checkpoints/step_00000500/   one checkpoint; it appears when it is complete
metadata.json, common.pt, *.distcp          Megatron-Core's sharded checkpoint
config.yaml                                 the resolved configuration
loader_00000.pt                             the loader's position, one per data rank
log_interval.safetensors                    sums since the last log step, by rank
dataset_card.json, null_text.safetensors    what generation needs of the dataset
manifest.json                               format, sizes and checksums of all these
RUN/checkpoints/LATEST           name of the newest complete checkpoint
RUN/checkpoints/LOWEST_VAL       name of the one with the lowest validation loss, which is kept
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

from dit.batch import NullInputs
from dit.config import EmaKind, RunConfig, Weights
from dit.config.inlining import value_of
from dit.distributed.collective_errors import RankError, on_all_ranks
from dit.train.checkpoint.paths import (
    CheckpointError,
    changed,
    changed_files,
    damaged,
    manifest_of,
    remedy,
    saved_config,
)
from dit.train.model_and_optimizer import ModelAndOptimizer
from dit.train.train_state import TrainProgress

INTERVAL = "log_interval.safetensors"
# Megatron-Core stores optimizer state in the shape of the model, so that any layout can load it.
_SHARDING = {"distrib_optim_sharding_type": "fully_reshardable"}


@dataclass(frozen=True, kw_only=True, slots=True)
class DataState:
    """What a checkpoint stores about the data."""

    position: dict[str, Any] | None  # this rank's loader state; None where another rank reads
    card: dict[str, Any] | None  # how to rebuild text encoder and decoder; mock data has none
    null: NullInputs  # the inputs of a sample without caption
    interval: Mapping[str, Tensor] = field(default_factory=dict)  # of IntervalMetrics, by rank


def load_checkpoint(path: Path, model: ModelAndOptimizer, *, config: RunConfig) -> TrainProgress:
    """Loads weights, optimizer and averages; `data_positions` loads the loaders' states.

    Averages that the checkpoint lacks start from its weights. All ranks call it.

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
    state = sharded_state(model, loading=True)
    if saved_config(path).ema.kind is EmaKind.NONE:
        state.pop("ema", None)
    # Collected now, because loading puts other tensors into the entries of `state`.
    names: dict[Any, tuple[str, str]] = {
        entry.data: (chunk, name)
        for chunk, entries in state["model"].items()
        for name, entry in entries.items()
        if isinstance(entry, ShardedTensor)
    }
    loaded = _read(state, path)
    for number, module in enumerate(model.modules):
        module.load_state_dict(loaded["model"][str(number)])
    model.optimizer.load_state_dict(loaded["optimizer"])
    if model.ema is not None and "ema" in state:
        averages = loaded["ema"]
        model.ema.load({weight: averages[c][name] for weight, (c, name) in names.items()})
    elif model.ema is not None:
        model.ema.restart()
    # Earlier versions did not count skipped steps.
    return TrainProgress(
        **{f.name: loaded[f.name] for f in fields(TrainProgress) if f.name in loaded}
    )


def start_from(path: Path, model: ModelAndOptimizer, *, config: RunConfig) -> None:
    """Loads only the weights of a checkpoint, for a new run; all ranks call it.

    Raises:
        CheckpointError: the checkpoint is damaged, of another model, or lacks the average.
    """
    check_same_weights(path, config)
    verify(path)
    averaged = config.checkpoint.finetune_weights is Weights.EMA
    load_weights(path, model.modules, averaged=averaged)
    model.optimizer.reload_model_params()
    if model.ema is not None:
        model.ema.restart()


def verify(path: Path) -> None:
    """Compares every file with its checksum; all ranks call it, and each reads some of the files.

    Raises:
        CheckpointError: a file has changed since it was saved.
    """
    manifest = manifest_of(path)
    if manifest is None:
        return
    part = slice(dist.get_rank(), None, dist.get_world_size())
    try:
        by_rank = on_all_ranks(lambda: changed_files(path, manifest, part=part))
    except RankError as error:
        raise damaged(path, error) from error
    if names := [name for of_rank in by_rank for name in of_rank]:
        raise changed(path, names)


def load_weights(path: Path, modules: Sequence[MegatronModule], *, averaged: bool) -> None:
    """Loads the weights of a checkpoint, or their average, into the parts of a model.

    Raises:
        CheckpointError: the checkpoint has no average.
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
        # The other entries are extra states of Megatron-Core's linear layers, which are empty.
        module.load_state_dict({name: loaded[str(number)].get(name) for name in of})


def data_positions(path: Path) -> list[dict[str, Any]]:
    """The loader states of all data-parallel ranks, in the order of the ranks.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    first = _data_position(path / loader_file(0))
    ranks = first.get("ranks", 1)
    if type(ranks) is not int:
        raise damaged(path / loader_file(0), ValueError(f"ranks is {ranks!r}"))
    return [first, *(_data_position(path / loader_file(rank)) for rank in range(1, ranks))]


def _data_position(file: Path) -> dict[str, Any]:
    if not file.is_file():
        path = file.parent
        raise CheckpointError(f"{path} has no {file.name}; {remedy(path.parent, path.name)}")
    try:
        position = torch.load(file, weights_only=True)
    except Exception as error:
        raise damaged(file, error) from error
    if not isinstance(position, dict):
        raise damaged(file, ValueError(f"it holds a {type(position).__name__}"))
    return position


def interval_sums(path: Path) -> dict[str, Tensor]:
    """The state of IntervalMetrics; empty in checkpoints of earlier versions.

    Raises:
        CheckpointError: the file is damaged.
    """
    file = path / INTERVAL
    try:
        return load_file(file) if file.is_file() else {}
    except (SafetensorError, OSError) as error:
        raise damaged(file, error) from error


def loader_file(data_rank: int) -> str:
    """Name of the file with the loader state of a data-parallel rank."""
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
    """Loads what Megatron-Core stored for `state`.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    _stored_names(path)  # raises at a damaged index, for which torch would print tracebacks
    try:
        return dist_checkpointing.load(state, str(path))
    except CheckpointException as error:
        raise damaged(path, _first_cause(error)) from error
    except Exception as error:
        raise damaged(path, error) from error


def _first_cause(error: CheckpointException) -> BaseException:
    """The error of the first rank that failed."""
    return next((cause for cause, _ in error.failures.values()), error)


def sharded_state(model: ModelAndOptimizer, *, loading: bool) -> dict[str, Any]:
    """Model, averages and optimizer in the form that Megatron-Core stores; all ranks call it."""
    weights = {str(number): m.sharded_state_dict() for number, m in enumerate(model.modules)}
    state: dict[str, Any] = {"model": weights}
    if model.ema is not None:
        state["ema"] = {
            number: model.ema.sharded_state_dict(chunk, loading=loading)
            for number, chunk in weights.items()
        }
    state["optimizer"] = model.optimizer.sharded_state_dict(
        weights, is_loading=loading, metadata=_SHARDING
    )
    return state


def _renamed(shard: ShardedTensor, prefix: str) -> ShardedTensor:
    return replace(shard, key=f"{prefix}{shard.key}")


# Keys of the model that change neither the shape nor the meaning of a weight.
_FREE = {"name", "precision", "vae_cache_folder", "init_method_std", "cp_comm_type"}
# Keys that decide only how the same numbers are computed.
_FREE |= {"transformer_impl", "fp8", "fp8_recipe", "gradient_accumulation_fusion", "compile"}
_FREE |= {"fused_kernels", "cpu_offloading_num_layers"}


def check_same_model(path: Path, config: RunConfig) -> None:
    """Refuses a checkpoint whose weights have another shape or another meaning.

    Raises:
        CheckpointError: names every setting that differs, with both values.
    """
    saved = saved_config(path)
    before, here = _fixed(saved), _fixed(config)
    if not (saved.ddp.use_distributed_optimizer or config.ddp.use_distributed_optimizer):
        # Without it Megatron-Core stores float32 main parameters for bf16 only.
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
    """Refuses a checkpoint whose weights have another shape.

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
        f"\n  {name}: {saved.get(name)} in the checkpoint, {here.get(name)} here"
        for name in sorted({**saved, **here})  # families have keys of their own
        if saved.get(name) != here.get(name)
    )


def _of_model(config: RunConfig) -> dict[str, Any]:
    return {
        f"model.{f.name}": getattr(config.model, f.name)
        for f in fields(config.model)
        if f.name not in _FREE and not f.name.startswith("recompute") and "parallel" not in f.name
    }


def _fixed(config: RunConfig) -> dict[str, Any]:
    """The settings that decide shape and meaning of what a checkpoint stores."""
    fixed = _of_model(config)
    for name in ("name", "sigma_data", "timestep_scale"):
        fixed[f"objective.{name}"] = value_of(config.objective, name)
    fixed["ddp.use_distributed_optimizer"] = config.ddp.use_distributed_optimizer
    return fixed
