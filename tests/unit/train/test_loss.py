"""The loss of a pack against its definition: squared or pseudo-Huber, with weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dit.batch import PackedBatch, Problem, SequenceShard, TokenWeights
from dit.config import LossKind, LossMean, ObjectiveConfig
from dit.distributed.model_parallel import split_tokens
from dit.train.loss import Loss, loss_of, pseudo_huber
from dit.train.step import RankLoss
from tests.packs import random_pack, tiny_model

# 20, 8 and 1 real tokens, each padded to a multiple of 8.
PACK = random_pack([(1, 4, 5), (2, 2, 2), (1, 1, 1)], [5, 2, 1], model=tiny_model())
WEIGHTS = (0.25, 3.0, 7.0)
each_mean = pytest.mark.parametrize("mean", list(LossMean))


def _problem(weights: tuple[float, ...] = WEIGHTS) -> tuple[Problem, Tensor]:
    generator = torch.Generator().manual_seed(0)
    target_TC, prediction_TC = torch.randn(2, *PACK.latent_TC.shape, generator=generator)
    prediction_TC[~PACK.is_real_T] = math.nan  # what a network says of padding is never read
    ones_N = torch.ones(PACK.num_samples)
    problem = Problem(
        input_TC=target_TC,
        level_M=ones_N,
        target_TC=target_TC,
        weight_N=torch.tensor(weights),
        noise_N=ones_N,
    )
    return problem, prediction_TC


def _errors(problem: Problem, prediction_TC: Tensor) -> list[list[float]]:
    """Weighted mean squared error over the features of each real token, sample by sample."""
    return [
        [
            weight * sum((a - b) ** 2 for a, b in zip(said, wanted, strict=True)) / len(said)
            for said, wanted in zip(
                prediction_TC[start : start + tokens].tolist(),
                problem.target_TC[start : start + tokens].tolist(),
                strict=True,
            )
        ]
        for start, tokens, weight in zip(PACK.starts, PACK.num_tokens, WEIGHTS, strict=False)
    ]


def _by_definition(mean: LossMean, errors: list[list[float]]) -> tuple[list[float], list[int]]:
    if mean is LossMean.TOKEN:
        return [sum(e) for e in errors], [len(e) for e in errors]
    return [sum(e) / len(e) for e in errors], [1] * len(errors)


@each_mean
def test_loss_is_the_weighted_squared_error_of_real_tokens(mean: LossMean) -> None:
    problem, prediction_TC = _problem()
    totals, counts = _by_definition(mean, _errors(problem, prediction_TC))
    loss = loss_of(PACK, problem, prediction_TC, ObjectiveConfig(loss_mean=mean))
    assert loss.total.item() == pytest.approx(sum(totals), rel=1e-5)
    assert (loss.count.item(), loss.count.dtype) == (sum(counts), torch.int32)
    wanted_N2 = torch.tensor(list(zip(totals, counts, strict=True)), dtype=torch.float64)
    torch.testing.assert_close(loss.of_samples(PACK), wanted_N2, rtol=1e-5, atol=0)


@each_mean
def test_gradient_of_a_token_has_the_weight_of_its_sample(mean: LossMean) -> None:
    problem, prediction_TC = _problem()
    prediction_TC = prediction_TC.nan_to_num(1e3).requires_grad_()
    loss_of(PACK, problem, prediction_TC, ObjectiveConfig(loss_mean=mean)).total.backward()
    tokens_N = torch.tensor(PACK.num_tokens) if mean is LossMean.SAMPLE else torch.ones(3)
    factor_T = (problem.weight_N / tokens_N)[PACK.segment_T]
    real, width = PACK.is_real_T, prediction_TC.shape[1]
    wanted_TC = 2 / width * factor_T[:, None] * (prediction_TC.detach() - problem.target_TC)
    assert prediction_TC.grad is not None
    torch.testing.assert_close(prediction_TC.grad[real], wanted_TC[real])
    assert not prediction_TC.grad[~real].any()


@each_mean
def test_weights_of_the_data_multiply_losses_and_leave_what_they_are_divided_by(
    mean: LossMean,
) -> None:
    problem, prediction_TC = _problem()
    plain = loss_of(PACK, problem, prediction_TC, ObjectiveConfig(loss_mean=mean))
    weights = (2.0, 1.0, 0.0)
    batch = PACK.with_method(TokenWeights(weight_T=torch.tensor(weights)[PACK.segment_T]))
    found = loss_of(batch, problem, prediction_TC, ObjectiveConfig(loss_mean=mean))
    wanted_N2 = plain.of_samples(PACK) * torch.tensor([[weight, 1.0] for weight in weights])
    torch.testing.assert_close(found.of_samples(batch), wanted_N2, rtol=1e-6, atol=0)
    # The total is rounded to float32.
    torch.testing.assert_close(found.total.double(), wanted_N2[:, 0].sum(), rtol=1e-6, atol=0)
    assert found.count == plain.count
    # Token by token: the first half of the first sample counts for nothing, the other as before.
    half_T = (torch.arange(len(PACK.segment_T)) >= 10).float()
    of_half = PACK.with_method(TokenWeights(weight_T=half_T))
    of_half = loss_of(of_half, problem, prediction_TC, ObjectiveConfig(loss_mean=mean))
    assert torch.equal(of_half.error_T, plain.error_T * half_T) and of_half.count == plain.count


@each_mean
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("count", [2, 4])
def test_losses_of_context_ranks_add_up(mean: LossMean, count: int, weighted: bool) -> None:
    problem, prediction_TC = _problem()
    weight_T = torch.arange(len(PACK.segment_T)) / 8
    pack = PACK.with_method(TokenWeights(weight_T=weight_T)) if weighted else PACK
    parts: list[tuple[PackedBatch, Loss]] = []
    for index in range(count):
        share = SequenceShard(index=index, count=count)
        batch, part = split_tokens(pack, problem, share=share, multiple=3)
        mine_TC = torch.full_like(part.target_TC, math.nan)
        rows_T = PACK.rows(share)
        mine_TC[: len(rows_T)] = prediction_TC[rows_T]
        parts.append((batch, loss_of(batch, part, mine_TC, ObjectiveConfig(loss_mean=mean))))
    whole = loss_of(pack, problem, prediction_TC, ObjectiveConfig(loss_mean=mean))
    totals = [loss.total for _, loss in parts]
    torch.testing.assert_close(torch.stack(totals).sum(), whole.total)
    assert sum(int(loss.count) for _, loss in parts) == int(whole.count)
    samples = torch.stack([loss.of_samples(batch) for batch, loss in parts]).sum(0)
    torch.testing.assert_close(samples, whole.of_samples(PACK))


@each_mean
def test_a_report_adds_packs_and_names_samples_that_are_not_finite(mean: LossMean) -> None:
    problem, prediction_TC = _problem()
    loss = loss_of(PACK, problem, prediction_TC, ObjectiveConfig(loss_mean=mean))
    report = RankLoss.of([(loss, PACK), (loss, PACK)])
    assert report.total == pytest.approx(2 * loss.total.item())
    assert (report.count, report.not_finite) == (2 * loss.count.item(), ())
    prediction_TC[PACK.starts[1]] = math.inf
    bad = loss_of(PACK, problem, prediction_TC, ObjectiveConfig(loss_mean=mean))
    assert RankLoss.of([(loss, PACK), (bad, PACK)]).not_finite == (PACK.keys[1],)


@each_mean
@pytest.mark.parametrize("c", [0.02, 0.5, 30.0])
def test_pseudo_huber_loss_is_that_of_its_source(mean: LossMean, c: float) -> None:
    """`sqrt((output - target)**2 + c**2) - c` of every number, then the means of the squares."""
    problem, prediction_TC = _problem()
    error_TC = (prediction_TC - problem.target_TC).double()
    error_T = ((error_TC**2 + c**2).sqrt() - c).mean(-1)
    errors = [
        (weight * error_T[start : start + tokens]).tolist()
        for start, tokens, weight in zip(PACK.starts, PACK.num_tokens, WEIGHTS, strict=False)
    ]
    options = ObjectiveConfig(loss=LossKind.HUBER, huber_c=c, loss_mean=mean)
    loss = loss_of(PACK, problem, prediction_TC, options)
    wanted = torch.tensor(list(zip(*_by_definition(mean, errors), strict=True)))
    torch.testing.assert_close(loss.of_samples(PACK), wanted.double(), rtol=1e-5, atol=0)


def test_pseudo_huber_keeps_its_digits_and_gradients_at_both_ends() -> None:
    small, large, c = 1e-5, 1e4, 0.1
    error_TC = torch.tensor([[0.0, small, -small, large, -large]], requires_grad=True)
    found_TC = pseudo_huber(error_TC, c=c)
    wanted = [0, small**2 / (2 * c), small**2 / (2 * c), large - c, large - c]
    assert found_TC.tolist()[0] == pytest.approx(wanted, rel=1e-6)
    found_TC.sum().backward()
    assert error_TC.grad is not None  # e / sqrt(e² + c²): never above 1
    assert error_TC.grad.tolist()[0] == pytest.approx([0, small / c, -small / c, 1, -1], rel=1e-6)
