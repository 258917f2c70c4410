"""Flow-DPO: pairs in packs, their draws, the loss, and steps of a network."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dit.batch import REJECTED_LATENT, LatentSample, PackedBatch, Pairs, Problem
from dit.config import (
    LoraConfig,
    LossKind,
    MockGeometry,
    ObjectiveConfig,
    Preference,
    Problems,
    RunConfig,
)
from dit.data import build_train_loader
from dit.data.cook import Expected, cook
from dit.data.mock import mock_record
from dit.data.pack import SampleSize, pack_samples
from dit.data.rejections import SampleRefused
from dit.lora.targets import chosen_adapters
from dit.models.patch_layout import PatchLayout
from dit.objectives.registry import training_objective
from dit.objectives.training_target import training_problem
from dit.sizing.flops import pack_forward_flops
from dit.train.loss import loss_of, mean_errors, token_errors
from dit.train.metrics.interval_metrics import IntervalMetrics
from dit.train.model_and_optimizer import build_model_and_optimizer, randomise
from dit.train.reference_passes import reference_passes
from dit.train.step import forward_backward
from tests.learning import tiny_run
from tests.packs import random_samples

DPO = ObjectiveConfig(name="flow", preference=Preference.DPO, text_dropout=0.5)
GRIDS, TEXTS = [(1, 4, 4), (2, 3, 3), (1, 1, 1)], [5, 2, 1]
NULL = {"text": torch.full((3, 8), 0.7)}


def a_config(objective: ObjectiveConfig = DPO) -> RunConfig:
    config = replace(tiny_run(), lora=LoraConfig(rank=2), objective=objective)
    return replace(config, dataset=replace(config.dataset, sample_multiple=8))


def a_pair(sample: LatentSample, *, seed: int = 1) -> LatentSample:
    rng = torch.Generator().manual_seed(seed)
    rejected_CFHW = torch.randn(sample.latent_CFHW.shape, generator=rng)
    return replace(sample, others={**sample.others, REJECTED_LATENT: rejected_CFHW})


def swapped(sample: LatentSample) -> LatentSample:
    others = {**sample.others, REJECTED_LATENT: sample.latent_CFHW}
    return replace(sample, latent_CFHW=sample.others[REJECTED_LATENT], others=others)


def some_pairs(config: RunConfig) -> list[LatentSample]:
    return [a_pair(one) for one in random_samples(GRIDS, TEXTS, model=config.model)]


def a_pack(config: RunConfig, pairs: list[LatentSample]) -> PackedBatch:
    return pack_samples(pairs, PatchLayout.of_training(config))


def test_a_pair_lies_side_by_side_in_one_pack_and_shares_all_draws() -> None:
    config = a_config()
    pairs = some_pairs(config)
    pack, layout = a_pack(config, pairs), PatchLayout.of_training(config)
    alone = pack_samples(pairs[:1], PatchLayout.of(config))
    assert pack.method(Pairs) and pack.num_samples == 6 and pack.copies == 2
    assert SampleSize.of(pairs[0], layout).tokens == 2 * 16
    assert torch.equal(pack.latent_TC[:16], alone.latent_TC[:16])
    rejected = replace(pairs[0], latent_CFHW=pairs[0].others[REJECTED_LATENT])
    assert torch.equal(
        pack.latent_TC[16:32], pack_samples([rejected], PatchLayout.of(config)).latent_TC
    )
    assert pack.keys[:2] == ("0", "0 (rejected)") and pack.grids[0] == pack.grids[1]
    objective = training_objective(DPO)
    seen = set()
    for step in range(8):
        batch, problem = training_problem(
            objective, pack, seed=1, step=step, null=NULL, options=DPO
        )
        noise_TC = problem.target_TC + pack.latent_TC
        rows = torch.arange(len(pack.segment_T)).split(
            [b - a for a, b in zip(pack.starts, pack.starts[1:], strict=False)]
        )
        lengths = [b - a for a, b in zip(batch.text_starts, batch.text_starts[1:], strict=False)]
        for w, other in ((0, 1), (2, 3), (4, 5)):
            real = pack.num_tokens[w]
            torch.testing.assert_close(noise_TC[rows[w]][:real], noise_TC[rows[other]][:real])
            assert problem.noise_N[w] == problem.noise_N[other] and lengths[w] == lengths[other]
        assert len(problem.noise_N.unique()) == 3
        seen.add(tuple(length == 3 for length in lengths[::2]))
    assert len(seen) > 2  # captions are dropped of some pairs


def test_no_pack_of_a_loader_has_half_a_pair() -> None:
    sizes = tuple(
        MockGeometry(frames=1, height=side, width=side, text_length=3) for side in (4, 6, 8)
    )
    config = a_config()
    data = replace(config.dataset, mock=True, mock_samples=sizes, task_encoder_seq_length=160)
    config = replace(config, dataset=replace(data, packing_buffer_size=8, num_workers=0))
    loader = build_train_loader(config, rank=0, world_size=1)
    packs = list(islice(loader, 12))
    loader.close()
    assert len({pack.num_samples for pack in packs}) > 1
    for pack in packs:
        assert pack.keys[1::2] == tuple(f"{key} (rejected)" for key in pack.keys[::2])
        assert pack.grids[::2] == pack.grids[1::2] and pack.starts[-1] <= 160


def test_a_pair_that_is_none_is_refused() -> None:
    config = a_config()
    expected = Expected.of_training(config)
    parts = mock_record(config, seed=1, index=0)
    sample = cook(parts, expected, key="a")
    assert sample.others[REJECTED_LATENT].shape == sample.latent_CFHW.shape
    assert cook(parts, Expected.of(config), key="a").unknown == (REJECTED_LATENT,)
    plain = mock_record(tiny_run(), seed=1, index=0)
    with pytest.raises(SampleRefused, match="no `rejected_latent`, which objective"):
        cook(plain, expected, key="a")
    short = replace(expected, capacity=SampleSize.of(sample, expected.layout).tokens - 1)
    with pytest.raises(SampleRefused, match="a pair of latents"):
        cook(parts, short, key="a")


def made_up(*, swap: bool = False, equal: bool = False) -> tuple[PackedBatch, Problem, Tensor]:
    """A pack, its problem and a prediction in float64."""
    config = a_config()
    pairs = some_pairs(config)
    if equal:
        pairs = [replace(p, others={**p.others, REJECTED_LATENT: p.latent_CFHW}) for p in pairs]
    pack = a_pack(config, [swapped(pair) for pair in pairs] if swap else pairs)
    batch, problem = training_problem(
        training_objective(DPO), pack, seed=1, step=3, null=NULL, options=DPO
    )
    said_TC = torch.randn(batch.latent_TC.shape, generator=torch.Generator().manual_seed(5))
    if equal or swap:  # the same of both samples of a pair, for the same input or the other order
        rows = [torch.arange(a, b) for a, b in zip(pack.starts, pack.starts[1:], strict=False)]
        for w in range(0, 6, 2):
            first, second = said_TC[rows[w]].clone(), said_TC[rows[w + 1]].clone()
            said_TC[rows[w]], said_TC[rows[w + 1]] = (first, first) if equal else (second, first)
    return batch, problem, said_TC


def errors(batch: PackedBatch, problem: Problem, said_TC: Tensor) -> Tensor:
    return mean_errors(batch, token_errors(batch, problem, said_TC, DPO), context=None)


def gradient_of(
    batch: PackedBatch, problem: Problem, said_TC: Tensor, reference_N: Tensor, **options: Any
) -> tuple[float, Tensor]:
    said_TC = said_TC.clone().requires_grad_()
    chosen = replace(DPO, **options)
    loss = loss_of(batch, replace(problem, reference_N=reference_N), said_TC, chosen)
    loss.total.backward()
    assert said_TC.grad is not None and loss.count == 3
    return loss.total.item() / 3, said_TC.grad


def test_at_the_start_the_loss_is_ln_2_and_half_of_the_difference_is_the_gradient() -> None:
    batch, problem, said_TC = made_up()
    loss, grad_TC = gradient_of(batch, problem, said_TC, errors(batch, problem, said_TC))
    assert loss == pytest.approx(math.log(2), rel=1e-7)
    again_TC = said_TC.clone().requires_grad_()
    parts_T = token_errors(batch, problem, again_TC, DPO)
    tokens_N, sign_N = torch.tensor(batch.loss_tokens), torch.tensor([1.0, -1.0] * 3)
    (parts_T * (sign_N / tokens_N)[batch.segment_T]).sum().backward()
    assert again_TC.grad is not None and again_TC.grad.abs().max() > 1e-3
    torch.testing.assert_close(grad_TC, DPO.dpo_beta / 4 * again_TC.grad)


def test_equal_pairs_have_no_gradient_and_swapped_ones_the_other_sign() -> None:
    batch, problem, said_TC = made_up()
    reference_N = errors(batch, problem, said_TC)
    _, grad_TC = gradient_of(batch, problem, said_TC, reference_N)
    other, its, said_too_TC = made_up(swap=True)
    _, opposite_TC = gradient_of(other, its, said_too_TC, errors(other, its, said_too_TC))
    rows = [torch.arange(a, b) for a, b in zip(batch.starts, batch.starts[1:], strict=False)]
    for w in range(0, 6, 2):
        torch.testing.assert_close(grad_TC[rows[w]], -opposite_TC[rows[w + 1]])
    # Of equal samples both errors are one, so that no weight that makes both is moved.
    batch, problem, said_TC = made_up(equal=True)
    _, grad_TC = gradient_of(batch, problem, said_TC, errors(batch, problem, said_TC) + 0.1)
    for w in range(0, 6, 2):
        torch.testing.assert_close(grad_TC[rows[w]], -grad_TC[rows[w + 1]], rtol=1e-5, atol=1e-7)


def test_the_loss_of_torch_over_samples_with_any_reference() -> None:
    batch, problem, said_TC = made_up()
    away_N = torch.linspace(-0.02, 0.03, 6, dtype=torch.float64)
    loss, grad_TC = gradient_of(
        batch, problem, said_TC, errors(batch, problem, said_TC) - away_N, dpo_beta=20.0
    )
    again_TC = said_TC.double().requires_grad_()
    error_N = torch.stack(
        [
            (again_TC - problem.target_TC)[a : a + real].square().mean()
            for a, real in zip(batch.starts, batch.num_tokens, strict=False)
        ]
    )
    reference_N = error_N.detach() - away_N
    difference = (error_N - reference_N).view(3, 2)
    margin = -10 * (difference[:, 0] - difference[:, 1])
    wanted = -torch.nn.functional.logsigmoid(margin).mean()
    (3 * wanted).backward()
    assert loss == pytest.approx(wanted.item(), rel=1e-5)
    assert again_TC.grad is not None
    torch.testing.assert_close(grad_TC.double(), again_TC.grad, rtol=1e-5, atol=1e-7)


def a_step(config: RunConfig, groups: Any, packs: list[PackedBatch], *, fresh: bool) -> Any:
    """Loss, metrics, gradients and the run of a first step; `fresh` adapters add nothing yet."""
    model = build_model_and_optimizer(
        config, groups, adapters=chosen_adapters(config.model, config.lora)
    )
    network: Any = model.chunks[0].module
    randomise(network, seed=3)
    if fresh:
        for name, weight in network.named_parameters():
            if name.endswith(".B"):
                weight.data.zero_()
    run: Any = SimpleNamespace(
        config=config, model=model, objective=training_objective(config.objective), null=NULL
    )
    items = [
        training_problem(run.objective, one, seed=1, step=4, null=NULL, options=config.objective)
        for one in packs
    ]
    found = reference_passes(run, packs, items, step=4)
    assert found is not None and not found.unadapted_TC and len(found.error_N) == len(packs)
    assert found.flops == sum(pack_forward_flops(config.model, batch) for batch, _ in items)
    loss = forward_backward(model, items, objective=config.objective, references=found)
    grads = {n: p.main_grad.clone() for n, p in network.named_parameters() if p.requires_grad}
    return loss, grads


@pytest.mark.parametrize("name", ["flow", "edm"])
def test_a_network_begins_at_ln_2_to_the_last_bit(groups, name: str) -> None:
    config = a_config(replace(DPO, name=name, text_dropout=0.0))
    pairs = some_pairs(config)
    loss, _ = a_step(config, groups, [a_pack(config, pairs)], fresh=True)
    assert loss.total / loss.count == pytest.approx(math.log(2), abs=1e-7)
    (one, _) = loss.packs[0]
    assert one.pairs_P3 is not None and (one.pairs_P3 == 0).all()  # to the last bit


def test_equal_pairs_move_no_weight(groups) -> None:
    config = a_config(replace(DPO, dpo_beta=0.1))  # with which no sigmoid is near its ends
    equal = [
        replace(one, others={**one.others, REJECTED_LATENT: one.latent_CFHW})
        for one in some_pairs(config)
    ]
    _, some = a_step(config, groups, [a_pack(config, some_pairs(config))], fresh=False)
    _, none = a_step(config, groups, [a_pack(config, equal)], fresh=False)
    for name, grad in none.items():
        assert grad.abs().max() <= 1e-5 * some[name].abs().max()


def test_metrics_are_means_over_pairs(groups, monkeypatch) -> None:
    config = a_config()
    loss, grads = a_step(config, groups, [a_pack(config, some_pairs(config))], fresh=False)
    assert all(grad.isfinite().all() for grad in grads.values())
    model, objective = build_model_and_optimizer(config, groups), training_objective(DPO)
    of_step = IntervalMetrics(config, model, objective)
    monkeypatch.setattr(of_step.loss_by_level, "add", lambda *_: None)
    of_step.add_losses([], loss)
    of_step.add_losses([], loss)
    metrics = of_step.preferences
    assert metrics is not None
    found = metrics.values(metrics.sums)
    pairs_P3 = loss.packs[0][0].pairs_P3
    assert pairs_P3 is not None and pairs_P3.shape == (3, 3) and pairs_P3.abs().min() > 0
    margin, preferred, rejected = pairs_P3.mean(0).tolist()
    assert found["preference_margin"] == pytest.approx(margin)
    assert found["preferred_drift"] == pytest.approx(preferred)
    assert found["rejected_drift"] == pytest.approx(rejected)
    assert found["preference_accuracy"] == pytest.approx((pairs_P3[:, 0] > 0).double().mean())
    wanted = torch.nn.functional.softplus(-pairs_P3[:, 0]).mean()
    assert loss.total / loss.count == pytest.approx(wanted.item(), rel=1e-6)


def test_numbers_of_samples_alone_wait() -> None:
    assert DPO.passes_without_gradient == 1 and DPO.predictions_kept == 0


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(Problems, match=r"preference=dpo compares .* all weights are trained"):
        replace(a_config(), lora=LoraConfig())
    with pytest.raises(Problems, match=r"preference=dpo compares squared errors, and loss=huber"):
        replace(DPO, loss=LossKind.HUBER)
    with pytest.raises(Problems, match=r"cfg_target=3\.0 moves the targets"):
        replace(DPO, cfg_target=3.0)
    with pytest.raises(Problems, match=r"leave drift_weight=0\.5 out"):
        replace(DPO, drift_weight=0.5)
    with pytest.raises(Problems, match=r"model\.route_from and route_to, which skip tokens"):
        config = a_config()
        replace(config, model=replace(config.model, route_from=0, route_to=1))
