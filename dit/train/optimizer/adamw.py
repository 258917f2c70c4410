"""AdamW without Transformer Engine, or with moments in host memory."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from dit.config.training import MOMENTS
from dit.models.stacks.offload import Arrival, PinnedRows, PlainCopies, copies_of

_ROWS = PinnedRows()


class GroupStepAdam(torch.optim.Optimizer):
    """AdamW (arXiv:1711.05101) with one step count per param group, not per parameter.

    Megatron-Core's distributed checkpoints expect the step count in the param group, as in
    FusedAdam of Transformer Engine and Apex. With torch's AdamW it would be lost on resume.
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
        """Keeps moments in host memory, except while their parameter is updated."""
        self.on_host = True
        for p, state in self.state.items():
            state |= {name: _on_host(state[name], p) for name in MOMENTS if name in state}

    def _step_from_host(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Updates `params` one at a time: the moments of each are copied to its device and back.

        During each update the next parameter's moments are copied in, and the previous one's out.
        """
        if not params:
            return
        copies, leaving = copies_of(params[0].device), list[Arrival]()
        coming = self._fetched(params[0], copies)
        for p, following in zip_longest(params, params[1:]):
            here = coming
            coming = [] if following is None else self._fetched(following, copies)
            for _, arrival in here:
                copies.wait(arrival)
            _adamw(group, [p], [[moment] for moment, _ in here])
            for left in leaving:
                copies.wait(left)
            homes = (self.state[p][name] for name in MOMENTS)
            leaving = [
                copies.to_host(moment, home)[1]
                for (moment, _), home in zip(here, homes, strict=True)
            ]
        for left in leaving:
            copies.wait(left)
        if params[0].is_cuda:
            torch.cuda.current_stream().synchronize()  # a checkpoint may read the moments now

    def _fetched(self, p: Tensor, copies: PlainCopies) -> list[tuple[Tensor, Arrival]]:
        """Starts to copy the moments of `p` to its device; returns (copy, its arrival) for each."""
        # Loading a checkpoint leaves moments on the device.
        self.state[p] |= {name: _on_host(self.state[p][name], p) for name in MOMENTS}
        homes = (self.state[p][name] for name in MOMENTS)
        return [copies.to_device(home, p.device, after=None) for home in homes]


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
        # The count before this step: torch adds 1 to it.
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
