"""Keys of NVIDIA's DFM and Megatron-Bridge, and the keys that they share with this project."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dit.foreign.entry import Foreign, unused_key
from dit.foreign.optimizers import OF_MEGATRON, OF_MEGATRONS_MUON

_OFF = (None, False)
_ON_OR_OFF = (*_OFF, True)
_PACK_LENGTH = unused_key("dataset.task_encoder_seq_length is the length of a pack")
_ALWAYS_SAVED = "a checkpoint always holds and restores model, optimizer and loader"
_PRECISION = "model.precision and ddp.grad_reduce_in_fp32 decide"
_MOMENTS = "optimizer.exp_avg_dtype and exp_avg_sq_dtype decide, and float32 is their default"
_FLOAT32 = (None, "torch.float32", "float32", "fp32")
_TEXT = "there is no tokenizer: shards hold embedded text"
_STRATEGY = "ddp.data_parallel_sharding_strategy"
_STRATEGIES = {"no_shard": "optimizer", "optim": "optimizer", "optim_grads_params": "weights"}
"""Strategy of Megatron-FSDP -> `ddp.sharding`; `no_shard` is Megatron-FSDP's default."""


def _megatron_fsdp(values: Mapping[str, Any]) -> dict[str, Any]:
    strategy = values.get(_STRATEGY) or "no_shard"
    if not values["ddp.use_megatron_fsdp"] or strategy not in _STRATEGIES:
        return {}
    return {"ddp.sharding": _STRATEGIES[strategy]}


DFM: dict[str, Foreign] = {
    "model.qkv_format": unused_key("packs are always thd", "thd"),
    "model.seq_length": _PACK_LENGTH,
    "dataset.seq_length": _PACK_LENGTH,
    "dataset.micro_batch_size": unused_key("train.micro_batch_size decides, and is 1 pack", 1),
    "dataset.global_batch_size": unused_key("train.global_batch_size decides"),
    "dataset.dataloader_type": unused_key("Energon is the only loader", None, "external"),
    "model.bf16": unused_key(_PRECISION),
    "model.fp16": unused_key(_PRECISION, *_OFF),
    "model.params_dtype": unused_key(
        _PRECISION, "torch.bfloat16", "bfloat16", "bf16", "torch.float32", "float32", "fp32"
    ),
    "model.vae_module": unused_key("the dataset's card names the decoder"),
    "model.vae_name": unused_key("the dataset's card names the decoder"),
    "model.layernorm_across_heads": unused_key("queries and keys are normed per head", *_OFF),
    "model.add_bias_linear": unused_key("the model has no biases", *_OFF),
    "model.gated_linear_unit": unused_key("the MLP is not gated", *_OFF),
    "mixed_precision": unused_key(
        _PRECISION, None, "bf16_mixed", "bf16-mixed", "bf16", "fp32", "32"
    ),
    "mixed_precision.bf16": unused_key(_PRECISION),
    "mixed_precision.params_dtype": unused_key(_PRECISION),
    "mixed_precision.pipeline_dtype": unused_key(_PRECISION),
    "mixed_precision.autocast_enabled": unused_key(_PRECISION, *_OFF),
    "mixed_precision.grad_reduce_in_fp32": unused_key(_PRECISION),
    "mixed_precision.*": unused_key(_PRECISION, *_OFF),
    "tokenizer.*": unused_key(_TEXT),
    "tokenizer": unused_key(_TEXT),
    "checkpoint.load_optim": unused_key(_ALWAYS_SAVED, None, True),
    "checkpoint.save_optim": unused_key(_ALWAYS_SAVED, None, True),
    "checkpoint.load_rng": unused_key("noise follows from rng.seed and the step"),
    "checkpoint.save_rng": unused_key("noise follows from rng.seed and the step"),
    "checkpoint.ckpt_format": unused_key("checkpoints are torch_dist", None, "torch_dist"),
    "checkpoint.fully_parallel_save": unused_key("the optimizer decides how it is sharded"),
    "optimizer.optimizer": OF_MEGATRON,
    **{f"optimizer.{name}": option for name, option in OF_MEGATRONS_MUON.items()},
    "optimizer.use_precision_aware_optimizer": unused_key(_MOMENTS, *_ON_OR_OFF),
    "optimizer.main_grads_dtype": unused_key("ddp.grad_reduce_in_fp32 decides", *_FLOAT32),
    "optimizer.main_params_dtype": unused_key("the optimizer keeps float32 weights", *_FLOAT32),
    "optimizer.store_param_remainders": unused_key("the optimizer keeps float32 weights"),
    "scheduler.override_opt_param_scheduler": unused_key("the configuration always decides"),
    "ddp.use_megatron_fsdp": Foreign(
        reading=lambda _, values: _megatron_fsdp(values),
        instead=f"as {_STRATEGY} says, whose default is no_shard",
        accepts=_ON_OR_OFF,
        optional=True,
    ),
    _STRATEGY: unused_key(
        "optim_grads_params is ddp.sharding=weights, optim and no_shard are"
        " ddp.sharding=optimizer, each with ddp.use_megatron_fsdp=true; gradients are not shared"
        " out without weights",
        None,
        *_STRATEGIES,
    ),
    "ddp.check_for_nan_in_grad": unused_key("train.max_skipped_steps decides"),
    "ddp.average_in_collective": unused_key(
        "the loss is a true mean over the real tokens of the global batch"
    ),
    "train.manual_gc_eval": unused_key("with train.manual_gc, validations collect no garbage"),
}

SHARED: dict[str, tuple[str, ...]] = {
    "model": (
        *("num_layers", "hidden_size", "num_attention_heads", "in_channels", "patch_spatial"),
        *("patch_temporal", "crossattn_emb_size", "tensor_model_parallel_size"),
        *("sequence_parallel", "context_parallel_size", "cp_comm_type"),
        *("pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
        *("recompute_granularity", "recompute_method", "recompute_num_layers"),
        *("cpu_offloading_num_layers", "init_method_std", "transformer_impl"),
        *("attention_backend", "fp8", "fp8_recipe", "gradient_accumulation_fusion"),
        "vae_cache_folder",
    ),
    "dataset": (
        *("path", "task_encoder_seq_length", "packing_buffer_size", "num_workers"),
        *("use_train_split_for_val", "shuffle_buffer_size", "max_samples_per_sequence"),
    ),
    "train": (
        *("train_iters", "global_batch_size", "micro_batch_size", "eval_interval", "eval_iters"),
        *("manual_gc", "manual_gc_interval"),
    ),
    "optimizer": (
        *("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad"),
        *("optimizer_cpu_offload", "exp_avg_dtype", "exp_avg_sq_dtype", "muon_momentum"),
    ),
    "scheduler": ("lr_decay_style", "lr_warmup_iters", "lr_decay_iters"),
    "ddp": (
        *("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"),
        *("grad_reduce_in_fp32", "bucket_size"),
    ),
    "dist": ("distributed_timeout_minutes",),
    "checkpoint": ("save", "load", "save_interval", "async_save", "finetune"),
    "logger": (
        *("log_interval", "tensorboard_dir", "wandb_project", "wandb_exp_name", "wandb_entity"),
    ),
    "rng": ("seed",),
}
"""Group -> names of its keys that DFM or Megatron-Bridge and this project have in common.

A file that also has another key of this project counts as a file of this project."""
