"""Reads what a checkpoint holds, and whether it fits a run, without reading its tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from dit.checkpoint_paths import CheckpointError, check_index, damaged, saved_config
from dit.config import LossKind, ModelConfig, RunConfig
from dit.config.resume import OF_MODEL, Resume, resume_class, weight_settings
from dit.config_loading.schema import schema_of
from dit.distcp import tensor_names

AVERAGE = "ema."
"""Prefix of the names of averaged weights (EMA)."""
CRITIC = "critic"
"""Key of a distillation's critic in a checkpoint; with a dot, the prefix of its tensors."""
_T = TypeVar("_T")


def check_same_model(path: Path, config: RunConfig) -> None:
    """Refuses a checkpoint whose weights differ in shape or meaning from those of `config`.

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
            f" (checkpoint.finetune=true checkpoint.load={path}), where only model and adapters"
            " must agree"
        )


def check_same_weights(path: Path, model: ModelConfig) -> None:
    """Refuses a checkpoint whose weights differ in shape or meaning from those of `model`.

    The inputs of samples may differ.

    Raises:
        CheckpointError: names every setting that differs, with both values.
    """
    different = _different(_of_weights(saved_config(path).model), _of_weights(model))
    if different:
        raise CheckpointError(
            f"{path} holds the weights of another model:{different}\nUse its settings;"
            " checkpoint.finetune=true leaves free all that is not the model: objective, data,"
            " batch size, learning rate, average, precision and parallelism"
        )


def check_average(path: Path, *, averaged: bool) -> None:
    """Refuses a checkpoint without EMA if `averaged`; reads no tensors.

    Raises:
        CheckpointError: the index is damaged, or `averaged` is set but the checkpoint has no EMA.
    """
    there = has_average(path)  # finds a damaged index as well
    if averaged and not there:
        raise CheckpointError(
            f"{path} holds no average of the weights; use --weights model, or in training"
            " checkpoint.finetune_weights=model (of a teacher distill.teacher_weights=model)"
        )


def has_average(path: Path, *, among: str | None = None) -> bool:
    begins = AVERAGE if among is None else f"{among}.{AVERAGE}"
    return any(name.startswith(begins) for name in from_index(path, tensor_names))


def has_critic(path: Path) -> bool:
    """Whether the checkpoint `path` also holds a distillation's critic; reads no tensors.

    Raises:
        CheckpointError: the index of the checkpoint is damaged.
    """
    return any(name.startswith(f"{CRITIC}.") for name in from_index(path, tensor_names))


def from_index(path: Path, read: Callable[[Path], _T]) -> _T:
    """Calls `read(path)`, for functions that read the index of a checkpoint.

    Raises:
        CheckpointError: a file of the index is damaged.
    """
    check_index(path)
    try:
        return read(path)
    except Exception as error:
        raise damaged(path, error) from error


def _different(saved: dict[str, Any], here: dict[str, Any]) -> str:
    return "".join(
        f"\n  {name}: {_spelled(was)} in the checkpoint, {_spelled(now)} here"
        for name in sorted({**saved, **here})  # families have keys of their own
        if (was := saved.get(name)) != (now := here.get(name))
    )


def _spelled(value: Any) -> str:
    return json.dumps(value, default=asdict, ensure_ascii=False).strip('"')


def _of_weights(model: ModelConfig) -> dict[str, Any]:
    """Keys of `model` that another run from the same weights must keep, with their values."""
    return {
        f"model.{name}": value
        for name, value in weight_settings(model).items()
        if resume_class(type(model), name) is not Resume.OF_INPUTS
    }


def _fixed(config: RunConfig) -> dict[str, Any]:
    """Settings that determine shape and meaning of the tensors in a checkpoint."""
    schema, fixed = schema_of(config), {}
    for key in schema.all_keys():
        if schema.resume_class(key) in OF_MODEL:
            fixed[key] = attrgetter(key)(config)
    # Only the Huber loss depends on huber_c: it decides which average of targets is learned.
    if config.objective.loss is not LossKind.HUBER:
        fixed["objective.huber_c"] = None
    return fixed
