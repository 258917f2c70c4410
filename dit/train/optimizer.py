"""AdamW, its learning rate schedule, and one clipped update of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    ParamKey,
    clip_grads,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from torch import Tensor
from torch.optim.adamw import adamw

from dit.config import Decay, ParameterGroup, Precision, RunConfig
from dit.distributed.data_parallel import MOMENTS, ModelChunk, chained_optimizers
from dit.distributed.process_groups import device
from dit.models.lora.adapter import CHILD, UP, Adaptable
from dit.models.parameter_groups import Weight, group_of_weights
from dit.models.registry import family_of
from dit.models.stacks.pinned_memory import PinnedRows
from dit.train import foreach
from dit.train.checkpoint.shares import entries_of, weight_of
from dit.train.narrow_moments import first_moments, moment_options, only_decay_unmoved

_SCHEDULE = ("max_lr", "min_lr", "start_wd", "end_wd")


_ROWS = PinnedRows()
_IDLE = "has_no_gradient"
"""Mark of a weight that nothing reads, such as the text side of a last double-stream layer."""


def build_optimizer(config: RunConfig, chunks: list[ModelChunk]) -> MegatronOptimizer:
    """AdamW with float32 master weights, sharded over data ranks where configured.

    Another optimizer would be chosen here.
    """
    c = config.optimizer
    options = OptimizerConfig(
        optimizer="adam",
        lr=c.lr,
        min_lr=c.min_lr,
        weight_decay=c.weight_decay,
        adam_beta1=c.adam_beta1,
        adam_beta2=c.adam_beta2,
        adam_eps=c.adam_eps,
        clip_grad=c.clip_grad,
        bf16=config.model.precision is Precision.BF16,
        params_dtype=chunks[0].config.params_dtype,
        use_distributed_optimizer=config.ddp.use_distributed_optimizer,
        overlap_param_gather=config.ddp.overlap_param_gather,
        **moment_options(c),
    )
    overrides = get_standard_config_overrides(options)  # no weight decay on norms and biases
    no_decay: Any = {"wd_mult": 0.0}
    for pattern in family_of(config.model).weights.no_decay:  # nor on embeddings
        overrides[ParamKey(name=pattern)] = no_decay
    for chunk in chunks:  # nor where nothing would hold against it
        network: Any = chunk.module
        idle = network.parameters_without_gradient()
        for name, param in network.named_parameters():
            if any(fnmatchcase(name, pattern) for pattern in idle):
                setattr(param, _IDLE, True)
                overrides[ParamKey(attr=_IDLE)] = no_decay
    overrides |= _of_groups(config, chunks, without_decay=[*overrides])
    if config.lora.plus_ratio is not None:  # LoRA+, arXiv:2402.12354: B learns faster than A
        faster: Any = {"lr_mult": config.lora.plus_ratio}
        overrides[ParamKey(name=f"*.{CHILD}.*.{UP}")] = faster
    install_adam(always=c.optimizer_cpu_offload)
    foreach.install_norm_and_scale()
    optimizer = get_megatron_optimizer(
        options, [*chunks], config_overrides=overrides, use_gloo_process_groups=False
    )
    for group in optimizer.param_groups:
        # `set_learning_rate` needs none of these. From 0.17 on Megatron-Core identifies groups by
        # them, so a checkpoint would not load with another learning rate.
        group |= {name: None for name in _SCHEDULE if name in group}
    for inner in chained_optimizers(optimizer):
        first_moments(inner)
        if c.optimizer_cpu_offload:
            inner.optimizer.keep_on_host()
    return optimizer


def _of_groups(
    config: RunConfig, chunks: list[ModelChunk], *, without_decay: list[ParamKey]
) -> dict[ParamKey, Any]:
    """Factors of learning rate and weight decay of `optimizer.groups`."""
    c, found = config.optimizer, {}
    groups = group_of_weights(config)
    for chunk in chunks:
        names = {param: name for name, param in chunk.module.named_parameters()}
        for param, group in grouped(chunk.module, groups):
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
    module: Any, groups: Mapping[Weight, ParameterGroup]
) -> Iterator[tuple[torch.nn.Parameter, ParameterGroup]]:
    """The weights of a part of the network that have a group."""
    for entry in entries_of(module) if groups else ():
        if (group := groups.get(weight_of(entry))) is not None:
            assert isinstance(entry.data, torch.nn.Parameter)
            yield entry.data, group


def freeze_groups(module: Any, config: RunConfig) -> None:
    """Freezes the weights of frozen groups, before the module is wrapped.

    Raises:
        Problems: as `group_of_weights`.
    """
    for weight, group in grouped(module, group_of_weights(config)):
        if group.frozen:
            weight.requires_grad_(False)
    # Megatron-Core's product with a frozen matrix has no gradient for the bias.
    for linear in module.modules() if config.optimizer.groups else ():
        if isinstance(linear, Adaptable) and linear.is_frozen:
            linear.freeze_matrix()


def learning_rate(config: RunConfig, step: int) -> float:
    """Learning rate of update `step`, counted from 1; the last update gets `min_lr`."""
    warmup, horizon = config.scheduler.lr_warmup_iters, config.decay_iters
    peak, floor = config.optimizer.lr, config.optimizer.min_lr
    if step <= warmup:
        return peak * step / warmup
    done = min((step - warmup) / (horizon - warmup), 1.0)
    match config.scheduler.lr_decay_style:
        case Decay.CONSTANT:
            return peak
        case Decay.LINEAR:
            return peak + done * (floor - peak)
        case Decay.COSINE:
            return floor + (peak - floor) * (1 + math.cos(math.pi * done)) / 2


def set_learning_rate(optimizer: MegatronOptimizer, rate: float, *, weight_decay: float) -> None:
    """Sets the learning rate and weight decay of every parameter group, by its factors."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_mult", 1.0)
        group["weight_decay"] = weight_decay * group.get("wd_mult", 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """The outcome of an optimizer step."""

    grad_norm: float  # of the whole gradient, before clipping
    skipped: bool  # loss or norm was not finite, so nothing was changed


@torch.no_grad()
def squared_norm(optimizer: MegatronOptimizer) -> Tensor:
    """The squared norm [1] of the whole gradient, float32, the same on every rank.

    It prepares the gradients for the update. Nobody waits for the device, as Megatron-Core's
    `get_grad_norm_fp32` does, whose operations these are.
    """
    optimizer.prepare_grads()
    gradients = [
        grad
        for inner in chained_optimizers(optimizer)
        for grad in inner.get_main_grads_for_grad_norm()
    ]
    total = torch.zeros(1, device=device())
    if gradients:
        overflow = torch.zeros(1, dtype=torch.int, device=device())
        norm, _ = clip_grads.multi_tensor_applier(
            clip_grads.l2_norm_impl, overflow, [gradients], False
        )
        total = norm**2.0
    dist.all_reduce(total, group=optimizer.get_grad_stats_parallel_group())
    return total


def clip_and_step(
    optimizer: MegatronOptimizer,
    *,
    clip_grad: float,
    loss: float = 0.0,
    grad_norm: float | None = None,
) -> Update:
    """Clips and applies the gradients, unless their norm or the loss is NaN or infinite.

    `loss` is that of the global batch, so that all ranks decide alike; `grad_norm` is the root of
    `squared_norm`, which is taken here if it was not before.
    """
    norm = grad_norm if grad_norm is not None else squared_norm(optimizer).item() ** 0.5
    if not (math.isfinite(loss) and math.isfinite(norm)):
        return Update(grad_norm=norm, skipped=True)
    if clip_grad > 0:
        for inner in chained_optimizers(optimizer):
            clip_grads.clip_grad_by_total_norm_fp32(
                inner.get_parameters(), max_norm=clip_grad, total_norm=norm
            )
    for inner in chained_optimizers(optimizer):
        if inner.config.use_precision_aware_optimizer:
            only_decay_unmoved(inner)
    optimizer.step_with_ready_grads()
    return Update(grad_norm=norm, skipped=False)


class GroupStepAdam(torch.optim.Optimizer):
    """AdamW (arXiv:1711.05101) that keeps its step count in the param group, not in each parameter.

    Megatron-Core's distributed checkpoints expect this layout, which is that of FusedAdam in
    Transformer Engine and Apex. With torch's AdamW the count would be lost on resume.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **_fused_only: Any,
    ):
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "step": 0}
        super().__init__(params, options)
        self.on_host = False

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # Megatron-Core hands over no closure
        for group in self.param_groups:
            group["step"] += 1
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if not self.state[p]:
                    self.state[p] = {name: torch.zeros_like(p) for name in MOMENTS}
            if self.on_host:
                self._step_from_host(group, params)
            elif params:
                _adamw(group, params, [[self.state[p][name] for p in params] for name in MOMENTS])

    def keep_on_host(self) -> None:
        """Keeps the moments in host memory from now on, except while their parameter is updated."""
        self.on_host = True
        for p, state in self.state.items():
            state |= {name: _on_host(state[name], p) for name in MOMENTS if name in state}

    def _step_from_host(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Updates one parameter at a time: its moments are copied to its device and back."""
        for p in params:
            moments = [
                _on_host(self.state[p][name], p) for name in MOMENTS
            ]  # a load of a checkpoint puts them on the device
            here = [moment.to(p.device, non_blocking=True) for moment in moments]
            _adamw(group, [p], [[moment] for moment in here])
            for name, home, updated in zip(MOMENTS, moments, here, strict=True):
                self.state[p][name] = home.copy_(updated, non_blocking=True)
        if params and params[0].is_cuda:
            torch.cuda.current_stream().synchronize()  # a checkpoint may read the moments now


def _on_host(moment: Tensor, p: Tensor) -> Tensor:
    if moment.device.type == "cpu":
        return moment
    empty = _ROWS.empty if p.is_cuda else torch.empty
    return empty(moment.shape, dtype=moment.dtype).copy_(moment)


def _adamw(group: dict[str, Any], params: list[Tensor], moments: list[list[Tensor]]) -> None:
    (beta1, beta2), step, where = group["betas"], group["step"], params[0].device
    means, mean_squares = moments
    fused = where.type == "cuda"  # one kernel reads and writes each value once
    adamw(
        params,
        [p.grad for p in params if p.grad is not None],
        means,
        mean_squares,
        [],
        [*torch.full((len(params),), step - 1.0, device=where)],
        fused=fused,
        foreach=not fused,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def install_adam(*, always: bool = False) -> None:
    """Makes Megatron-Core use `GroupStepAdam` where it would fall back to torch's AdamW.

    `always` also replaces the FusedAdam of Transformer Engine or Apex.
    """
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distributed

    if not (optimizer.USING_PYTORCH_OPTIMIZER or always):
        return
    for module in (optimizer, distributed):
        module.Adam = GroupStepAdam  # type: ignore[attr-defined]
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distributed.HAVE_APEX_OR_TE = True
    distributed.USING_APEX_OPTIMIZER = True
