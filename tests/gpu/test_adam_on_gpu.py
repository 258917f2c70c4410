"""The fused update of a GPU against torch's own AdamW."""

from __future__ import annotations

import pytest
import torch

from dit.train.optimizer.adamw import GroupStepAdam

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("on_host", [False, True], ids=["on the GPU", "on the host"])
def test_fused_updates_are_those_of_adamw(on_host):
    generator = torch.Generator("cuda").manual_seed(0)

    def values():
        return torch.randn(3, 1000, 17, generator=generator, device="cuda").unbind()

    start = values()
    ours, theirs = ([torch.nn.Parameter(p.clone()) for p in start] for _ in range(2))
    options = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizers = GroupStepAdam(ours, **options), torch.optim.AdamW(theirs, **options, foreach=False)
    if on_host:
        optimizers[0].keep_on_host()
    for _ in range(5):
        for mine, other, gradient in zip(ours, theirs, values(), strict=True):
            mine.grad, other.grad = gradient.clone(), gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)
    moments = [moment for p in ours for moment in optimizers[0].state[p].values()]
    assert all(moment.is_cpu and moment.is_pinned() for moment in moments) == on_host
