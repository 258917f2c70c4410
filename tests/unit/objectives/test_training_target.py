"""The regression problems against the papers' formulas and against closed forms."""

from dataclasses import replace

import pytest
import torch

from dit.batch import Problem
from dit.config import (
    EdmConfig,
    FlowConfig,
    FlowPrediction,
    LossKind,
    ObjectiveConfig,
    ObjectiveName,
    Weighting,
)
from dit.objectives.edm import Edm
from dit.objectives.flow_matching import FlowMatching
from dit.objectives.objective import per_token
from dit.objectives.registry import training_objective
from dit.objectives.training_target import draw_problem
from dit.train.loss import loss_of

EDM = ObjectiveConfig(sigma_data=0.5)
FLOW = ObjectiveConfig(name=ObjectiveName.FLOW)
MU, STD = 0.6, 0.8  # Gaussian data in latent units


def tensors_of(problem: Problem) -> list[torch.Tensor]:
    every = (getattr(problem, name) for name in Problem.__dataclass_fields__)
    return [one for one in every if isinstance(one, torch.Tensor)]


def naive_edm(latent, noise, sigma, sigma_data):
    """Table 1 of arXiv:2206.00364, column "Ours", taken literally, in float64."""
    variance = sigma**2 + sigma_data**2
    skip, out = sigma_data**2 / variance, sigma * sigma_data / variance**0.5
    weight = variance / (sigma * sigma_data) ** 2
    data = sigma_data * latent
    state = data + sigma * noise
    return state / variance**0.5, (data - skip * state) / out, weight * out**2


def edm_optimal(input_TC, sigma, *, sigma_data=0.5, mu=MU, std=STD):
    """Raw network output of the best denoiser for data N(sigma_data mu, (sigma_data std)²)."""
    variance = sigma**2 + sigma_data**2
    mean, spread = sigma_data * mu, (sigma_data * std) ** 2
    state = input_TC * variance**0.5
    denoised = mean + spread / (spread + sigma**2) * (state - mean)
    skip, out = sigma_data**2 / variance, sigma * sigma_data / variance**0.5
    return (denoised - skip * state) / out


def flow_optimal(state_TC, t, *, mu=MU, std=STD):
    """E[noise - latent | state] for latents N(mu, std²)."""
    variance = (1 - t) ** 2 * std**2 + t**2
    centred = state_TC - (1 - t) * mu
    return (t - (1 - t) * std**2) / variance * centred - mu


@pytest.mark.parametrize("sigma_data", [0.5, 1.0])
def test_edm_is_the_papers_table_in_float64(make_pack, sigma_data: float) -> None:
    sigma_N = torch.tensor([0.0002, 0.002, 0.05, 0.5, 1.0, 80.0])
    batch = make_pack(grids=[(1, 2, 3)] * 6)
    noise_TC = torch.randn(batch.latent_TC.shape)
    objective = Edm(EdmConfig(sigma_data=sigma_data))
    problem = objective.problem_at(batch, sigma_N, noise_TC)
    input_TC, target_TC, weight_T1 = naive_edm(
        batch.latent_TC.double(), noise_TC.double(), per_token(sigma_N, batch).double(), sigma_data
    )
    real = batch.is_real_T
    close = {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(problem.input_TC[real].double(), input_TC[real], **close)
    torch.testing.assert_close(problem.target_TC[real].double(), target_TC[real], **close)
    torch.testing.assert_close(per_token(problem.weight_N, batch).double(), weight_T1, **close)
    torch.testing.assert_close(problem.level_M.double(), sigma_N.double().log() / 4, **close)


def test_float32_literal_table_loses_digits_where_ours_does_not(make_pack) -> None:
    batch = make_pack(multiple=1)
    sigma_N, noise_TC = torch.full((3,), 0.0002), torch.randn(batch.latent_TC.shape)
    exact = naive_edm(batch.latent_TC.double(), noise_TC.double(), sigma_N[0].double(), 0.5)[1]
    literal = naive_edm(batch.latent_TC, noise_TC, sigma_N[0], 0.5)[1]
    ours = Edm(EDM).problem_at(batch, sigma_N, noise_TC).target_TC
    assert (ours - exact).abs().max() < 1e-6
    assert (literal - exact).abs().max() > 1e-5


def test_flow_is_the_straight_path(make_pack) -> None:
    batch = make_pack(grids=[(1, 2, 3)] * 4)
    t_N = torch.tensor([1e-5, 0.3, 0.9, 1.0])
    noise_TC = torch.randn(batch.latent_TC.shape)
    problem = FlowMatching(FlowConfig(timestep_scale=500.0)).problem_at(batch, t_N, noise_TC)
    t_T1, real = per_token(t_N, batch).double(), batch.is_real_T
    expected = (1 - t_T1) * batch.latent_TC.double() + t_T1 * noise_TC.double()
    torch.testing.assert_close(problem.input_TC[real].double(), expected[real], rtol=0, atol=1e-6)
    assert torch.equal(problem.target_TC[real], (noise_TC - batch.latent_TC)[real])
    torch.testing.assert_close(problem.level_M, 500 * t_N)
    assert torch.equal(problem.weight_N, torch.ones(4))


@pytest.mark.parametrize("kind", list(LossKind))
def test_a_predicted_latent_has_the_loss_of_its_velocity(make_pack, kind: LossKind) -> None:
    """Where t is above 0.05; below, an error of the latent counts as at 0.05."""
    batch, options = make_pack(grids=[(1, 2, 3)] * 5), replace(FLOW, flow_shift=3.0)
    t_N = torch.tensor([1e-3, 0.02, 0.05, 0.4, 1.0])
    noise_TC, said_TC = torch.randn(2, *batch.latent_TC.shape)
    for weighting in Weighting:
        config = replace(options, weighting=weighting, loss=kind)
        of_velocity = FlowMatching(config).problem_at(batch, t_N, noise_TC)
        config = replace(config, prediction=FlowPrediction.X)
        of_latent = FlowMatching(config).problem_at(batch, t_N, noise_TC)
        assert torch.equal(of_latent.input_TC, of_velocity.input_TC)
        t_T1 = per_token(t_N, batch).double()
        velocity_TC = (of_latent.input_TC - said_TC.double()) / t_T1
        losses = [
            loss_of(batch, problem, raw_TC, config).error_T.double()
            for problem, raw_TC in ((of_latent, said_TC), (of_velocity, velocity_TC))
        ]
        ratio_T = t_T1[:, 0] / t_T1[:, 0].clamp(min=0.05)
        expected_T = losses[1] * ratio_T.square()
        # Of a square; other errors below 0.05 are no multiple of those of the velocity.
        known_T = ratio_T == 1 if kind is LossKind.HUBER else torch.ones_like(ratio_T).bool()
        torch.testing.assert_close(losses[0][known_T], expected_T[known_T], rtol=2e-4, atol=1e-6)


def test_flow_linear_weight(make_pack) -> None:
    config = replace(FLOW, weighting=Weighting.LINEAR, flow_shift=3.0)
    t_N = torch.tensor([0.0, 0.5, 1.0])
    batch = make_pack()
    problem = training_objective(config).problem_at(batch, t_N, torch.randn(batch.latent_TC.shape))
    assert problem.weight_N.tolist() == [1.0, 2.5, 4.0]


@pytest.mark.parametrize("objective", [Edm(EDM), FlowMatching(FLOW)], ids=["edm", "flow"])
def test_network_output_is_read_back_as_latent_and_slope(make_pack, objective) -> None:
    """With the target as output, `predict` returns the latent and d state / d level."""
    batch = make_pack(multiple=1)
    noise_TC = torch.randn(batch.latent_TC.shape).double()
    noise_N = torch.tensor([0.01, 0.4, 0.99]) * (80 if isinstance(objective, Edm) else 1)
    problem = objective.problem_at(batch, noise_N, noise_TC)
    noise_T1 = per_token(noise_N.double(), batch)
    if isinstance(objective, Edm):
        state_TC = 0.5 * batch.latent_TC.double() + noise_T1 * noise_TC
        slope_TC = noise_TC
    else:
        state_TC = (1 - noise_T1) * batch.latent_TC.double() + noise_T1 * noise_TC
        slope_TC = noise_TC - batch.latent_TC
    input_TC = objective.network_input(state_TC, noise_T1)
    close = {"rtol": 1e-5, "atol": 1e-5, "check_dtype": False}
    torch.testing.assert_close(input_TC, problem.input_TC, **close)
    torch.testing.assert_close(objective.network_level(noise_N), problem.level_M)
    found = objective.predict(state_TC, problem.target_TC.double(), noise_T1)
    torch.testing.assert_close(found.latent_TC, batch.latent_TC, **close)
    torch.testing.assert_close(found.velocity_TC, slope_TC, **close)


def test_edm_prediction_is_the_papers_denoiser() -> None:
    sigma = torch.tensor([[0.0002], [0.3], [80.0]], dtype=torch.float64)
    state_TC, raw_TC = torch.randn(2, 3, 4, dtype=torch.float64)
    variance = sigma**2 + 0.25
    denoised = 0.25 / variance * state_TC + sigma * 0.5 / variance**0.5 * raw_TC
    found = Edm(EDM).predict(state_TC, raw_TC, sigma)
    torch.testing.assert_close(0.5 * found.latent_TC, denoised)
    torch.testing.assert_close(
        found.velocity_TC, (state_TC - denoised) / sigma, rtol=1e-7, atol=1e-7
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("objective", [Edm(EDM), FlowMatching(FLOW)], ids=["edm", "flow"])
def test_everything_is_float32_for_any_latent(make_pack, objective, dtype) -> None:
    batch = make_pack()
    batch = replace(batch, latent_TC=batch.latent_TC.to(dtype))
    noise_N = torch.tensor([0.1001, 0.1002, 0.1003])  # one number in bfloat16
    problem = objective.problem_at(batch, noise_N, torch.randn(batch.latent_TC.shape))
    assert {tensor.dtype for tensor in tensors_of(problem)} == {torch.float32}
    assert len(set(problem.level_M.tolist())) == 3
    assert torch.equal(problem.noise_N, noise_N)


@pytest.mark.parametrize(
    ("objective", "levels"),
    [(Edm(EDM), (0.0002, 80.0, 1.0)), (FlowMatching(FLOW), (1e-5, 1.0, 0.5))],
    ids=["edm", "flow"],
)
def test_extreme_levels_in_one_pack(make_pack, objective, levels) -> None:
    batch = make_pack()
    problem = objective.problem_at(batch, torch.tensor(levels), torch.randn(batch.latent_TC.shape))
    assert all(tensor.isfinite().all() for tensor in tensors_of(problem))
    assert problem.input_TC.abs().max() < 10 and problem.target_TC.abs().max() < 10


@pytest.mark.parametrize("objective", [Edm(EDM), FlowMatching(FLOW)], ids=["edm", "flow"])
def test_a_sample_is_the_same_alone_and_in_a_pack(make_pack, objective) -> None:
    batch = make_pack()
    noise_TC, noise_N = torch.randn(batch.latent_TC.shape), torch.tensor([0.002, 0.9, 0.3])
    whole = objective.problem_at(batch, noise_N, noise_TC)
    for i, (a, b) in enumerate(zip(batch.starts[:-1], batch.starts[1:], strict=True)):
        alone = replace(
            batch,
            latent_TC=batch.latent_TC[a:b],
            is_real_T=batch.is_real_T[a:b],
            segment_T=torch.zeros(b - a, dtype=torch.int64),
            grids=batch.grids[i : i + 1],
        )
        problem = objective.problem_at(alone, noise_N[i : i + 1], noise_TC[a:b])
        assert torch.equal(problem.input_TC, whole.input_TC[a:b])
        assert torch.equal(problem.target_TC, whole.target_TC[a:b])
        assert torch.equal(problem.level_M, whole.level_M[i : i + 1])


def gaussian_pack(make_pack, mu: float, std: float, tokens: int = 100_000):
    return make_pack(
        [(1, tokens // 100, 100)],
        latents=lambda n, c, rng: mu + std * torch.randn(n, c, generator=rng),
    )


@pytest.mark.parametrize("sigma", [0.0002, 0.1, 0.5, 3.0, 80.0])
def test_edm_input_and_target_have_unit_variance_for_whitened_data(make_pack, sigma) -> None:
    """The requirements that the paper's appendix B.6 derives the preconditioning from."""
    batch = gaussian_pack(make_pack, 0.0, 1.0)
    noise_TC = torch.randn(batch.latent_TC.shape, generator=torch.Generator().manual_seed(1))
    problem = Edm(EDM).problem_at(batch, torch.tensor([sigma]), noise_TC)
    tolerance = 5 * (2 / batch.latent_TC.numel()) ** 0.5
    assert abs(problem.input_TC.square().mean() - 1) < tolerance
    loss_of_silence = problem.weight_N * problem.target_TC.square().mean()  # F = 0
    assert abs(loss_of_silence - 1) < tolerance


@pytest.mark.parametrize(
    ("objective", "optimal", "levels"),
    [
        (Edm(EDM), edm_optimal, (0.02, 0.5, 5.0)),
        (FlowMatching(FLOW), flow_optimal, (0.05, 0.5, 0.95)),
    ],
    ids=["edm", "flow"],
)
def test_least_squares_finds_the_closed_form(make_pack, objective, optimal, levels) -> None:
    """For Gaussian data the best network is affine in its input: fit it, at each level."""
    batch = gaussian_pack(make_pack, MU, STD)
    rng = torch.Generator().manual_seed(2)
    for level in levels:
        noise_TC = torch.randn(batch.latent_TC.shape, generator=rng)
        problem = objective.problem_at(batch, torch.tensor([level]), noise_TC)
        inputs, targets = problem.input_TC.flatten().double(), problem.target_TC.flatten().double()
        design = torch.stack([inputs, torch.ones_like(inputs)], dim=1)
        fitted = torch.linalg.lstsq(design, targets).solution
        at = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
        found = fitted[0] * at + fitted[1]
        torch.testing.assert_close(found, optimal(at, level), rtol=0, atol=0.02)


@pytest.mark.parametrize(
    ("config", "optimal"), [(EDM, edm_optimal), (FLOW, flow_optimal)], ids=["edm", "flow"]
)
def test_closed_form_minimises_the_drawn_loss(make_pack, config, optimal) -> None:
    """Over drawn levels: no change of the closed form, in any direction tried, lowers the loss."""
    batch = make_pack(
        [(1, 10, 10)] * 2000,
        latents=lambda n, c, rng: MU + STD * torch.randn(n, c, generator=rng),
    )
    levels, noise = (torch.Generator().manual_seed(seed) for seed in (4, 5))
    problem = draw_problem(training_objective(config), batch, levels_rng=levels, noise_rng=noise)
    best_TC = optimal(problem.input_TC, per_token(problem.noise_N, batch))
    residual_TC = (best_TC - problem.target_TC) * per_token(problem.weight_N, batch)
    level_T1, x_TC = per_token(problem.level_M, batch), problem.input_TC
    directions = [torch.ones_like(x_TC), x_TC, x_TC**2, x_TC**3, x_TC * level_T1.sign(), best_TC]
    for direction in directions:
        slope_TC = residual_TC * direction
        error = slope_TC.std() / slope_TC.numel() ** 0.5
        assert slope_TC.mean().abs() < 5 * error
    best, shrunk, silent = (
        (factor * best_TC - problem.target_TC).square().mean() for factor in (1, 0.9, 0)
    )
    assert best < shrunk < silent
