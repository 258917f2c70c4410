"""AdamW for Megatron-Core's optimizers where neither Transformer Engine nor Apex is installed."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.adamw import adamw


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

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # Megatron-Core hands over no closure
        for group in self.param_groups:
            group["step"] += 1
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if not self.state[p]:
                    self.state[p] = {k: torch.zeros_like(p) for k in ("exp_avg", "exp_avg_sq")}
            if params:
                self._update(group, params)

    def _update(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        (beta1, beta2), step = group["betas"], group["step"]
        where = params[0].device
        fused = where.type == "cuda"  # one kernel reads and writes each number once
        adamw(
            params,
            [p.grad for p in params if p.grad is not None],
            [self.state[p]["exp_avg"] for p in params],
            [self.state[p]["exp_avg_sq"] for p in params],
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


def install_adam() -> None:
    """Hands `GroupStepAdam` to Megatron-Core where it would fall back to torch's AdamW."""
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distributed

    if not optimizer.USING_PYTORCH_OPTIMIZER:
        return
    for module in (optimizer, distributed):
        module.Adam = GroupStepAdam  # type: ignore[attr-defined]
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distributed.HAVE_APEX_OR_TE = True
    distributed.USING_APEX_OPTIMIZER = True
