"""Flow-DPO of a pack against a plain loop over samples with peft and Diffusers' network."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from peft import PeftModel

from dit.batch import Pairs
from dit.config import Preference
from tests.contract.test_lora import (
    a_step_of,
    config_of,
    made,  # noqa: F401  # a fixture
    network_of,
    sample_errors,
)
from tests.quick import few_quick


@pytest.mark.parametrize("made", few_quick(["wan", "flux"], 1), indirect=True)
def test_preferences_are_those_of_a_loop_over_peft(
    made,  # noqa: F811  # a fixture
    groups,
    monkeypatch,
) -> None:
    """Flow-DPO of samples one by one, the reference with peft's adapters disabled."""
    case, folder, _ = made
    config = config_of(case, folder)
    beta = 4.0  # with which no sigmoid is near its ends
    objective = replace(config.objective, preference=Preference.DPO, dpo_beta=beta)
    config = replace(config, objective=objective)
    values, seen = a_step_of(config, monkeypatch)
    model = PeftModel.from_pretrained(network_of(case), str(folder / "peft"), is_trainable=True)
    losses = []
    for batch, problem in seen:
        with torch.no_grad(), model.disable_adapter():
            apart = [one.mean() for one in sample_errors(model, batch, problem, config)]
        ours = [one.mean() for one in sample_errors(model, batch, problem, config)]
        away = [one - other for one, other in zip(ours, apart, strict=True)]
        assert batch.method(Pairs) and len(away) % 2 == 0
        for preferred, rejected in zip(away[::2], away[1::2], strict=True):
            margin = -beta / 2 * (preferred - rejected)
            losses.append(-torch.nn.functional.logsigmoid(margin))
    wanted = torch.stack(losses).mean()
    assert values["loss"] == pytest.approx(wanted.item(), rel=1e-5)
    assert abs(wanted.item() - math.log(2)) > 0.01
    wanted.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt()
    assert values["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
