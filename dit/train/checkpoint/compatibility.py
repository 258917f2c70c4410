"""The configuration of a checkpoint beside that of this run: what may differ, and what may not."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from dit.config import RunConfig
from dit.train.checkpoint.paths import CheckpointError, saved_config

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
    """What a checkpoint fixes: the shape and the meaning of all that it stores."""
    fixed = _of_model(config)
    for name in ("name", "sigma_data", "timestep_scale"):
        fixed[f"objective.{name}"] = getattr(config.objective, name)
    fixed["ddp.use_distributed_optimizer"] = config.ddp.use_distributed_optimizer
    return fixed
