"""Targets moved along guidance, and the distance to the network without adapters."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dit.batch import Problem
from dit.config import (
    FlowPrediction,
    LoraConfig,
    MockGeometry,
    ObjectiveConfig,
    Problems,
    TargetSchedule,
)
from dit.lora.targets import chosen_adapters
from dit.objectives.registry import training_objective
from dit.objectives.training_target import training_problem
from dit.train.loss import loss_of
from dit.train.model_and_optimizer import build_model_and_optimizer
from dit.train.reference_passes import cfg_factors, reference_passes
from dit.train.references import References, with_references
from dit.train.trainer import measure_steps
from tests.learning import tiny_run
from tests.packs import random_pack

FLOW = ObjectiveConfig(name="flow", text_dropout=0.0)
GRIDS, TEXTS = [(1, 4, 4), (2, 3, 3), (1, 1, 1)], [5, 2, 1]
NULL = {"text": torch.full((3, 8), 0.7)}


def steps_of(objective: ObjectiveConfig, steps: int = 1) -> list[dict[str, Any]]:
    mixture = (MockGeometry(height=8, width=8, text_length=3, weight=1.0),)
    data = {"mock_samples": mixture, "task_encoder_seq_length": 64, "packing_buffer_size": 4}
    config = replace(tiny_run(), objective=objective)
    config = replace(config, dataset=replace(config.dataset, num_workers=0, **data))
    return measure_steps(config, warm_up=0, steps=steps, around=nullcontext())


def test_a_network_that_says_nothing_has_the_square_of_the_factor(groups) -> None:
    """At the start the network says 0 with and without caption: the target is w v."""
    (plain,) = steps_of(FLOW)
    (moved,) = steps_of(replace(FLOW, cfg_target=3.0))
    assert moved["loss"] == pytest.approx(9 * plain["loss"], rel=1e-6)
    assert moved["grad_norm"] == pytest.approx(3 * plain["grad_norm"], rel=1e-6)
    (all_dropped,) = steps_of(replace(FLOW, cfg_target=3.0, text_dropout=1.0))
    assert all_dropped["loss"] == pytest.approx(plain["loss"], rel=1e-6)


@pytest.mark.parametrize("objective", [FLOW, ObjectiveConfig()], ids=["flow", "edm"])
def test_a_factor_of_one_changes_no_bit(objective: ObjectiveConfig, groups) -> None:
    plain, one = (steps_of(o, 3) for o in (objective, replace(objective, cfg_target=1.0)))
    for name in ("loss", "grad_norm"):
        assert [step[name] for step in plain] == [step[name] for step in one]
    # A pass more in the operations, beside the three of a step; its captions are shorter.
    assert one[0]["model_tflops"] * one[0]["step_time_s"] == pytest.approx(
        4 / 3 * plain[0]["model_tflops"] * plain[0]["step_time_s"], rel=0.02
    )


def test_dropped_captions_keep_their_targets_and_the_level_scales_the_others() -> None:
    noise_N, dropped = torch.tensor([0.25, 1.0, 0.5]), [False, False, True]
    constant = replace(FLOW, cfg_target=3.0)
    assert cfg_factors(noise_N, dropped, options=constant).tolist() == [3, 3, 1]
    by_level = replace(constant, cfg_target_schedule=TargetSchedule.LEVEL)
    assert cfg_factors(noise_N, dropped, options=by_level).tolist() == [1.5, 3, 1]


def a_problem() -> tuple[Any, Problem, Tensor, Tensor]:
    model = tiny_run().model
    batch = random_pack(GRIDS, TEXTS, model=model)
    state_TC, target_TC, u_TC, said_TC = torch.randn(4, *batch.latent_TC.shape).double()
    ones_N = torch.ones(batch.num_samples)
    problem = Problem(
        input_TC=state_TC, level_M=ones_N, target_TC=target_TC, weight_N=ones_N, noise_N=ones_N
    )
    u_TC[~batch.is_target_T] = torch.nan  # what a network says of padding is never read
    return batch, problem, u_TC, said_TC


def test_both_forms_of_the_loss_are_equal_up_to_the_square_of_the_factor() -> None:
    batch, problem, u_TC, said_TC = a_problem()
    w, real = 4.0, batch.is_target_T
    factor_N = torch.full((batch.num_samples,), w, dtype=torch.float64)
    references = References(factor_N=[factor_N], uncaptioned_TC=[u_TC])
    ours, theirs = (said_TC.clone().requires_grad_() for _ in range(2))
    moved = with_references(batch, problem, references, 0)
    loss_of(batch, moved, ours, FLOW).total.backward()
    augmented_TC = (theirs + (w - 1) * u_TC) / w - problem.target_TC
    augmented_TC[real].square().mean(-1).sum().backward()
    assert ours.grad is not None and theirs.grad is not None and ours.grad.isfinite().all()
    torch.testing.assert_close(ours.grad[real], w**2 * theirs.grad[real], rtol=1e-5, atol=1e-6)


def test_a_linear_network_ends_at_the_guided_target() -> None:
    """f = b + c [caption] of constant targets: b ends at v0, and b + c at v0 + w (v - v0)."""
    batch, problem, *_ = a_problem()
    w, v, v0, dropped = 3.0, 2.0, 0.5, [False, True, False]
    problem = replace(problem, noise_N=torch.ones(3))
    is_dropped_T1 = torch.tensor(dropped)[batch.segment_T, None]
    target_TC = torch.where(is_dropped_T1, v0, v).expand_as(problem.target_TC)
    problem = replace(problem, target_TC=target_TC.masked_fill(~batch.is_target_T[:, None], 0))
    factor_N = cfg_factors(problem.noise_N, dropped, options=replace(FLOW, cfg_target=w))
    b, c = (torch.zeros((), requires_grad=True) for _ in range(2))
    for _ in range(300):
        u_TC = b.detach().expand_as(problem.input_TC)
        moved = with_references(
            batch, problem, References(factor_N=[factor_N], uncaptioned_TC=[u_TC]), 0
        )
        said_TC = torch.where(is_dropped_T1, b, b + c).expand_as(problem.input_TC)
        loss = loss_of(batch, moved, said_TC, FLOW).error_T.sum() / batch.real_tokens
        for one, slope in zip((b, c), torch.autograd.grad(loss, (b, c)), strict=True):
            one.data -= 0.2 * slope
    assert (b.item(), (b + c).item()) == pytest.approx((v0, v0 + w * (v - v0)), abs=1e-3)


def a_run(
    objective: ObjectiveConfig, groups, *, adapted: bool, **model: Any
) -> tuple[Any, list[Any], Any]:
    """A run whose network says something, its pack, and the network."""
    lora = LoraConfig(rank=2, dropout=0.5) if adapted else LoraConfig()
    config = replace(tiny_run(**model), objective=objective, lora=lora)
    chosen = chosen_adapters(config.model, lora) if adapted else None
    built = build_model_and_optimizer(config, groups, adapters=chosen)
    network: Any = built.chunks[0].module
    generator = torch.Generator().manual_seed(3)
    for parameter in network.parameters():
        parameter.data.normal_(std=0.2, generator=generator)
    run = SimpleNamespace(
        config=config, model=built, objective=training_objective(objective), null=NULL
    )
    packs = [random_pack(GRIDS, TEXTS, model=config.model)]
    return run, packs, network


def item_of(run: Any, pack: Any, options: ObjectiveConfig) -> Any:
    seed, route = run.config.rng.seed, run.config.model.token_route
    return training_problem(
        run.objective, pack, seed=seed, step=4, null=NULL, options=options, route=route
    )


def said(network: nn.Module, item: Any) -> Tensor:
    batch, problem = item
    network.eval()
    with torch.no_grad():
        return network(problem.input_TC, problem.level_M, batch).float()


def test_without_caption_is_the_pack_that_has_null_captions(groups) -> None:
    """Adapters drop nothing of it, here at a rate of 0.5."""
    objective = replace(FLOW, cfg_target=2.0, text_dropout=0.3)
    run, packs, network = a_run(objective, groups, adapted=True)
    item = item_of(run, packs[0], objective)
    found = reference_passes(run, packs, [item], step=4)
    assert found is not None and not found.unadapted_TC and network.training
    nulls = [NULL["text"]] * 3
    batch = packs[0].with_text("text", torch.cat(nulls), (0, 3, 6, 9))
    expected = said(network, item_of(run, batch, replace(objective, text_dropout=0.0)))
    real = batch.is_target_T
    torch.testing.assert_close(found.uncaptioned_TC[0][real], expected[real])
    assert (found.uncaptioned_TC[0] - said(network, item))[real].abs().max() > 1e-3


def test_the_anchor_is_the_network_without_its_adapters(groups) -> None:
    objective = replace(FLOW, drift_weight=0.5)
    run, packs, network = a_run(objective, groups, adapted=True)
    item = item_of(run, packs[0], objective)
    found = reference_passes(run, packs, [item], step=4)
    assert found is not None and not found.uncaptioned_TC and network.training
    adapted_TC = said(network, item)
    for module in network.modules():
        if getattr(module, "lora", None) is not None:
            module.lora = None
    base_TC, (batch, problem) = said(network, item), item
    real = batch.is_target_T
    torch.testing.assert_close(found.unadapted_TC[0][real], base_TC[real])
    anchored = with_references(batch, problem, found, 0)
    ours = loss_of(batch, anchored, adapted_TC, objective).error_T
    plain = loss_of(batch, problem, adapted_TC, objective).error_T
    away = (adapted_TC - base_TC).square().mean(-1)
    assert away[real].max() > 1e-3
    torch.testing.assert_close(ours[real], (plain + 0.5 * away)[real])


@pytest.mark.parametrize(
    "options",
    [
        {"cfg_target": 2.0},
        {"cfg_target": 2.0, "second_level_rate": 0.5},
        {"drift_weight": 0.5},
        {"drift_weight": 0.5, "second_level_rate": 0.5},
    ],
)
def test_operations_are_those_that_torch_counts(groups, options: dict[str, Any]) -> None:
    """By all tokens without caption, and by those of the route without adapters."""
    objective = replace(FLOW, **options)
    route = {"num_layers": 4, "route_from": 1, "route_to": 2}
    run, _, _ = a_run(objective, groups, adapted="drift_weight" in options, **route)
    # No padding: torch cannot know which tokens count.
    pack = random_pack([(1, 4, 4), (2, 4, 4)], [5, 2], model=run.config.model)
    item = item_of(run, pack, objective)
    reference_passes(run, [pack], [item], step=4)  # the network is asked for its operations once
    # The counter has no formula for the CPU's fused attention, so that one runs unfused.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        found = reference_passes(run, [pack], [item], step=4)
    assert found is not None and found.flops == counter.get_total_flops() > 0


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(
        Problems, match=r"drift_weight=0\.5 is a distance to the network without its"
    ):
        replace(tiny_run(), objective=replace(FLOW, drift_weight=0.5))
    with pytest.raises(Problems, match=r"cfg_target=-1\.0 must lie in \(0, 100\]"):
        ObjectiveConfig(cfg_target=-1.0)
    with pytest.raises(Problems, match="cfg_target_schedule=level needs name=flow and"):
        ObjectiveConfig(cfg_target=2.0, cfg_target_schedule=TargetSchedule.LEVEL)
    assert FlowPrediction.X  # both go together: the target is what the network says
    replace(FLOW, cfg_target=2.0, prediction=FlowPrediction.X)
