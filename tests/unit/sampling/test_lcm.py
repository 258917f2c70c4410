"""Steps of LCM: the loop of Diffusers' scheduler, and noise of a sample's own seed."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from diffusers.schedulers import scheduling_flow_match_lcm

from dit.config import ObjectiveConfig, Sampler, SamplingLevels
from dit.objectives.registry import sampling_path
from dit.sampling.conditions.tokens import step_noise
from dit.sampling.ode_solvers import initial_noise, sample

LCM = ObjectiveConfig(name="flow", flow_shift=6.0, sampling_levels=SamplingLevels.LCM)


@pytest.mark.parametrize("num_steps", [1, 4])
def test_a_loop_is_that_of_diffusers(make_pack, num_steps: int) -> None:
    batch, seeds = make_pack([(1, 4, 4), (1, 4, 4)]), (5, 6)
    noise_TC, drawn = initial_noise(batch, seeds), partial(step_noise, batch, seeds)
    network = lambda x_TC, level_N: torch.sin(x_TC + level_N[0] / 1000)  # noqa: E731
    options: Any = {"num_steps": num_steps, "sampler": Sampler.LCM, "step_noise": drawn}
    ours_TC = sample(sampling_path(LCM), network, noise_TC, batch, **options)
    scheduler: Any = scheduling_flow_match_lcm.FlowMatchLCMScheduler(shift=6.0)
    made_TC: Any = noise_TC
    scheduler.set_timesteps(num_steps)
    for i, level in enumerate(scheduler.timesteps):
        raw_TC = network(made_TC, level.expand(2))
        with patch.object(
            scheduling_flow_match_lcm, "randn_tensor", lambda *_, i=i, **__: drawn(i)
        ):
            made_TC = scheduler.step(raw_TC, level, made_TC).prev_sample
    torch.testing.assert_close(ours_TC, made_TC, rtol=1e-5, atol=1e-5)


def test_noise_of_a_step_follows_from_the_own_seed(make_pack) -> None:
    """Whatever neighbours a sample has; other steps, and the start, have other noise."""
    pack, alone = make_pack([(1, 3, 3), (1, 4, 4)]), make_pack([(1, 4, 4)])
    start = pack.starts[1]
    own_TC = step_noise(alone, [6], 2)
    assert torch.equal(step_noise(pack, [5, 6], 2)[start : start + 16], own_TC[:16])
    assert not step_noise(pack, [5, 6], 2)[~pack.is_real_T].any()
    for other_TC in (step_noise(alone, [6], 1), initial_noise(alone, [6])):
        assert not torch.equal(other_TC, own_TC)
