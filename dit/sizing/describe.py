"""The output of `--dry-run`: the configuration as YAML, with facts about the run as comments.

The output is therefore itself a valid configuration file.
"""

from __future__ import annotations

from dit.config import (
    DatasetConfig,
    Decay,
    EmaConfig,
    EmaKind,
    OptimizerKind,
    Precision,
    Recompute,
    RunConfig,
    Sharding,
)
from dit.config_loading.load import to_yaml
from dit.device_specs import DEVICES
from dit.models.linears import orthogonalisation, orthogonalising_ranks
from dit.sizing.memory import memory, parameter_count, trained_count
from dit.sizing.pack_traffic import break_even_tokens, pack_traffic
from dit.sizing.recomputation import choose_recomputation


def describe(config: RunConfig, *, world_size: int) -> str:
    """The resolved configuration, with parameters, layout, memory and other facts as comments.

    Raises:
        Problems: `world_size` processes cannot run this layout and global batch.
    """
    rows = [
        ("parameters", _parameters(config)),
        *_layout(config, world_size),
        *_memory(config, world_size),
        *_shares(config, world_size),
        *_muon(config, world_size),
        *_recomputation(config, world_size),
        *_effective(config),
    ]
    return to_yaml(config) + "\n" + "".join(f"# {name:<14}{text}\n" for name, text in rows)


def _parameters(config: RunConfig) -> str:
    count, name = parameter_count(config.model), config.model.name
    trained = trained_count(config)
    if config.lora.base_dtype is not None:
        name += f", matrices of layers in {config.lora.base_dtype}"
    if config.lora.enabled:
        beside = f", beside {file}" if (file := config.lora.frozen_adapter) else ""
        return f"{count:,} frozen ({name}), about {trained:,} of adapters trained{beside}"
    frozen = f", {count - trained:,} frozen" if trained < count else ""
    return f"{trained:,} trainable ({name}){frozen}"


def _layout(config: RunConfig, world_size: int) -> list[tuple[str, str]]:
    model, replicas = config.model, config.data_parallel_size(world_size)
    each = config.train.global_batch_size // replicas
    most = config.train.global_batch_size * config.dataset.task_encoder_seq_length
    return [
        (
            "layout",
            f"{world_size} processes = tensor {model.tensor_model_parallel_size}"
            f" x context {model.context_parallel_size}"
            f" x pipeline {model.pipeline_model_parallel_size} x data {replicas}",
        ),
        (
            "batch",
            f"{config.train.global_batch_size} packs a step = {replicas} data-parallel ranks"
            f" x {each} accumulated; at most {most:,} tokens",
        ),
    ]


def _memory(config: RunConfig, world_size: int) -> list[tuple[str, str]]:
    """Lines (label, text) about the estimated memory of one device."""
    need = memory(config, world_size=world_size)
    sharded = "sharded" if config.ddp.use_distributed_optimizer else "whole on every rank"
    sharded += ", as weights and gradients" * (config.ddp.sharding is Sharding.WEIGHTS)
    return [
        ("memory", f"{_gib(need.total)} a device (an estimate), of which"),
        ("", f"weights {_gib(need.weights)}, gradients {_gib(need.gradients)}"),
        ("", f"optimizer {_gib(need.optimizer)}, EMA {_gib(need.ema)} ({sharded})"),
        (
            "",
            f"activations about {_gib(need.activations)} for a full pack, and"
            f" {_gib(need.backward)} of one backward layer",
        ),
    ]


def _shares(config: RunConfig, world_size: int) -> list[tuple[str, str]]:
    """Lines (label, text) about FSDP traffic, and the size of packs that hides it.

    Empty without FSDP.
    """
    if config.ddp.sharding is not Sharding.WEIGHTS:
        return []
    shards = config.optimizer_ranks(config.data_parallel_size(world_size))
    sent, need = pack_traffic(config, shards=shards), memory(config, world_size=world_size)
    of_step = "" if config.ddp.reduce_each_pack else "the last of a step "
    rows = [
        (
            "weights",
            f"sharded over {shards} ranks; {_gib(need.gathered)} of a device for layers that are"
            " gathered",
        ),
        (
            "",
            f"each pack sends {_gb(sent.forward)} in its forward pass, {_gb(sent.backward)} in its"
            f" backward pass, and {of_step}{_gb(sent.gradients)} of gradients; its products hide"
            " this traffic if it has at least",
        ),
    ]
    for name, device in DEVICES.items():
        near, far = (
            break_even_tokens(config, shards=shards, flops=device.flops, bytes_per_s=rate)
            for rate in (device.link, device.network)
        )
        rows.append(
            ("", f"{name}: {near:,.0f} tokens inside of a server, {far:,.0f} between servers")
        )
    return rows


def _muon(config: RunConfig, world_size: int) -> list[tuple[str, str]]:
    """Lines (label, text) about the cost of Muon's iterations in a step with full packs.

    Empty with another optimizer.
    """
    if config.optimizer.kind is not OptimizerKind.MUON:
        return []
    work = orthogonalisation(config.model, config.optimizer)
    ranks = orthogonalising_ranks(config, config.data_parallel_size(world_size))
    tokens = config.train.global_batch_size * config.dataset.task_encoder_seq_length
    products = 6 * parameter_count(config.model) * tokens / world_size
    return [
        (
            "Muon",
            f"{work.matrices:,} matrices of {work.numbers:,} numbers, AdamW all others;"
            f" {work.flops / 1e12:,.3g} TFLOP an update, shared by {ranks} ranks: about"
            f" {work.flops / ranks / products:.1%} of the products of a step of full packs",
        )
    ]


def _recomputation(config: RunConfig, world_size: int) -> list[tuple[str, str]]:
    """Lines (label, text) about the layers that `auto` recomputes, for common sizes of memory.

    Empty if `recompute_granularity` is not `auto`.
    """
    if config.model.recompute_granularity is not Recompute.AUTO:
        return []
    rows = [("recomputation", "auto: none on a CPU, and by the memory of a GPU:")]
    for size in sorted({device.memory for device in DEVICES.values()}):
        names = ", ".join(name for name, device in DEVICES.items() if device.memory == size)
        chosen = choose_recomputation(config, world_size=world_size, device_memory=size)
        rows.append(("", f"{names}: {chosen.reason.removeprefix('auto: ')}"))
    return rows


def _gb(size: float) -> str:
    return f"{size / 1e9:,.3g} GB"


def _gib(size: int) -> str:
    if size < 2**30:
        return f"{size / 2**20:.1f} MiB"
    return f"{size / 2**30:.1f} GiB"


def _effective(config: RunConfig) -> list[tuple[str, str]]:
    model, optimizer = config.model, config.optimizer
    wide = model.precision is Precision.FP32
    grads = "fp32" if wide or config.ddp.grad_reduce_in_fp32 else str(model.precision)
    rows = config.ddp.sharding is Sharding.WEIGHTS
    copies = ", rows of weights float32" if rows else ", float32 copies in the optimizer"
    copies = "" if wide else copies
    clip = f"norm at most {optimizer.clip_grad:g}" if optimizer.clip_grad else "not clipped"
    return [
        ("precision", f"weights and matrix products {model.precision}{copies}"),
        ("gradients", f"reduced in {grads}, {clip}"),
        ("weight decay", f"{optimizer.weight_decay:g} on matrices; none on norms and embeddings"),
        ("learning rate", _learning_rate(config)),
        ("EMA", _ema(config.ema)),
        ("objective", config.objective.summary),
        *_distillation(config),
        ("data", _data(config.dataset)),
    ]


def _distillation(config: RunConfig) -> list[tuple[str, str]]:
    c = config.distill
    if c.method is None:
        return []
    whose = c.teacher or "the base beneath the adapters"
    steps = "" if config.has_critic else f"{c.teacher_steps} steps in one of the student, "
    rows = [
        ("distillation", f"{config.student_sampling}, of {whose}"),
        (
            "teacher",
            f"{steps}guidance {config.teacher_guidance:g};"
            f" at most {config.passes_without_gradient} passes without gradients over each pack",
        ),
    ]
    if not config.has_critic:
        return rows
    own, when = config.of_critic, "in all other steps" if c.critic_alone else "in each step"
    told = f"learns {when}, the student in one of {c.student_every}"
    return [*rows, ("critic", f"{told}; lr {_learning_rate(own)}; EMA {_ema(own.ema)}")]


def _learning_rate(config: RunConfig) -> str:
    optimizer, scheduler = config.optimizer, config.scheduler
    text = f"{optimizer.lr:g}"
    if scheduler.lr_warmup_iters:
        text = f"0 to {optimizer.lr:g} over {scheduler.lr_warmup_iters} steps"
    if scheduler.lr_decay_style is Decay.CONSTANT:
        return f"{text}, then constant"
    source = "train.train_iters" if scheduler.lr_decay_iters is None else "scheduler.lr_decay_iters"
    return (
        f"{text}, then {scheduler.lr_decay_style} to {optimizer.min_lr:g}"
        f" at step {config.decay_iters} ({source})"
    )


def _ema(ema: EmaConfig) -> str:
    width = f"sigma_rel {ema.sigma_rel:g}" if ema.kind is EmaKind.POWER else f"{ema.decay:g}"
    return "none" if ema.kind is EmaKind.NONE else f"{ema.kind}, {width}, float32"


def _data(dataset: DatasetConfig) -> str:
    if dataset.mock:
        unread = f"; dataset.path={dataset.path} is not read" if dataset.path else ""
        return f"mock, a mixture of {len(dataset.mock_samples)} geometries{unread}"
    if dataset.blend:
        return "blend of " + ", ".join(f"{one.path} ({one.weight:g})" for one in dataset.blend)
    return dataset.path or "none: set dataset.path, dataset.blend or dataset.mock"
