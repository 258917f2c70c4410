from itertools import pairwise, product

import pytest
import torch

from dit.config import ObjectiveConfig, ObjectiveName
from dit.objectives.pack_draws import Draw, draw_dropout, pack_rng, with_null_inputs
from dit.objectives.registry import training_objective
from dit.objectives.timestep_sampling import draw_quantiles
from dit.objectives.training_target import training_problem, validation_problem

CPU = torch.device("cpu")
NULL = {"text": torch.zeros(1, 5)}
OBJECTIVES = [
    training_objective(ObjectiveConfig(name=name))
    for name in (ObjectiveName.EDM, ObjectiveName.FLOW)
]
each_objective = pytest.mark.parametrize("objective", OBJECTIVES, ids=["edm", "flow"])


def first_numbers(seed: int, step: int, pack_id: int, draw: Draw) -> tuple[float, ...]:
    rng = pack_rng(seed=seed, step=step, pack_id=pack_id, device=CPU, draw=draw)
    return tuple(torch.randn(4, generator=rng).tolist())


def draw(objective, batch, *, seed=1, step=2):
    options = ObjectiveConfig(text_dropout=0.5)
    return training_problem(objective, batch, seed=seed, step=step, null=NULL, options=options)


def test_streams_are_a_function_of_seed_step_pack_and_purpose() -> None:
    arguments = list(product((0, 1), (0, 1), (0, 1, 2**62 + 1), Draw))
    streams = {first_numbers(*a) for a in arguments}
    assert len(streams) == len(arguments)
    assert streams == {first_numbers(*a) for a in reversed(arguments)}


def test_streams_of_one_pack_are_uncorrelated() -> None:
    drawn = torch.stack(
        [
            torch.randn(
                20_000,
                generator=pack_rng(seed=0, step=s, pack_id=p, device=CPU, draw=d),
            )
            for s, p, d in product((0, 1), (5, 6), (Draw.NOISE, Draw.LEVELS))
        ]
    )
    correlation = torch.corrcoef(drawn) - torch.eye(len(drawn))
    assert correlation.abs().max() < 5 / 20_000**0.5


@each_objective
def test_problem_repeats_whatever_was_drawn_before(objective, make_pack) -> None:
    batch = make_pack()
    text, problem = draw(objective, batch)
    torch.manual_seed(123)
    torch.rand(10)
    again_text, again = draw(objective, batch)
    for name in ("input_TC", "level_M", "target_TC", "weight_N", "noise_N"):
        assert torch.equal(getattr(problem, name), getattr(again, name))
    assert torch.equal(text.text_LE, again_text.text_LE)


@each_objective
def test_global_random_state_is_left_alone(objective, make_pack) -> None:
    before = torch.get_rng_state()
    draw(objective, make_pack())
    assert torch.equal(before, torch.get_rng_state())


@each_objective
@pytest.mark.parametrize("change", ["seed", "step", "pack_id"])
def test_problem_changes_with(objective, make_pack, change: str) -> None:
    _, one = draw(objective, make_pack())
    if change == "pack_id":
        _, other = draw(objective, make_pack(pack_id=8))
    else:
        _, other = draw(objective, make_pack(), **{change: 99})
    assert (one.noise_N != other.noise_N).all()
    real = make_pack().is_real_T
    assert (one.target_TC[real] != other.target_TC[real]).all()


@each_objective
def test_alignment_does_not_change_the_numbers(objective, make_pack) -> None:
    seen = []
    for multiple in (1, 4, 16):
        batch = make_pack(multiple=multiple)
        _, problem = draw(objective, batch)
        padding = ~batch.is_real_T
        assert not problem.input_TC[padding].any()
        assert not problem.target_TC[padding].any()
        real = batch.is_real_T
        seen.append((problem.input_TC[real], problem.target_TC[real], problem.level_M))
    for other in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], other, strict=True))


@each_objective
def test_tail_padding_does_not_change_the_numbers(objective, make_pack) -> None:
    from dataclasses import replace

    batch = make_pack()
    longer = replace(
        batch,
        latent_TC=torch.cat([batch.latent_TC, torch.full((5, 4), torch.nan)]),
        segment_T=torch.cat([batch.segment_T, torch.zeros(5, dtype=torch.int64)]),
        is_real_T=torch.cat([batch.is_real_T, torch.zeros(5, dtype=torch.bool)]),
    )
    _, one = draw(objective, batch)
    _, other = draw(objective, longer)
    assert torch.equal(one.input_TC, other.input_TC[:-5])
    assert not other.input_TC[-5:].any()


@each_objective
def test_levels_differ_inside_a_pack(objective, make_pack) -> None:
    _, problem = draw(objective, make_pack(grids=[(1, 1, 1)] * 16))
    assert len(set(problem.noise_N.tolist())) == 16
    assert len(set(problem.level_M.tolist())) == 16


@each_objective
def test_noise_is_standard_normal(objective, make_pack) -> None:
    from scipy.stats import kstest

    zeros = make_pack([(1, 100, 100)], latents=lambda n, c, rng: torch.zeros(n, c))
    problem = validation_problem(objective, zeros, seed=3, quantile=0.5)
    if objective is OBJECTIVES[0]:
        scale = 1 / (1 + (problem.noise_N / 0.5) ** 2).sqrt()  # target = -a noise
        noise = -problem.target_TC / scale
    else:
        noise = problem.target_TC
    assert kstest(noise[zeros.is_real_T].flatten().numpy(), "norm").pvalue > 1e-3


@each_objective
def test_validation_repeats_and_is_not_training(objective, make_pack) -> None:
    batch = make_pack()
    one, again = (validation_problem(objective, batch, seed=1, quantile=0.3) for _ in range(2))
    assert torch.equal(one.input_TC, again.input_TC)
    for step in range(3):
        _, training = draw(objective, batch, seed=1, step=step)
        assert (one.noise_N != training.noise_N).all()


@each_objective
def test_validation_levels_are_quantiles_of_those_of_training(objective, make_pack) -> None:
    """Half of the drawn levels lie below the median; all problems have the same noise."""
    batch = make_pack(grids=[(1, 2, 2)] * 4000)
    _, training = draw(objective, batch)
    for quantile in (0.1, 0.5, 0.9):
        at = validation_problem(objective, batch, seed=1, quantile=quantile)
        below = (training.noise_N < at.noise_N).double().mean()
        assert abs(below - quantile) < 5 * (quantile * (1 - quantile) / 4000) ** 0.5
    twice = [validation_problem(objective, batch, seed=1, quantile=q) for q in (0.2, 0.8)]
    noises = [_noise(objective, batch, problem) for problem in twice]
    torch.testing.assert_close(*noises, rtol=0, atol=1e-4)


def _noise(objective, batch, problem) -> torch.Tensor:
    """What was added to the latents."""
    real = batch.is_real_T
    latent_RC, level_R1 = batch.latent_TC[real], problem.noise_N[batch.segment_T][real][:, None]
    if objective is OBJECTIVES[0]:
        state_RC = problem.input_TC[real] * (level_R1**2 + 0.25).sqrt()
        return (state_RC - 0.5 * latent_RC) / level_R1
    return problem.target_TC[real] + latent_RC


def test_text_dropout_is_drawn_per_sample_at_its_rate() -> None:
    rng = pack_rng(seed=0, step=0, pack_id=0, device=CPU, draw=Draw.TEXT_DROPOUT)
    drawn = draw_dropout(100_000, 0.1, rng)
    assert abs(sum(drawn) / len(drawn) - 0.1) < 5 * (0.09 / 100_000) ** 0.5
    assert not any(draw_dropout(1000, 0.0, rng))
    assert all(draw_dropout(1000, 1.0, rng))


def test_dropout_mixes_inside_packs_and_does_not_move_the_noise(make_pack) -> None:
    batch = make_pack(grids=[(1, 1, 1)] * 32, texts=[3] * 32)
    null = {"text": torch.full((1, 5), 9.0)}
    results = [
        training_problem(
            OBJECTIVES[0],
            batch,
            seed=1,
            step=2,
            null=null,
            options=ObjectiveConfig(text_dropout=p),
        )
        for p in (0.0, 0.5)
    ]
    (kept, without), (dropped, with_dropout) = results
    assert torch.equal(without.input_TC, with_dropout.input_TC)
    assert torch.equal(kept.text_LE, batch.text_LE)
    lengths = [b - a for a, b in zip(dropped.text_starts, dropped.text_starts[1:], strict=False)]
    assert {1, 3} == set(lengths)


@each_objective
def test_each_draw_of_a_pack_has_its_own_stream(objective, make_pack) -> None:
    """Noise, levels and dropout of training and the noise of validation share no numbers."""
    batch = make_pack([(1, 1, 1)] * 64, multiple=1, pack_id=11)

    def rng(purpose: Draw, *, step: int = 2) -> torch.Generator:
        return pack_rng(seed=1, step=step, pack_id=11, device=CPU, draw=purpose)

    text, problem = draw(objective, batch, seed=1, step=2)
    quantile_N = draw_quantiles(64, rng(Draw.LEVELS))
    assert torch.equal(problem.noise_N, objective.levels(quantile_N, batch.num_tokens))
    noise_TC = torch.randn(64, 4, generator=rng(Draw.NOISE))
    wanted = objective.problem_at(batch, problem.noise_N, noise_TC)
    assert torch.equal(problem.input_TC, wanted.input_TC)
    dropped = draw_dropout(64, 0.5, rng(Draw.TEXT_DROPOUT))
    assert text.text_starts == with_null_inputs(batch, dropped, NULL).text_starts
    check = validation_problem(objective, batch, seed=1, quantile=0.3)
    noise_TC = torch.randn(64, 4, generator=rng(Draw.VALIDATION_NOISE, step=0))
    assert torch.equal(
        check.input_TC, objective.problem_at(batch, check.noise_N, noise_TC).input_TC
    )


@each_objective
def test_dropout_does_not_follow_the_noise_level(objective, make_pack) -> None:
    """Were both drawn from one stream, guidance would be learned at half of the levels only."""
    batch = make_pack([(1, 1, 1)] * 2000, multiple=1, texts=[3] * 2000)
    text, problem = draw(objective, batch)
    dropped_N = torch.tensor([stop - start == 1 for start, stop in pairwise(text.text_starts)])
    order_N = problem.noise_N.argsort()
    low, high = dropped_N[order_N].float().chunk(2)
    assert abs(low.mean() - 0.5) < 5 * 0.5 / 1000**0.5
    assert abs(high.mean() - 0.5) < 5 * 0.5 / 1000**0.5
