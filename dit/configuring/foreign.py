"""Keys of NVIDIA's DFM and Megatron-Bridge that have no meaning here, and what stands for each.

A file written for those stacks loads: such a key is accepted with one line that says what replaces
it. A value that asks for something that is not done here is an error. Keys that have a meaning here
under another name are not in this table: they are unknown keys, and the error names ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Foreign:
    """A key that is read and not used."""

    instead: str  # what decides the matter here
    accepts: tuple[Any, ...] | None = None  # values that ask for nothing else; None for any


_OFF = (None, False)
_PACK_LENGTH = Foreign(instead="dataset.task_encoder_seq_length is the length of a pack")
_ALWAYS_SAVED = "a checkpoint always holds and restores model, optimizer and loader"
_PRECISION = "model.precision and ddp.grad_reduce_in_fp32 decide"
_TEXT = "there is no tokenizer: shards hold embedded text"

FOREIGN: dict[str, Foreign] = {
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
        instead=_PRECISION, accepts=(None, "bf16_mixed", "bf16-mixed", "fp32", "32")
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
    "optimizer.optimizer": Foreign(
        instead="the optimizer is AdamW", accepts=(None, "adam", "adamw")
    ),
    "scheduler.override_opt_param_scheduler": Foreign(instead="the configuration always decides"),
    "ddp.use_megatron_fsdp": Foreign(
        instead="ddp.use_distributed_optimizer shards the optimizer", accepts=_OFF
    ),
    "ddp.check_for_nan_in_grad": Foreign(instead="train.max_skipped_steps decides"),
    "ddp.average_in_collective": Foreign(
        instead="the loss is a true mean over the real tokens of the global batch"
    ),
    "train.manual_gc*": Foreign(instead="Python collects its own garbage"),
}


def foreign(key: str) -> Foreign | None:
    """What stands for a key of another stack, or None if the key is none."""
    exact = FOREIGN.get(key)
    if exact is not None:
        return exact
    return next((entry for name, entry in FOREIGN.items() if fnmatchcase(key, name)), None)


def is_foreign_group(key: str) -> bool:
    """Whether keys of another stack lie below this one."""
    return f"{key}.*" in FOREIGN


def accepts(entry: Foreign, value: object) -> bool:
    """Whether the value asks for nothing that is not done here; True is not 1."""
    if entry.accepts is None:
        return True
    return any(type(value) is type(one) and value == one for one in entry.accepts)
