"""Arguments of FastVideo: the keys of its YAML files, and the flat options of older versions."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from dit.foreign.entry import (
    BUCKETS,
    CONVERT,
    GOING_ON,
    MACHINE,
    NETWORK,
    PACKS,
    PART,
    SHARDED,
    Foreign,
    betas,
    first_of,
    flow,
    going_on,
    is_number,
    read_as,
    read_by,
    recompute,
    unused_key,
)
from dit.foreign.optimizers import OPTION


def _decay_style(value: Any) -> dict[str, Any]:
    style = "constant" if value == "constant_with_warmup" else value
    return {"scheduler.lr_decay_style": style}


def _adapters(value: Any) -> dict[str, Any]:
    """`lora.targets` for FastVideo's default adapters, which adapt attention alone."""
    if value is not True:
        raise ValueError(
            f"{value!r:.100} is not supported; leave out all keys of adapters to train without"
            " them (lora.rank turns them on)"
        )
    return {"lora.targets": ["attention"]}


def _parts_of_names(value: Any) -> dict[str, Any]:
    """`lora.targets` for FastVideo's targets, which match anywhere in a module's name."""
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"{value!r:.100} is not a list of names; give one such as [to_q, to_v]")
    return {"lora.targets": [f"*{one}*" for one in value]}


def _ema(value: Any) -> dict[str, Any]:
    return {"ema.kind": "constant", "ema.decay": value}


def _shares(ranks: Any) -> dict[str, Any]:
    """`ddp.sharding` for the number of ranks that divide the weights: none for 1, all for -1."""
    return {"ddp.sharding": "optimizer" if ranks == 1 else "weights"}


def _sparsity(value: Any) -> dict[str, Any]:
    """Keys for the fraction of Wan's cubes of tokens to which a cube does not attend."""
    if value in (None, False, 0, ""):
        return {}
    if not is_number(value) or not 0 < value < 1:
        raise ValueError(
            f"{value!r:.100} is not a number from 0 to below 1; correct it, or leave the key out"
        )
    share = float(1 - Fraction(repr(float(value))))
    return {
        "model.family": "wan",
        "model.sparse_attention": True,
        "model.sparse_share": share,
    }


def _growth(key: str) -> Foreign:
    """Entry that reads a parameter of the growth of Wan's sparsity as `key`.

    The entry sets nothing if the file has no VSA_sparsity.
    """

    def reading(value: Any, values: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value} if values.get("VSA_sparsity") else {}

    return Foreign(reading=reading, instead="used with VSA_sparsity above 0 alone")


def _whole_sparsity(value: Any) -> dict[str, Any]:
    """Keys for a constant sparsity, as in FastVideo's newer trainer."""
    at_once = {"model.sparse_share_step": 1.0, "model.sparse_share_interval": 1}
    return (found := _sparsity(value)) and found | at_once


_FIRST_STEPS = unused_key("the average begins with the run: ema.kind says how")
_LOADED = "dataset.* decides"

_DATA = {
    "data_path": unused_key(CONVERT),
    "dataloader_num_workers": read_as("dataset.num_workers"),
    "training_cfg_rate": read_as("objective.text_dropout"),
    "train_batch_size": unused_key(PACKS),
    "train_sp_batch_size": unused_key(PACKS),
    "preprocessed_data_type": unused_key("a sample is a latent and embedded text"),
    **dict.fromkeys(("num_height", "num_width", "num_frames", "num_latent_t"), unused_key(BUCKETS)),
}
_OPTIMIZER = {
    "learning_rate": read_as("optimizer.lr"),
    "betas": read_by(betas),
    "weight_decay": read_as("optimizer.weight_decay"),
    "max_grad_norm": read_as("optimizer.clip_grad"),
    "lr_scheduler": read_by(_decay_style),
    "lr_warmup_steps": read_as("scheduler.lr_warmup_iters"),
    "min_lr_ratio": unused_key("optimizer.min_lr is where decay ends, and no ratio"),
    "lr_num_cycles": unused_key("scheduler.lr_decay_style has no cycles"),
    "lr_power": unused_key("scheduler.lr_decay_style has no power"),
}
_LOOP = {
    "max_train_steps": read_as("train.train_iters"),
    "gradient_accumulation_steps": unused_key(PACKS),
}
_CHECKPOINT = {
    "output_dir": read_as("checkpoint.save"),
    "resume_from_checkpoint": read_by(going_on, GOING_ON),
    "training_state_checkpointing_steps": read_as("checkpoint.save_interval"),
    "weight_only_checkpointing_steps": unused_key(
        "`python -m dit.convert export` takes the weights"
    ),
    "checkpoints_total_limit": read_as("checkpoint.keep_last"),
}
_MODEL = {
    "weighting_scheme": flow("objective.density"),
    "logit_mean": flow("objective.logit_mean"),
    "logit_std": flow("objective.logit_std"),
    "mode_scale": flow("objective.mode_scale"),
    "precondition_outputs": unused_key(
        "the network of flow matching gives the velocity", None, False
    ),
    "enable_gradient_checkpointing_type": read_by(recompute),
    "enable_torch_compile": read_as("model.compile"),
}
_PARALLEL = {
    "num_gpus": unused_key(MACHINE),
    "tp_size": read_as("model.tensor_model_parallel_size"),
    "sp_size": read_as("model.context_parallel_size"),
    "hsdp_replicate_dim": read_as("ddp.dp_replicate_size"),
    "hsdp_shard_dim": read_by(
        _shares,
        "over as many data-parallel and context ranks as ddp.dp_replicate_size leaves",
        optional=True,
    ),
}
_VALIDATION = {
    "dataset_file": read_as("validation.prompts_file"),
    "every_steps": read_as("train.eval_interval"),
    "sampling_steps": read_by(first_of("validation.sampling_steps")),
    "guidance_scale": read_as("validation.guidance"),
    "num_frames": read_as("validation.num_video_frames"),
}
_LORA = {
    "enable": read_by(_adapters),
    "rank": read_as("lora.rank"),
    "alpha": read_as("lora.alpha"),
    "target_modules": read_by(_parts_of_names),
}
_FLAT = {
    **_DATA,
    **_OPTIMIZER,
    **_LOOP,
    **_CHECKPOINT,
    **_MODEL,
    **_PARALLEL,
    "model_path": NETWORK,
    "pretrained_model_name_or_path": NETWORK,
    "inference_mode": unused_key("this trains", None, False),
    "flow_shift": flow("objective.flow_shift"),
    "ema_decay": read_by(_ema),
    "ema_start_step": _FIRST_STEPS,
    "tracker_project_name": read_as("logger.wandb_project"),
    "wandb_run_name": read_as("logger.wandb_exp_name"),
    "log_validation": unused_key("validation.prompts_file asks for samples"),
    "validation_dataset_file": _VALIDATION["dataset_file"],
    "validation_steps": _VALIDATION["every_steps"],
    "validation_sampling_steps": _VALIDATION["sampling_steps"],
    "validation_guidance_scale": _VALIDATION["guidance_scale"],
    "dit_precision": unused_key(
        "the optimizer keeps float32 weights; model.precision is the product's"
    ),
    "num_euler_timesteps": unused_key("validation.sampling_steps decides"),
    "multi_phased_distill_schedule": unused_key("nothing is distilled"),
    "not_apply_cfg_solver": unused_key("nothing is distilled"),
    "dataset_type": unused_key(_LOADED),
    "use_lora": read_by(_adapters),
    "lora_training": read_by(_adapters),
    "lora_rank": _LORA["rank"],
    "lora_alpha": _LORA["alpha"],
    "lora_target_modules": _LORA["target_modules"],
    "VSA_sparsity": read_by(
        _sparsity, "the share of cubes goes down from 1 as model.sparse_share_step says"
    ),
    "VSA_decay_rate": _growth("model.sparse_share_step"),
    "VSA_decay_interval_steps": _growth("model.sparse_share_interval"),
}


def _below(prefix: str, group: dict[str, Foreign]) -> dict[str, Foreign]:
    return {f"{prefix}.{name}": entry for name, entry in group.items()}


FASTVIDEO: dict[str, Foreign] = {
    **_FLAT,
    **_below("training.data", _DATA),
    "training.data.seed": read_as("rng.seed"),
    "training.data.*": unused_key(_LOADED),
    **_below("training.optimizer", _OPTIMIZER),
    "training.optimizer.*": OPTION,
    **_below("training.loop", _LOOP),
    **_below("training.checkpoint", _CHECKPOINT),
    **_below("training.model", _MODEL),
    **_below("training.distributed", _PARALLEL),
    "training.distributed.*": unused_key(SHARDED),
    **_below("engine.parallelism", _PARALLEL),
    "engine.num_gpus": unused_key(MACHINE),
    "engine.parallelism.*": unused_key(SHARDED),
    "engine.precision.*": unused_key(
        "model.precision decides; the optimizer keeps float32 weights"
    ),
    "engine.*": unused_key(MACHINE),
    "training.tracker.project_name": read_as("logger.wandb_project"),
    "training.tracker.run_name": read_as("logger.wandb_exp_name"),
    "training.tracker.*": unused_key(
        "TensorBoard is written, and W&B where logger.wandb_project is set"
    ),
    **_below("training.validation", _VALIDATION),
    "training.validation.*": unused_key("validation.* decides"),
    **_below("callbacks.validation", _VALIDATION),
    "callbacks.validation.*": unused_key("validation.* decides, and no value names code to run"),
    "callbacks.grad_clip.max_grad_norm": read_as("optimizer.clip_grad"),
    "callbacks.ema.decay": read_by(_ema),
    "callbacks.ema.*": _FIRST_STEPS,
    "callbacks.*": unused_key("metrics.jsonl has every step, and no value names code to run"),
    "training.ema.decay": read_by(_ema),
    "training.ema.*": _FIRST_STEPS,
    "training.vsa.sparsity": read_by(_whole_sparsity),
    "training.vsa.*": unused_key("model.sparse_attention and its share decide"),
    **_below("training.lora", _LORA),
    "training.*": unused_key("no key of this program has its meaning"),
    **_below("models.student.lora", _LORA),
    "models.student.flow_shift": flow("objective.flow_shift"),
    "models.*.init_from": NETWORK,
    "models.student.*": PART,
    "models.*": PART,
    "method.*": unused_key("flow matching or EDM is trained, as objective.name says", grave=True),
    "pipeline.flow_shift": flow("objective.flow_shift"),
    "pipeline.*": PART,
}
