"""Samplers against the closed form for Gaussian data and against Diffusers' loops."""

import math
from dataclasses import replace

import pytest
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    EDMDPMSolverMultistepScheduler,
    EDMEulerScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    UniPCMultistepScheduler,
)

from dit.config import (
    FlowConfig,
    FlowPrediction,
    ObjectiveConfig,
    ObjectiveName,
    Sampler,
    SamplingLevels,
)
from dit.objectives.diffusers_schedulers import UnipcScheduler
from dit.objectives.flow_matching import FlowMatching
from dit.objectives.objective import per_token
from dit.objectives.registry import sampling_path
from dit.sampling.ode_solvers import Guidance, guided, guided_at_first, initial_noise, sample

EDM = ObjectiveConfig(sigma_data=0.5)
FLOW = ObjectiveConfig(name=ObjectiveName.FLOW)
FLOW_X = replace(FLOW, prediction=FlowPrediction.X)
STEPS = (16, 32, 64, 128)
MU, STD = 0.6, 0.8  # Gaussian latents


def edm_network(config, batch, mu=MU, std=STD):
    """The exact denoiser for latents N(mu, std²) as a raw network output."""
    sd = config.sigma_data
    mean, spread = sd * mu, (sd * std) ** 2

    def network(input_TC, level_N):
        sigma = per_token((4 * level_N.double()).exp(), batch)
        variance = sigma**2 + sd**2
        state = input_TC.double() * variance.sqrt()
        denoised = mean + spread / (spread + sigma**2) * (state - mean)
        return (denoised - sd**2 / variance * state) / (sigma * sd / variance.sqrt())

    return network


def flow_network(config, batch, mu=MU, std=STD):
    """E[noise - latent | state], or E[latent | state], for latents N(mu, std²)."""

    def network(input_TC, level_N):
        t = per_token(level_N.double() / config.timestep_scale, batch)
        variance = (1 - t) ** 2 * std**2 + t**2
        centred = input_TC.double() - (1 - t) * mu
        velocity = (t - (1 - t) * std**2) / variance * centred - mu
        says_latent = config.prediction is FlowPrediction.X
        return input_TC.double() - t * velocity if says_latent else velocity

    return network


def exact_end(config, noise_TC, last_T1):
    """Where exact integration down to the last positive level, then its Euler step to 0, ends.

    Along the ODE the standardised distance to the mean stays constant; Euler's step to 0 gives
    the posterior mean of the latent. So this leaves out what the list of levels, not the sampler,
    decides: how far its last positive level is from 0.
    """
    if config.name is ObjectiveName.FLOW:
        t = last_T1
        return MU + (1 - t) * STD**2 / torch.hypot((1 - t) * STD, t) * noise_TC
    sd, first = config.sigma_data, config.sigma_max
    mean, std = torch.tensor([[sd * MU]]).double(), torch.tensor([[sd * STD]]).double()
    standardised = (first * noise_TC - mean) / math.hypot(std, first)
    return (mean + std**2 / torch.hypot(std, last_T1) * standardised) / sd


def errors(config, sampler, make_pack) -> list[float]:
    """Largest error of the end against exact integration, for each number of steps."""
    batch, objective = make_pack(), sampling_path(config)
    noise_TC = initial_noise(batch, (1, 2, 3))
    network = {ObjectiveName.EDM: edm_network, ObjectiveName.FLOW: flow_network}[config.name]
    network = network(config, batch)
    found = []
    for n in STEPS:
        last_N = objective.schedule(batch.num_tokens, num_steps=n)[-2]
        exact_TC = exact_end(config, noise_TC.double(), per_token(last_N, batch))
        end_TC = sample(objective, network, noise_TC, batch, num_steps=n, sampler=sampler)
        found.append((end_TC - exact_TC)[batch.is_real_T].abs().max().item())
    return found


def orders(found: list[float]) -> list[float]:
    """Measured orders of convergence; n levels above zero are n - 1 even steps."""
    return [
        math.log(found[i] / found[i + 1]) / math.log((STEPS[i + 1] - 1) / (STEPS[i] - 1))
        for i in range(len(found) - 1)
    ]


@pytest.mark.parametrize(
    ("sampler", "order"),
    [(Sampler.EULER, 1), (Sampler.HEUN, 2), (Sampler.DPMPP, 2), (Sampler.UNIPC, 3)],
    ids=["euler", "heun", "dpm++", "unipc"],
)
@pytest.mark.parametrize(
    "config",
    [
        EDM,
        replace(EDM, sigma_data=1.0, rho=5.0, sigma_max=20.0),
        FLOW,
        replace(FLOW, flow_shift=3.0),
        replace(FLOW, shift_base_tokens=2),
        FLOW_X,
    ],
    ids=["edm", "edm-other", "flow", "flow-shift", "flow-token-shift", "flow-x"],
)
def test_order_of_convergence(config, sampler, order, make_pack, record_property) -> None:
    found = errors(config, sampler, make_pack)
    slopes = orders(found)
    record_property("errors", found)
    record_property("orders", slopes)
    if config.name is ObjectiveName.FLOW and sampler in (Sampler.DPMPP, Sampler.UNIPC):
        # From pure noise the first step is of first order: the rest makes up for it, slowly.
        assert slopes[-1] > 1.85, (found, slopes)
        return
    assert abs(slopes[-1] - order) < 0.15, (found, slopes)
    assert abs(slopes[-1] - order) < abs(slopes[0] - order) + 0.05, (found, slopes)


def random_network(batch, width: int = 4):
    """A smooth network with no structure, which tells levels apart."""
    rng = torch.Generator().manual_seed(9)
    first, second = torch.randn(2, width, width, generator=rng)
    calls = []

    def network(input_TC, level_N):
        calls.append((input_TC, level_N))
        level_T1 = per_token(level_N, batch)
        return torch.tanh(input_TC @ first + torch.sin(level_T1 / 100)) @ second

    return network, calls


@pytest.mark.parametrize("num_steps", [1, 6, 18, 35])
def test_edm_euler_is_diffusers_loop(make_pack, num_steps) -> None:
    batch = make_pack([(1, 4, 4), (1, 4, 4)])
    network, calls = random_network(batch)
    noise_TC = initial_noise(batch, (0, 1))
    ours = sample(
        sampling_path(EDM), network, noise_TC, batch, num_steps=num_steps, sampler=Sampler.EULER
    )
    scheduler = EDMEulerScheduler(sigma_min=0.002, sigma_max=80.0, sigma_data=0.5, rho=7.0)
    scheduler.set_timesteps(num_steps)
    # Both are float32, and states are 80 times the noise: rounding makes 1.5e-5 of the end.
    theirs_TC = 80.0 * noise_TC  # not init_noise_sigma, which adds the data's variance as 1
    inputs = [input_TC for input_TC, _ in calls]
    for i, level in enumerate(scheduler.timesteps):
        input_TC = scheduler.scale_model_input(theirs_TC, level)
        torch.testing.assert_close(inputs[i], input_TC, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(calls[i][1], level.expand(2), rtol=1e-6, atol=1e-6)
        raw_TC = network(input_TC, level.expand(2))
        theirs_TC = scheduler.step(raw_TC, level, theirs_TC).prev_sample
    assert len(inputs) == num_steps
    torch.testing.assert_close(ours, theirs_TC / 0.5, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("num_steps", [1, 2, 28])
@pytest.mark.parametrize(
    ("sampler", "theirs"),
    [
        (Sampler.EULER, FlowMatchEulerDiscreteScheduler),
        (Sampler.HEUN, FlowMatchHeunDiscreteScheduler),
    ],
    ids=["euler", "heun"],
)
def test_flow_is_diffusers_loop(make_pack, sampler, theirs, num_steps, shift) -> None:
    batch = make_pack([(1, 4, 4), (1, 4, 4)])
    network, calls = random_network(batch)
    noise_TC = initial_noise(batch, (0, 1))
    objective = sampling_path(replace(FLOW, flow_shift=shift))
    ours = sample(objective, network, noise_TC, batch, num_steps=num_steps, sampler=sampler)
    scheduler = theirs(shift=shift)
    scheduler.set_timesteps(num_steps)
    recorded, theirs_TC = list(calls), noise_TC
    # Their Heun divides a float32 difference of states by t = 0.001, which makes 8e-5.
    close = {"rtol": 1e-4, "atol": 1e-4 if sampler is Sampler.EULER else 1e-3}
    for i, level in enumerate(scheduler.timesteps):
        torch.testing.assert_close(recorded[i][0], theirs_TC, **close)
        torch.testing.assert_close(recorded[i][1], level.expand(2), rtol=1e-5, atol=1e-5)
        raw_TC = network(theirs_TC, level.expand(2))
        theirs_TC = scheduler.step(raw_TC, level, theirs_TC).prev_sample
    assert len(recorded) == len(scheduler.timesteps)
    torch.testing.assert_close(ours, theirs_TC, **close)


@pytest.mark.parametrize("config", [EDM, FLOW], ids=["edm", "flow"])
def test_heun_is_not_euler_and_calls_the_network_at_the_new_level(config, make_pack) -> None:
    batch = make_pack()
    noise_TC, objective = initial_noise(batch, (0, 1, 2)), sampling_path(config)
    network, calls = random_network(batch)
    heun = sample(objective, network, noise_TC, batch, num_steps=4, sampler=Sampler.HEUN)
    levels = [level_N[0].item() for _, level_N in calls]
    assert levels[1] == levels[2] and levels[3] == levels[4] and levels[5] == levels[6]
    assert len(levels) == 7 and levels[0] > levels[1] > levels[3] > levels[5]
    euler = sample(objective, network, noise_TC, batch, num_steps=4, sampler=Sampler.EULER)
    assert (heun - euler)[batch.is_real_T].abs().max() > 0.1


def test_each_sample_follows_the_shift_of_its_own_length(make_pack) -> None:
    config = replace(FLOW, flow_shift=2.0, shift_base_tokens=16)
    objective = sampling_path(config)
    whole = make_pack([(1, 8, 8), (1, 4, 4)])
    noise_TC = initial_noise(whole, (5, 6))
    level_SN = objective.schedule(whole.num_tokens, num_steps=5)
    assert (level_SN[1:-1, 0] > level_SN[1:-1, 1]).all()
    network, _ = random_network(whole)
    together = sample(objective, network, noise_TC, whole, num_steps=5)
    for i, grid in enumerate(whole.grids):
        alone = make_pack([grid])
        network, _ = random_network(alone)
        own = initial_noise(alone, (5 + i,))
        found = sample(objective, network, own, alone, num_steps=5)
        span = slice(whole.starts[i], whole.starts[i + 1])
        torch.testing.assert_close(found, together[span], rtol=1e-5, atol=1e-5)


def test_network_sees_float32_and_no_padding(make_pack) -> None:
    batch = make_pack()

    def network(input_TC, level_N):
        assert input_TC.dtype == level_N.dtype == torch.float32
        assert not input_TC[~batch.is_real_T].any()
        return torch.where(batch.is_real_T[:, None], input_TC, torch.nan).bfloat16()

    for config in (EDM, FLOW):
        end_TC = sample(
            sampling_path(config), network, initial_noise(batch, (0, 1, 2)), batch, num_steps=3
        )
        assert end_TC.dtype == torch.float32 and end_TC.isfinite().all()
        assert not end_TC[~batch.is_real_T].any()


def test_guidance_is_uncond_plus_g_times_the_difference(make_pack) -> None:
    batch = make_pack(multiple=1)
    cond, uncond = edm_network(EDM, batch, mu=1.0), edm_network(EDM, batch, mu=-1.0, std=0.3)
    input_TC, level_N = torch.randn(batch.latent_TC.shape), torch.tensor([0.1, 0.2, 0.3])
    u, c = uncond(input_TC, level_N), cond(input_TC, level_N)
    for g in (0.0, 0.5, 3.0):
        found = guided(cond, uncond, Guidance(scale=g), batch)(input_TC, level_N)
        torch.testing.assert_close(found.double(), u + g * (c - u), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", [EDM, FLOW, FLOW_X], ids=["edm", "flow", "flow-x"])
def test_guiding_outputs_is_guiding_latents_and_slopes(config, make_pack) -> None:
    objective = sampling_path(config)
    state_TC, u, c = torch.randn(3, 6, 4, dtype=torch.float64)
    noise_T1 = torch.rand(6, 1, dtype=torch.float64)
    of_raw = objective.predict(state_TC, u + 3 * (c - u), noise_T1)
    of_u, of_c = (objective.predict(state_TC, raw, noise_T1) for raw in (u, c))
    for name in ("latent_TC", "velocity_TC"):
        a, b = getattr(of_u, name), getattr(of_c, name)
        torch.testing.assert_close(getattr(of_raw, name), a + 3 * (b - a))


def test_both_predictions_of_flow_say_the_same_of_a_state(make_pack) -> None:
    batch, state_TC = make_pack(), torch.randn(make_pack().latent_TC.shape, dtype=torch.float64)
    level_N = torch.tensor([1e-3, 0.3, 1.0])
    noise_T1 = per_token(level_N.double(), batch)
    of_velocity, of_latent = (
        sampling_path(config).predict(
            state_TC, flow_network(config, batch)(state_TC, 1000 * level_N), noise_T1
        )
        for config in (FLOW, FLOW_X)
    )
    for name in ("latent_TC", "velocity_TC"):
        one, other = getattr(of_velocity, name), getattr(of_latent, name)
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_no_unconditional_call_at_guidance_one(make_pack) -> None:
    network, _ = random_network(make_pack())
    silent = lambda *_: pytest.fail("called")  # noqa: E731
    assert guided(network, silent, Guidance(scale=1.0), make_pack()) is network


def test_initial_noise_follows_from_own_seed_only(make_pack) -> None:
    whole = make_pack([(1, 4, 4), (1, 3, 3), (1, 2, 1)])
    noise_TC = initial_noise(whole, (11, 12, 13))
    for i, grid in enumerate(whole.grids):
        alone = make_pack([grid], multiple=8)
        own = initial_noise(alone, (11 + i,))[alone.is_real_T]
        start = whole.starts[i]
        assert torch.equal(own, noise_TC[start : start + len(own)])
    assert not noise_TC[~whole.is_real_T].any()
    swapped = initial_noise(whole, (13, 12, 11))
    assert not torch.equal(swapped[:16], noise_TC[:16])
    assert torch.equal(swapped[16:28], noise_TC[16:28])


def test_impossible_requests_are_refused(make_pack) -> None:
    batch = make_pack()
    network, _ = random_network(batch)
    with pytest.raises(ValueError, match="num_steps=0"):
        sample(sampling_path(EDM), network, batch.latent_TC, batch, num_steps=0)
    with pytest.raises(ValueError, match="got 2 seeds for 3 samples"):
        initial_noise(batch, (1, 2))


@pytest.mark.parametrize("config", [EDM, FLOW], ids=["edm", "flow"])
def test_sampler_reproduces_the_data_distribution(config, make_pack) -> None:
    batch = make_pack([(1, 100, 100)])
    network = {ObjectiveName.EDM: edm_network, ObjectiveName.FLOW: flow_network}[config.name]
    end_TC = sample(
        sampling_path(config),
        network(config, batch),
        initial_noise(batch, (0,)),
        batch,
        num_steps=32,
    )
    assert abs(end_TC.mean() - MU) < 5 * STD / end_TC.numel() ** 0.5 + 0.01
    assert abs(end_TC.std() - STD) < 0.02


def _diffusers_loop(scheduler, network, noise_TC, levels, level_of):
    """Their solver on our levels, which begin at 1 where theirs begin at 0.999."""
    scheduler.sigmas = levels.float()
    scheduler.timesteps = torch.stack([level_of(level) for level in levels[:-1]]).float()
    scheduler.num_inference_steps = len(levels) - 1
    state_TC = noise_TC
    for level in scheduler.timesteps:
        raw_TC = network(scheduler.scale_model_input(state_TC, level), level.expand(2))
        state_TC = scheduler.step(raw_TC, level, state_TC).prev_sample
    return state_TC


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 20])
@pytest.mark.parametrize("sampler", [Sampler.DPMPP, Sampler.UNIPC])
def test_flow_multistep_is_diffusers_solver(make_pack, sampler, num_steps, shift) -> None:
    batch = make_pack([(1, 4, 4), (1, 4, 4)])
    network, _ = random_network(batch)
    noise_TC = initial_noise(batch, (0, 1))
    objective = sampling_path(replace(FLOW, flow_shift=shift))
    ours = sample(objective, network, noise_TC, batch, num_steps=num_steps, sampler=sampler)
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": shift}
    if sampler is Sampler.DPMPP:
        scheduler = DPMSolverMultistepScheduler(**flow, final_sigmas_type="zero")
    else:
        scheduler = UniPCMultistepScheduler(**flow, final_sigmas_type="zero")
    scheduler.set_timesteps(num_steps)
    levels = objective.schedule(batch.num_tokens, num_steps=num_steps)[:, 0]
    theirs = _diffusers_loop(scheduler, network, noise_TC, levels, lambda level: 1000 * level)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shift", [1.0, 3.0, 16.0])
@pytest.mark.parametrize("num_steps", [1, 3, 4, 37])
def test_unipc_is_the_loop_of_wans_pipelines(make_pack, num_steps, shift) -> None:
    """With its own levels, of which it tells the network whole numbers."""
    batch = make_pack([(1, 4, 4), (1, 4, 4)])
    network, calls = random_network(batch)
    noise_TC = initial_noise(batch, (0, 1))
    config = replace(FLOW, flow_shift=shift, sampling_levels=SamplingLevels.UNIPC)
    objective = sampling_path(config)
    ours = sample(objective, network, noise_TC, batch, num_steps=num_steps, sampler=Sampler.UNIPC)
    content = UnipcScheduler.content(config)
    scheduler = UniPCMultistepScheduler.from_config(content)
    scheduler.set_timesteps(num_steps)
    assert [level_N.tolist() for _, level_N in calls] == [[int(t)] * 2 for t in scheduler.timesteps]
    if (num_steps, shift) == (4, 3.0):
        assert [int(level_N[0]) for _, level_N in calls] == [999, 900, 750, 500]
    theirs_TC = noise_TC
    for level in scheduler.timesteps:
        raw_TC = network(theirs_TC, level.expand(2).float())
        theirs_TC = scheduler.step(raw_TC, level, theirs_TC).prev_sample
    # Their levels are float32, which moves the third state by 5e-5.
    torch.testing.assert_close(ours, theirs_TC, rtol=5e-6, atol=5e-6)


def test_training_tells_the_level_itself(make_pack) -> None:
    config = FlowConfig(sampling_levels=SamplingLevels.UNIPC)
    batch, level_N = make_pack(), torch.tensor([0.1234567, 0.5, 0.9])
    problem = FlowMatching(config).problem_at(batch, level_N, torch.zeros(batch.latent_TC.shape))
    assert torch.equal(problem.level_M, 1000 * level_N)


@pytest.mark.parametrize("num_steps", [1, 2, 6, 20])
def test_edm_dpm_solver_is_diffusers(make_pack, num_steps) -> None:
    batch = make_pack([(1, 4, 4), (1, 4, 4)])
    network, _ = random_network(batch)
    noise_TC, objective = initial_noise(batch, (0, 1)), sampling_path(EDM)
    ours = sample(objective, network, noise_TC, batch, num_steps=num_steps, sampler=Sampler.DPMPP)
    scheduler = EDMDPMSolverMultistepScheduler(
        sigma_min=0.002, sigma_max=80.0, sigma_data=0.5, rho=7.0, final_sigmas_type="zero"
    )
    scheduler.set_timesteps(num_steps)
    theirs_TC = 80.0 * noise_TC
    for level in scheduler.timesteps:
        raw_TC = network(scheduler.scale_model_input(theirs_TC, level), level.expand(2))
        theirs_TC = scheduler.step(raw_TC, level, theirs_TC).prev_sample
    torch.testing.assert_close(ours, theirs_TC / 0.5, rtol=1e-4, atol=1e-4)


def test_guidance_within_an_interval_of_levels(make_pack) -> None:
    batch = make_pack(multiple=1)
    cond, uncond = edm_network(EDM, batch, mu=1.0), edm_network(EDM, batch, mu=-1.0, std=0.3)
    input_TC, level_N = torch.randn(batch.latent_TC.shape), torch.tensor([0.1, 0.2, 0.3])
    network = guided(cond, uncond, Guidance(scale=3.0, between=(0.15, 0.25)), batch)
    everywhere = guided(cond, uncond, Guidance(scale=3.0), batch)
    inside = batch.segment_T == 1
    found = network(input_TC, level_N)
    torch.testing.assert_close(found[inside], everywhere(input_TC, level_N)[inside])
    torch.testing.assert_close(found[~inside], cond(input_TC, level_N).float()[~inside])
    silent = lambda *_: pytest.fail("called")  # noqa: E731
    outside = guided(cond, silent, Guidance(scale=3.0, between=(1.0, 2.0)), batch)
    torch.testing.assert_close(outside(input_TC, level_N), cond(input_TC, level_N).float())


def test_rescaled_guidance_is_diffusers_for_each_sample(make_pack) -> None:
    from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import rescale_noise_cfg

    batch = make_pack()
    c_TC, u_TC = torch.randn(2, *batch.latent_TC.shape)
    guidance = Guidance(scale=4.0, rescale=0.7)
    found = guided(lambda *_: c_TC, lambda *_: u_TC, guidance, batch)(c_TC, torch.ones(3))
    for i, tokens in enumerate(batch.num_tokens):
        own = slice(batch.starts[i], batch.starts[i] + tokens)
        mixed = u_TC[own] + 4 * (c_TC[own] - u_TC[own])
        theirs = rescale_noise_cfg(mixed[None], c_TC[own][None], guidance_rescale=0.7)[0]
        torch.testing.assert_close(found[own], theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("sampler", "part", "guided_calls"),
    [
        *((Sampler.EULER, 0.5, 2), (Sampler.UNIPC, 0.5, 2), (Sampler.EULER, 0.49, 1)),
        *((Sampler.HEUN, 0.5, 4), (Sampler.HEUN, 1, 7), (Sampler.HEUN, 0, 0)),
    ],
)
def test_a_guided_step_is_guided_as_a_whole(make_pack, sampler, part, guided_calls) -> None:
    """Of four steps; Heun's has two calls, but the last one."""
    batch, called = make_pack(), list[str]()

    def named(name):
        def network(input_TC, _):
            called.append(name)
            return torch.zeros_like(input_TC)

        return network

    network = guided_at_first(
        named("both"), named("alone"), num_steps=4, part=part, sampler=sampler
    )
    noise_TC = initial_noise(batch, (1, 2, 3))
    sample(sampling_path(FLOW), network, noise_TC, batch, num_steps=4, sampler=sampler)
    calls = 7 if sampler is Sampler.HEUN else 4
    assert called == ["both"] * guided_calls + ["alone"] * (calls - guided_calls)
