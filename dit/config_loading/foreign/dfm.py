"""Keys of NVIDIA's DFM and Megatron-Bridge that this project does not use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dit.config_loading.foreign.entry import Foreign
from dit.config_loading.foreign.optimizers import OF_MEGATRON, OF_MEGATRONS_MUON

_OFF = (None, False)
_ON_OR_OFF = (*_OFF, True)
_PACK_LENGTH = Foreign(instead="dataset.task_encoder_seq_length is the length of a pack")
_ALWAYS_SAVED = "a checkpoint always holds and restores model, optimizer and loader"
_PRECISION = "model.precision and ddp.grad_reduce_in_fp32 decide"
_MOMENTS = "optimizer.exp_avg_dtype and exp_avg_sq_dtype decide, and float32 is their default"
_FLOAT32 = (None, "torch.float32", "float32", "fp32")
_TEXT = "there is no tokenizer: shards hold embedded text"
_STRATEGY = "ddp.data_parallel_sharding_strategy"
_STRATEGIES = {"no_shard": "optimizer", "optim": "optimizer", "optim_grads_params": "weights"}
"""Of Megatron-FSDP, and what each is of ddp.sharding; `no_shard` is its default."""


def _megatron_fsdp(values: Mapping[str, Any]) -> dict[str, Any]:
    strategy = values.get(_STRATEGY) or "no_shard"
    if not values["ddp.use_megatron_fsdp"] or strategy not in _STRATEGIES:
        return {}
    return {"ddp.sharding": _STRATEGIES[strategy]}


DFM: dict[str, Foreign] = {
    "model.qkv_format": Foreign(instead="packs are always thd", accepts=("thd",)),
    "model.seq_length": _PACK_LENGTH,
    "dataset.seq_length": _PACK_LENGTH,
    "dataset.micro_batch_size": Foreign(
        instead="train.micro_batch_size decides, and is 1 pack", accepts=(1,)
    ),
    "dataset.global_batch_size": Foreign(instead="train.global_batch_size decides"),
    "dataset.dataloader_type": Foreign(
        instead="Energon is the only loader", accepts=(None, "external")
    ),
    "model.bf16": Foreign(instead=_PRECISION),
    "model.fp16": Foreign(instead=_PRECISION, accepts=_OFF),
    "model.params_dtype": Foreign(
        instead=_PRECISION,
        accepts=("torch.bfloat16", "bfloat16", "bf16", "torch.float32", "float32", "fp32"),
    ),
    "model.vae_module": Foreign(instead="the dataset's card names the decoder"),
    "model.vae_name": Foreign(instead="the dataset's card names the decoder"),
    "model.layernorm_across_heads": Foreign(
        instead="queries and keys are normed per head", accepts=_OFF
    ),
    "model.add_bias_linear": Foreign(instead="the model has no biases", accepts=_OFF),
    "model.gated_linear_unit": Foreign(instead="the MLP is not gated", accepts=_OFF),
    "mixed_precision": Foreign(
        instead=_PRECISION, accepts=(None, "bf16_mixed", "bf16-mixed", "bf16", "fp32", "32")
    ),
    "mixed_precision.bf16": Foreign(instead=_PRECISION),
    "mixed_precision.params_dtype": Foreign(instead=_PRECISION),
    "mixed_precision.pipeline_dtype": Foreign(instead=_PRECISION),
    "mixed_precision.autocast_enabled": Foreign(instead=_PRECISION, accepts=_OFF),
    "mixed_precision.grad_reduce_in_fp32": Foreign(instead=_PRECISION),
    "mixed_precision.*": Foreign(instead=_PRECISION, accepts=_OFF),
    "tokenizer.*": Foreign(instead=_TEXT),
    "tokenizer": Foreign(instead=_TEXT),
    "checkpoint.load_optim": Foreign(instead=_ALWAYS_SAVED, accepts=(None, True)),
    "checkpoint.save_optim": Foreign(instead=_ALWAYS_SAVED, accepts=(None, True)),
    "checkpoint.load_rng": Foreign(instead="noise follows from rng.seed and the step"),
    "checkpoint.save_rng": Foreign(instead="noise follows from rng.seed and the step"),
    "checkpoint.ckpt_format": Foreign(
        instead="checkpoints are torch_dist", accepts=(None, "torch_dist")
    ),
    "checkpoint.fully_parallel_save": Foreign(instead="the optimizer decides how it is sharded"),
    "optimizer.optimizer": OF_MEGATRON,
    **{f"optimizer.{name}": option for name, option in OF_MEGATRONS_MUON.items()},
    "optimizer.use_precision_aware_optimizer": Foreign(instead=_MOMENTS, accepts=_ON_OR_OFF),
    "optimizer.main_grads_dtype": Foreign(
        instead="ddp.grad_reduce_in_fp32 decides", accepts=_FLOAT32
    ),
    "optimizer.main_params_dtype": Foreign(
        instead="the optimizer keeps float32 weights", accepts=_FLOAT32
    ),
    "optimizer.store_param_remainders": Foreign(instead="the optimizer keeps float32 weights"),
    "scheduler.override_opt_param_scheduler": Foreign(instead="the configuration always decides"),
    "ddp.use_megatron_fsdp": Foreign(
        joint=_megatron_fsdp,
        instead=f"as {_STRATEGY} says, whose default is no_shard",
        accepts=_ON_OR_OFF,
        where_legal=True,
    ),
    _STRATEGY: Foreign(
        instead="optim_grads_params is ddp.sharding=weights, optim and no_shard are"
        " ddp.sharding=optimizer, each with ddp.use_megatron_fsdp=true; gradients are not shared"
        " out without weights",
        accepts=(None, *_STRATEGIES),
    ),
    "ddp.check_for_nan_in_grad": Foreign(instead="train.max_skipped_steps decides"),
    "ddp.average_in_collective": Foreign(
        instead="the loss is a true mean over the real tokens of the global batch"
    ),
    "train.manual_gc_eval": Foreign(instead="with train.manual_gc none happens in a validation"),
}
