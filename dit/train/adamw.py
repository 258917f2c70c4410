"""AdamW for Megatron-Core's optimizers where neither Transformer Engine nor Apex is installed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

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
