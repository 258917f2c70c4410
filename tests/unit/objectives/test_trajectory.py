"""Packs on their way from noise to latents, with tokens that have no noise."""

from __future__ import annotations

import torch

from dit.batch import CleanTokens
from dit.config import ObjectiveConfig, Sampler
from dit.objectives.noise import draw_noise
from dit.objectives.objective import per_token
from dit.objectives.pack_draws import with_clean_tokens
from dit.objectives.registry import sampling_path, training_objective
from dit.objectives.training_target import problem_of_velocity
from dit.objectives.trajectory import NoisyPack, levels_of_steps, mean_velocity
from dit.sampling.ode_solvers import sample
from tests.packs import random_pack, tiny_model

FLOW = ObjectiveConfig(name="flow", flow_shift=2.0)
GRIDS, TEXTS = [(3, 4, 4), (1, 3, 5), (2, 2, 2)], [5, 2, 3]
LEVEL_N = torch.tensor([0.9, 0.5, 0.25], dtype=torch.float64)


def a_pack():
    return random_pack(GRIDS, TEXTS, model=tiny_model())


def test_clean_tokens_keep_their_latents_and_have_no_target() -> None:
    """They are told the clean level, and a sample's target is that of its velocity."""
    given = CleanTokens(level=0.0, counts=(0, 0, 0))
    batch = with_clean_tokens(a_pack().with_method(given), [16, 0, 4])
    generator = torch.Generator().manual_seed(0)
    shape, told = batch.latent_TC.shape, {"generator": generator, "dtype": torch.float64}
    state_TC, velocity_TC = (torch.randn(shape, **told) for _ in range(2))
    path, objective = sampling_path(FLOW), training_objective(FLOW)
    asked = NoisyPack(batch=batch, state_TC=state_TC, level_N=LEVEL_N).asked(path)
    problem = problem_of_velocity(
        objective, batch, LEVEL_N, state_TC=state_TC, velocity_TC=velocity_TC
    )
    noisy, clean = batch.is_target_T, batch.is_real_T & ~batch.is_target_T
    assert clean.sum() == 20
    for one in (asked, problem):
        assert torch.equal(one.input_TC[clean], batch.latent_TC[clean].float())
        torch.testing.assert_close(one.input_TC[noisy], state_TC[noisy].float())
        assert one.level_M.tolist() == [900, 500, 250, 0, 0, 0]
        assert not one.input_TC[~batch.is_real_T].any()
    torch.testing.assert_close(problem.target_TC[noisy], velocity_TC[noisy].float())
    assert not problem.target_TC[~noisy].any()


def test_steps_of_each_sample_are_those_of_the_euler_sampler() -> None:
    batch, path = a_pack(), sampling_path(FLOW)
    noise_TC = draw_noise(batch, torch.Generator().manual_seed(1))

    def network(input_TC: torch.Tensor, level_N: torch.Tensor) -> torch.Tensor:
        return torch.tanh(2 * input_TC) + per_token(level_N, batch) / 500

    made_TC = sample(path, network, noise_TC, batch, num_steps=3, sampler=Sampler.EULER)
    level_SN = path.schedule(batch.latent_tokens, num_steps=3)
    noisy = NoisyPack(batch=batch, state_TC=noise_TC.double(), level_N=level_SN[0])
    starts = noisy
    for end_N in level_SN[1:]:
        asked = noisy.asked(path)
        noisy = noisy.moved(path, network(asked.input_TC, asked.level_M), end_N)
    assert torch.equal(torch.where(batch.is_real_T[:, None], noisy.state_TC.float(), 0), made_TC)
    torch.testing.assert_close(starts.state_TC - mean_velocity(starts, noisy), noisy.state_TC)
    # A sample stays where its step ends at the level at which it begins.
    stays = starts.moved(path, torch.ones_like(noise_TC), level_SN[[0, 1, 1]][:, 0])
    first = batch.segment_T == 0
    assert torch.equal(stays.state_TC[first], starts.state_TC[first])
    assert not torch.equal(stays.state_TC, starts.state_TC)
    drawn_N = torch.tensor([0, 2, 1])
    assert levels_of_steps(level_SN, drawn_N).tolist() == [
        level_SN[n, i] for i, n in enumerate(drawn_N)
    ]
