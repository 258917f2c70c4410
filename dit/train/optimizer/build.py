"""The optimizer of the weights: parameter groups, their factors, and frozen weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.transformer.module import MegatronModule

from dit.config import OptimizerKind, ParameterGroup, Precision, RunConfig, Sharding
from dit.distributed.data_parallel import ModelChunk, chained_optimizers, named_weights
from dit.distributed.full_sharding import over_rows
from dit.models.layers.adaptable import CHILD, UP, Adaptable
from dit.models.linears import orthogonalised
from dit.models.parameter_groups import Weight, group_of_weights
from dit.models.registry import family_of
from dit.models.stacks.frozen_blocks import freeze_matrix
from dit.train.checkpoint.shares import data_of, entries_of, weight_of
from dit.train.optimizer import foreach
from dit.train.optimizer.adamw import install_adam
from dit.train.optimizer.narrow_moments import first_moments, moment_options
from dit.train.optimizer.states import drop_other_states, keep_states
from dit.train.optimizer.update import update_by

_SCHEDULE = ("max_lr", "min_lr", "start_wd", "end_wd")


_IDLE = "has_no_gradient"
"""Attribute that marks a weight without gradient, such as the text side of a last double-stream
layer."""


def build_optimizer(config: RunConfig, chunks: list[ModelChunk]) -> MegatronOptimizer:
    """The optimizer of `chunks`: AdamW with float32 master weights, or Muon with AdamW.

    It is sharded over data ranks if configured. Other optimizers would be added in this function.
    """
    c, rows = config.optimizer, config.ddp.sharding is Sharding.WEIGHTS
    options = OptimizerConfig(
        optimizer="adam",
        lr=c.lr,
        min_lr=c.min_lr,
        weight_decay=c.weight_decay,
        adam_beta1=c.adam_beta1,
        adam_beta2=c.adam_beta2,
        adam_eps=c.adam_eps,
        clip_grad=c.clip_grad,
        # With FSDP, rows of weights are float32, and the optimizer is sharded with them.
        bf16=config.model.precision is Precision.BF16 and not rows,
        params_dtype=chunks[0].config.params_dtype,
        use_distributed_optimizer=config.ddp.use_distributed_optimizer and not rows,
        overlap_param_gather=config.ddp.overlap_param_gather,
        **moment_options(c),
    )
    overrides = _overrides(options, config, chunks)
    _say_states(config, chunks)
    install_adam(always=c.optimizer_cpu_offload)
    foreach.install_norm_and_scale()
    optimizer = get_megatron_optimizer(
        options, [*chunks], config_overrides=overrides, use_gloo_process_groups=False
    )
    if rows:
        first: Any = chunks[0].module
        over_rows(optimizer, first.groups)
    for group in optimizer.param_groups:
        # `set_learning_rate` needs none of these. From 0.17 on Megatron-Core identifies groups by
        # them, so a checkpoint would not load with another learning rate.
        group |= {name: None for name in _SCHEDULE if name in group}
    for inner in chained_optimizers(optimizer):
        first_moments(inner)
        drop_other_states(inner)
        if c.optimizer_cpu_offload:
            inner.optimizer.keep_on_host()
    if c.kind is OptimizerKind.MUON:
        from dit.train.optimizer.muon import Muon

        network: Any = chunks[0].module
        update_by(optimizer, Muon(config, chunks, optimizer, network.groups))
    return optimizer


def _overrides(
    options: OptimizerConfig, config: RunConfig, chunks: list[ModelChunk]
) -> dict[ParamKey, Any]:
    """Factors of learning rate and weight decay, by Megatron-Core's key of the parameters."""
    overrides = get_standard_config_overrides(options)  # no weight decay on norms and biases
    no_decay: Any = {"wd_mult": 0.0}
    for pattern in family_of(config.model).weights.no_decay:  # nor on embeddings
        overrides[ParamKey(name=pattern)] = no_decay
    for chunk in chunks:  # nor on weights without gradient, which would only shrink
        network: Any = chunk.module
        idle = network.parameters_without_gradient()
        for name, param in named_weights(chunk):
            if any(fnmatchcase(name, pattern) for pattern in idle):
                setattr(param, _IDLE, True)
                overrides[ParamKey(attr=_IDLE)] = no_decay
    overrides |= _of_groups(config, chunks, without_decay=[*overrides])
    if config.lora.plus_ratio is not None:  # LoRA+, arXiv:2402.12354: B learns faster than A
        faster: Any = {"lr_mult": config.lora.plus_ratio}
        overrides[ParamKey(name=f"*.{CHILD}.*.{UP}")] = faster
    return overrides


def _say_states(config: RunConfig, chunks: list[ModelChunk]) -> None:
    """Marks the matrices of Muon, which have fewer states in checkpoints than other weights."""
    weights = {(pair.ours, pair.layer) for pair in orthogonalised(config.model, config.optimizer)}
    names = config.optimizer.states.of_matrices or ()
    for chunk in chunks if weights else ():
        network: Any = chunk.module
        for entry in entries_of(network):
            if weight_of(entry) in weights:
                keep_states(data_of(entry), names)


def _of_groups(
    config: RunConfig, chunks: list[ModelChunk], *, without_decay: list[ParamKey]
) -> dict[ParamKey, Any]:
    """Factors of learning rate and weight decay from `optimizer.groups`, by key of parameters."""
    c, found = config.optimizer, {}
    groups = group_of_weights(config.model, config.optimizer)
    for chunk in chunks:
        names = {param: name for name, param in named_weights(chunk)}
        network: Any = chunk.module
        for param, group in grouped(network, groups):
            factor = group.lr_factor if group.lr is None else group.lr / c.lr
            factors = {} if factor is None else {"lr_mult": float(factor)}
            decays = not any(key.matches(param, names[param]) for key in without_decay)
            if group.weight_decay is not None and decays and c.weight_decay > 0:
                factors["wd_mult"] = group.weight_decay / c.weight_decay
            if factors:
                mark = f"group_{sorted(factors.items())}"
                setattr(param, mark, True)
                found[ParamKey(attr=mark)] = factors
    return found


def grouped(
    module: MegatronModule, groups: Mapping[Weight, ParameterGroup]
) -> Iterator[tuple[torch.nn.Parameter, ParameterGroup]]:
    """(weight, its group) for each weight of `module` that belongs to one of `optimizer.groups`."""
    for entry in entries_of(module) if groups else ():
        if (group := groups.get(weight_of(entry))) is not None:
            assert isinstance(entry.data, torch.nn.Parameter)
            yield entry.data, group


def freeze_groups(module: MegatronModule, config: RunConfig) -> None:
    """Freezes the weights of frozen `optimizer.groups`, before `module` is wrapped.

    Linears with a frozen matrix get a product that still computes the gradient of their bias.

    Raises:
        Problems: a pattern of `optimizer.groups` matches no weight, or only a part of a weight; or
            a group has no effect.
    """
    for weight, group in grouped(module, group_of_weights(config.model, config.optimizer)):
        if group.frozen:
            weight.requires_grad_(False)
    # Megatron-Core's product with a frozen matrix has no gradient for the bias.
    for linear in module.modules() if config.optimizer.groups else ():
        if isinstance(linear, Adaptable) and linear.is_frozen:
            freeze_matrix(linear)
