"""AdamW for Megatron-Core's optimizers where neither Transformer Engine nor Apex is installed."""

# T packed tokens, N samples, C patch features

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
)
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor
from torch.optim.adamw import adamw

from dit.config import Decay, Precision, RunConfig

_MOMENTS = ("exp_avg", "exp_avg_sq")


class GroupStepAdam(torch.optim.Optimizer):
    """AdamW (arXiv:1711.05101) whose `step` lives in the param group, not in each parameter.

    Megatron-Core's distributed checkpoints expect the layout of Transformer Engine's and Apex's
    FusedAdam; with torch's own the step is lost on resume and the next update differs.
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
                    self.state[p] = {name: torch.zeros_like(p) for name in _MOMENTS}
            if self.on_host:
                self._visit(group, params)
            elif params:
                _update(group, params, [[self.state[p][name] for p in params] for name in _MOMENTS])

    def keep_on_host(self) -> None:
        """From now on the moments lie in the host's memory, but for the parameter in work."""
        self.on_host = True
        for p, state in self.state.items():
            state |= {name: _hosted(state[name], p) for name in _MOMENTS if name in state}

    def _visit(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Updates one parameter after the other, whose moments come to its device and go back."""
        for p in params:
            moments = [_hosted(self.state[p][name], p) for name in _MOMENTS]  # a load moves them
            here = [moment.to(p.device, non_blocking=True) for moment in moments]
            _update(group, [p], [[moment] for moment in here])
            for name, home, updated in zip(_MOMENTS, moments, here, strict=True):
                self.state[p][name] = home.copy_(updated, non_blocking=True)
        if params and params[0].is_cuda:
            torch.cuda.current_stream().synchronize()  # a checkpoint may read them at once


def _hosted(moment: Tensor, p: Tensor) -> Tensor:
    if moment.device.type == "cpu":
        return moment
    home = torch.empty_like(moment, device="cpu", pin_memory=p.is_cuda)
    return home.copy_(moment)


def _update(group: dict[str, Any], params: list[Tensor], moments: list[list[Tensor]]) -> None:
    (beta1, beta2), step, where = group["betas"], group["step"], params[0].device
    means, mean_squares = moments
    fused = where.type == "cuda"  # one kernel reads and writes each number once
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
    """Hands `GroupStepAdam` to Megatron-Core where it would fall back to torch's AdamW.

    `always` does so where Transformer Engine's or Apex's is installed, too.
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


_SCHEDULE = ("max_lr", "min_lr", "start_wd", "end_wd")


def build_optimizer(config: RunConfig, chunks: list[DistributedDataParallel]) -> MegatronOptimizer:
    """AdamW, sharded over data-parallel ranks where configured, with float32 master weights."""
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
    )
    overrides = get_standard_config_overrides(options)  # no decay on norms and biases
    spared: Any = {"wd_mult": 0.0}
    overrides[ParamKey(name="*pos_emb_*")] = spared  # nor on embeddings
    install_adam(always=c.optimizer_cpu_offload)
    optimizer = get_megatron_optimizer(
        options, [*chunks], config_overrides=overrides, use_gloo_process_groups=False
    )
    for group in optimizer.param_groups:
        # `set_learning_rate` hands these out. From 0.17 on Megatron-Core tells groups apart by
        # them, so a checkpoint would not open with another learning rate.
        group |= {name: None for name in _SCHEDULE if name in group}
    for inner in optimizer.chained_optimizers:  # type: ignore[attr-defined]
        # Else a checkpoint before the first update has no moments and cannot be written.
        inner.init_state_fn(inner.optimizer, inner.config)
        if c.optimizer_cpu_offload:
            inner.optimizer.keep_on_host()
    return optimizer


def learning_rate(config: RunConfig, step: int) -> float:
    """Learning rate of optimizer step `step`, counted from 1; the last one gets `min_lr`."""
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
    """Hands this step's rate to every parameter group, and its share of the weight decay."""
    for group in optimizer.param_groups:
        group["lr"] = rate
        group["weight_decay"] = weight_decay * group.get("wd_mult", 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """What an optimizer step did."""

    grad_norm: float  # of the whole gradient, before clipping
    skipped: bool  # loss or norm was not finite, so nothing was changed


def update(optimizer: MegatronOptimizer, *, clip_grad: float, loss: float = 0.0) -> Update:
    """Clips and applies the gradients, unless their norm or the loss is NaN or infinite.

    `loss` is that of the global batch: all ranks have to decide alike.
    """
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())  # the same on every rank
    if not (math.isfinite(loss) and math.isfinite(norm)):
        return Update(grad_norm=norm, skipped=True)
    if clip_grad > 0:
        for inner in optimizer.chained_optimizers:  # type: ignore[attr-defined]
            clip_grad_by_total_norm_fp32(
                inner.get_parameters(), max_norm=clip_grad, total_norm=norm
            )
    optimizer.step_with_ready_grads()
    return Update(grad_norm=norm, skipped=False)
