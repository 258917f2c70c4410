"""The whole run on disk: weights, averages, optimizer, position in the data, configuration.

RUN/checkpoints/step_00000500/   one complete checkpoint; appears when it is whole
metadata.json, common.pt, *.distcp          Megatron-Core's sharded checkpoint
config.yaml                                 the resolved configuration
loader_00000.pt                             the loader's position, one per data rank
dataset_card.json, null_text.safetensors    what generation needs of the dataset
RUN/checkpoints/LATEST           name of the newest complete checkpoint
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from queue import SimpleQueue
from textwrap import shorten
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.transformer.module import MegatronModule
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from dit.config import EmaKind, RunConfig
from dit.configuring import save_config
from dit.train.learner import Learner
from dit.train.locate import LATEST, STEP, CheckpointError, damaged, other_than, saved_config

_PARTIAL = ".partial_"
# Held together by Megatron-Core in the shape of the model, so that any layout can load them.
_SHARDING = {"distrib_optim_sharding_type": "fully_reshardable"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a run has come."""

    step: int = 0  # optimizer steps done
    consumed_samples: int = 0  # samples seen by them, over all ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class DataState:
    """What a checkpoint keeps of the data."""

    position: dict[str, Any] | None  # of this rank's loader; None where another rank reads
    card: dict[str, Any] | None  # how to rebuild text encoder and decoder; mock data has none
    null_text_LE: Tensor


def save_checkpoint(
    folder: Path, learner: Learner, *, progress: Progress, config: RunConfig, data: DataState
) -> Path:
    """Writes RUN/checkpoints/step_N and moves LATEST once it is whole; all ranks call it.

    Raises:
        CheckpointError: a rank could not write; older checkpoints are as they were.
    """
    final = folder / "checkpoints" / f"{STEP}{progress.step:08d}"
    partial = final.with_name(f"{_PARTIAL}{final.name}")
    with _saying_why_not(partial):
        if dist.get_rank() == 0:
            for killed in final.parent.glob(f"{_PARTIAL}*"):
                shutil.rmtree(killed)
            partial.mkdir(parents=True)
        dist.barrier()
        with learner.settled():
            state = _sharded_state(learner, loading=False)
            state |= {"step": progress.step, "consumed_samples": progress.consumed_samples}
            _write(state, partial)
        if data.position is not None:
            torch.save(data.position, partial / _loader_file(learner.groups.dp.rank()))
        dist.barrier()
        if dist.get_rank() == 0:
            _describe(partial, config, data)
            _publish(partial, final, keep=config.checkpoint.keep_last)
        dist.barrier()
    return final


def _describe(folder: Path, config: RunConfig, data: DataState) -> None:
    save_config(config, folder / "config.yaml")
    save_file({"text": data.null_text_LE.contiguous()}, folder / "null_text.safetensors")
    if data.card is not None:
        (folder / "dataset_card.json").write_text(json.dumps(data.card, indent=1))


@contextmanager
def _saying_why_not(path: Path) -> Iterator[None]:
    """Turns what keeps a checkpoint from being written into one error that a user understands."""
    try:
        yield
    except (CheckpointException, OSError, RuntimeError) as error:  # torch calls a full disk Runtime
        cause: BaseException = error
        if isinstance(error, CheckpointException):  # raised on all ranks; the first knows why
            known = [_first_cause(error)]
            dist.broadcast_object_list(known)
            cause = known[0]
        reason = shorten(f"{type(cause).__name__} {cause}", width=160, placeholder="...")
        raise CheckpointError(
            f"{path} cannot be written ({reason}); is the disk full? Free space, or choose another"
            " checkpoint.save. Older checkpoints are as they were"
        ) from error


def load_checkpoint(path: Path, learner: Learner, *, config: RunConfig) -> Progress:
    """Brings weights, optimizer and averages back; `data_positions` has the loaders' states.

    Raises:
        CheckpointError: the checkpoint belongs to another model.
    """
    check_same_model(path, config)
    state = _sharded_state(learner, loading=True)
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
    if learner.ema is not None:
        averages = loaded["ema"]
        learner.ema.load({weight: averages[c][name] for weight, (c, name) in names.items()})
    return Progress(step=loaded["step"], consumed_samples=loaded["consumed_samples"])


def load_weights(path: Path, model: MegatronModule, *, averaged: bool) -> None:
    """Fills a model without optimizer with the weights of a checkpoint, or with their average.

    Raises:
        CheckpointError: the average is asked for and the run kept none.
    """
    state = model.sharded_state_dict()
    if averaged:
        if not any(name.startswith("ema.") for name in _stored_names(path)):
            raise CheckpointError(f"{path} holds no average of the weights; ask for weights=model")
        state = {name: _renamed(shard, "ema.") for name, shard in state.items()}
    loaded = _read(state, path)
    model.load_state_dict({k: v for k, v in loaded.items() if k in state})


def data_positions(path: Path) -> list[dict[str, Any]]:
    """Where the loaders of all data-parallel ranks stood, in the order of the ranks.

    Raises:
        CheckpointError: a file is lost or damaged.
    """
    first = _data_position(path / _loader_file(0))
    others = range(1, first.get("ranks", 1))
    return [first, *(_data_position(path / _loader_file(rank)) for rank in others)]


def _data_position(file: Path) -> dict[str, Any]:
    if not file.is_file():
        path = file.parent
        raise CheckpointError(f"{path} has no {file.name}; {other_than(path.parent, path.name)}")
    try:
        return torch.load(file, weights_only=True)
    except Exception as error:
        raise damaged(file, error) from error


def _loader_file(data_rank: int) -> str:
    return f"loader_{data_rank:05d}.pt"


def check_same_model(path: Path, config: RunConfig) -> None:
    """Refuses a checkpoint whose weights have another shape or another meaning.

    Raises:
        CheckpointError: names every setting that differs, with both values.
    """
    saved, here = _must_agree(saved_config(path)), _must_agree(config)
    different = [
        f"  {name}: {saved.get(name)} in the checkpoint, {here.get(name)} here"
        for name in sorted(saved.keys() | here.keys())
        if saved.get(name) != here.get(name)
    ]
    if different:
        raise CheckpointError(
            f"{path} was trained with other settings:\n" + "\n".join(different) + "\nUse its"
            " settings, or another checkpoint.save and checkpoint.load to start a new run"
        )


def _must_agree(config: RunConfig) -> dict[str, Any]:
    """What a checkpoint fixes: the shape and the meaning of what it stores."""
    model, sharded = config.model, config.ddp.use_distributed_optimizer
    free = {"name", "precision", "vae_cache_folder", "init_method_std", "cp_comm_type"}
    fixed = {
        f"model.{f.name}": getattr(model, f.name)
        for f in fields(model)
        if f.name not in free and not f.name.startswith("recompute") and "parallel" not in f.name
    }
    for name in ("name", "sigma_data", "timestep_scale"):
        fixed[f"objective.{name}"] = getattr(config.objective, name)
    fixed["ema.kind=none"] = config.ema.kind is EmaKind.NONE
    fixed["ddp.use_distributed_optimizer"] = sharded
    if not sharded:  # Megatron-Core then stores float32 weights for bf16 only
        fixed["model.precision"] = model.precision
    return fixed


def _stored_names(path: Path) -> list[str]:
    """Names of the tensors in a checkpoint.

    Raises:
        CheckpointError: its index is damaged.
    """
    try:
        return list(dist_checkpointing.load_tensors_metadata(str(path)))
    except Exception as error:
        raise damaged(path, error) from error


def _write(state: dict[str, Any], path: Path) -> None:
    # Megatron-Core's own queue, for saves in the background, is a process that takes 2 s to start
    # and dies of the SIGTERM that makes a run save: torch.distributed.run sends it to all of them.
    filesystem_async._results_queue = SimpleQueue()  # type: ignore[assignment]
    dist_checkpointing.save(state, str(path))


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


def _sharded_state(learner: Learner, *, loading: bool) -> dict[str, Any]:
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


def _renamed(shard: Any, prefix: str) -> Any:
    if not isinstance(shard, ShardedTensor):
        return shard
    return replace(shard, key=f"{prefix}{shard.key}")


def _publish(partial: Path, final: Path, *, keep: int) -> None:
    """Makes a whole checkpoint visible, then the newest; then removes what is too old."""
    for file in partial.rglob("*"):
        if file.is_file():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    pointer = final.parent / f".{LATEST}.new"
    pointer.write_text(final.name)
    pointer.replace(final.parent / LATEST)
    # Those of later steps are of a run that this one went back from: they stay until replaced.
    done = sorted(p for p in final.parent.glob(f"{STEP}*") if p.name <= final.name)
    for old in done[:-keep] if keep else []:
        shutil.rmtree(old)
