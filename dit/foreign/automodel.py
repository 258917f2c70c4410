"""Keys of NeMo AutoModel's diffusion recipes."""

from __future__ import annotations

from typing import Any

from dit.foreign.entry import (
    BUCKETS,
    CHOOSE_TARGETS,
    CONVERT,
    GOING_ON,
    MACHINE,
    NETWORK,
    PACKS,
    PART,
    SHARDED,
    STEPS,
    Foreign,
    adapter_dtype,
    betas,
    flow,
    going_on,
    network_of,
    probability,
    read_as,
    read_by,
    recompute,
    unused_key,
)
from dit.foreign.optimizers import OF_MUON, OPTIMIZER, OPTION

_FP8 = "model.fp8 with model.transformer_impl=transformer_engine"
_SAVED = "checkpoints are torch_dist; checkpoint.also_save_hf=true exports each for Diffusers"


_CLASSES = {
    "FluxTransformer2DModel": "flux",
    "HunyuanVideo15Transformer3DModel": "hunyuan_video_15",
    "QwenImageTransformer2DModel": "qwen_image",
    "WanTransformer3DModel": "wan",
}
"""Diffusers' class that AutoModel's recipes pretrain -> family."""


def _weighting(value: Any) -> dict[str, Any]:
    words = {False: "none", True: "linear", "none": "none", "linear": "linear"}
    if not isinstance(value, bool | str) or value not in words:
        raise ValueError(f"{value!r:.100} is not supported; give none or linear")
    return {"objective.name": "flow", "objective.weighting": words[value]}


def _fsdp(block: Any) -> dict[str, Any]:
    """Keys for the group `fsdp`, whose presence shards weights by FSDP2."""
    if not isinstance(block, dict):
        raise ValueError(
            f"fsdp={block!r:.100} is a group and holds no value; set a key such as fsdp.tp_size"
        )
    return {"ddp.sharding": "weights"}


AUTOMODEL: dict[str, Foreign] = {
    "seed": read_as("rng.seed"),
    "wandb.project": read_as("logger.wandb_project"),
    "wandb.name": read_as("logger.wandb_exp_name"),
    "wandb.entity": read_as("logger.wandb_entity"),
    "wandb.mode": read_as("logger.wandb_mode"),
    "wandb.*": unused_key("logger.wandb_* are the keys of W&B"),
    "dist_env.timeout_minutes": read_as("dist.distributed_timeout_minutes"),
    "dist_env.*": unused_key(MACHINE),
    "model.pretrained_model_name_or_path": NETWORK,
    "model.mode": PART,
    "model.stage": PART,
    "model.model_type": PART,
    "model.pipeline_spec": PART,
    "model.pipeline_spec.transformer_cls": network_of(_CLASSES),
    "model.pipeline_spec.*": PART,
    "model.cache_dir": unused_key("nothing is fetched from the hub"),
    "model.torch_dtype": unused_key("model.precision decides"),
    "model.transformer_engine_*": unused_key(_FP8),
    "model.fuse_qkv": unused_key(
        "queries, keys and values are one matrix for training where it helps"
    ),
    "optim.learning_rate": read_as("optimizer.lr"),
    "optim.optimizer._target_": OPTIMIZER,
    "optim.optimizer.lr": read_as("optimizer.lr"),
    "optim.optimizer.weight_decay": read_as("optimizer.weight_decay"),
    "optim.optimizer.betas": read_by(betas),
    "optim.optimizer.eps": read_as("optimizer.adam_eps"),
    "optim.clip_grad_max_norm": read_as("optimizer.clip_grad"),
    **{f"optim.optimizer.{name}": option for name, option in OF_MUON.items()},
    "optim.optimizer.*": OPTION,
    "optim.*": OPTION,
    "clip_grad_max_norm": read_as("optimizer.clip_grad"),
    "lr_scheduler.lr_decay_style": read_as("scheduler.lr_decay_style"),
    "lr_scheduler.lr_warmup_steps": read_as("scheduler.lr_warmup_iters"),
    "lr_scheduler.lr_decay_steps": read_as("scheduler.lr_decay_iters"),
    "lr_scheduler.min_lr": read_as("optimizer.min_lr"),
    "lr_scheduler.*": unused_key("scheduler.* and optimizer.min_lr decide"),
    "fsdp": read_by(_fsdp, "data ranks share weights out, as in FSDP2", optional=True),
    "fsdp.tp_size": read_as("model.tensor_model_parallel_size"),
    "fsdp.cp_size": read_as("model.context_parallel_size"),
    "fsdp.pp_size": read_as("model.pipeline_model_parallel_size"),
    "fsdp.sequence_parallel": read_as("model.sequence_parallel"),
    "fsdp.activation_checkpointing": read_by(recompute),
    "fsdp.enable_compile": read_as("model.compile"),
    "fsdp.dp_size": unused_key("data parallelism takes all processes that the other sizes leave"),
    "fsdp.dp_replicate_size": read_as("ddp.dp_replicate_size"),
    "fsdp.cpu_offload": unused_key(
        "optimizer.optimizer_cpu_offload keeps moments, and model.cpu_offloading_num_layers"
        " activations, in the host's memory"
    ),
    "fsdp.defer_fsdp_grad_sync": unused_key("ddp.reduce_each_pack says when gradients are summed"),
    "fsdp.reshard_after_forward": unused_key("ddp.reshard_after_forward decides"),
    "fsdp.fsdp2_*": unused_key("ddp.prefetch_layers counts layers that are gathered ahead"),
    "fsdp.*": unused_key(SHARDED),
    "ddp.find_unused_parameters": unused_key("every weight is used at every step"),
    "flow_matching.adapter_type": PART,
    "flow_matching.adapter_kwargs": PART,
    "flow_matching.adapter_kwargs.*": PART,
    "flow_matching.timestep_sampling": flow("objective.density"),
    "flow_matching.logit_mean": flow("objective.logit_mean"),
    "flow_matching.logit_std": flow("objective.logit_std"),
    "flow_matching.flow_shift": flow("objective.flow_shift"),
    "flow_matching.num_train_timesteps": flow("objective.timestep_scale"),
    "flow_matching.cfg_dropout_prob": read_as("objective.text_dropout"),
    "flow_matching.use_loss_weighting": read_by(_weighting),
    "flow_matching.loss_weighting_scheme": read_by(_weighting),
    "flow_matching.use_sigma_noise": unused_key("t is drawn by objective.density", True, None),
    "flow_matching.mix_uniform_ratio": unused_key(
        "no batch is drawn by another density than the rest"
    ),
    "flow_matching.sigma_*": unused_key("t is drawn from all of (0, 1)"),
    "flow_matching.i2v_prob": read_by(
        probability("objective.image_condition_probability"),
        "drawn for each sample with a first frame, where AutoModel draws it for a batch; networks"
        " that take no first frame, or always one, do not use it",
        optional=True,
    ),
    "flow_matching.*": unused_key(
        "objective.* decides, and logger.log_interval what is written down"
    ),
    "step_scheduler.max_steps": read_as("train.train_iters"),
    "step_scheduler.global_batch_size": read_as(
        "train.global_batch_size", note="in packs, each of many samples"
    ),
    "step_scheduler.ckpt_every_steps": read_as("checkpoint.save_interval"),
    "step_scheduler.val_every_steps": read_as("train.eval_interval"),
    "step_scheduler.log_every": read_as("logger.log_interval"),
    "step_scheduler.local_batch_size": unused_key(PACKS),
    "step_scheduler.num_epochs": unused_key(STEPS),
    "step_scheduler.save_checkpoint_every_epoch": unused_key(
        "checkpoint.save_interval counts steps"
    ),
    "step_scheduler.*": unused_key("train.*, checkpoint.* and logger.* decide"),
    "data.dataloader.num_workers": read_as("dataset.num_workers"),
    "data.dataloader.cache_dir": unused_key(CONVERT),
    "data.dataloader._target_": unused_key("Energon is the loader, and no value names code to run"),
    "data.dataloader.model_type": PART,
    "data.dataloader.train_text_encoder": unused_key(
        "shards hold embedded text, so that no text encoder is trained", False, None
    ),
    "data.dataloader.base_resolution": unused_key(BUCKETS),
    "data.dataloader.dynamic_batch_size": unused_key(f"{BUCKETS}, whose tokens are bounded"),
    "data.dataloader.*": unused_key("dataset.* decides: samples are shuffled, and none is dropped"),
    "data.meta_folder": unused_key(CONVERT),
    "data.*": unused_key("dataset.* decides"),
    "checkpoint.checkpoint_dir": read_as("checkpoint.save"),
    "checkpoint.output_dir": read_as("checkpoint.save"),
    "checkpoint.restore_from": read_by(going_on, GOING_ON),
    "checkpoint.resume": read_by(going_on, GOING_ON),
    "checkpoint.diffusers_compatible": read_as("checkpoint.also_save_hf"),
    "checkpoint.is_async": read_as("checkpoint.async_save"),
    "checkpoint.max_recent_checkpoints": read_as("checkpoint.keep_last"),
    "checkpoint.enabled": unused_key("a run saves where checkpoint.save is set", True, None),
    "checkpoint.model_save_format": unused_key(_SAVED),
    "checkpoint.save_consolidated": unused_key(_SAVED),
    "logging.save_every": read_as("checkpoint.save_interval"),
    "logging.log_every": read_as("logger.log_interval"),
    "batch.batch_size_per_node": unused_key(PACKS),
    "training.num_epochs": unused_key(STEPS),
    "peft.dim": read_as("lora.rank", note="an unset alpha is the rank here, and 32 in AutoModel"),
    "peft.alpha": read_as("lora.alpha"),
    "peft.dropout": read_as("lora.dropout", note="on the adapter's input"),
    "peft.target_modules": read_as("lora.targets"),
    "peft.lora_dtype": read_by(adapter_dtype),
    "peft.exclude_modules": unused_key(CHOOSE_TARGETS, [], None),
    "peft.match_all_linear": unused_key(CHOOSE_TARGETS, False, None),
    "peft.use_dora": unused_key("adapters are plain LoRA", False, None),
    "peft.lora_A_init": unused_key("A starts uniform in +-1 / sqrt(inputs), as in PEFT"),
    "peft._target_": unused_key("no value names code to run; lora.rank turns adapters on"),
    "peft": unused_key("lora.rank turns adapters on", None),
    "peft.*": unused_key("lora.* decides"),
    "performance.*": unused_key("gradients are checked and clipped in one kernel"),
    "profiling.*": unused_key("benchmarks/benchmark.py measures a step"),
    "ci.*": unused_key("it is AutoModel's own test"),
}
BLOCKS = ("fsdp",)
"""Groups whose mere presence in a file has a meaning, besides their keys."""
