"""A run with a token route: what is refused, said and counted, where it is absent, its resume."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dit.config import ContextComm, LoraConfig, MockGeometry, Problems, RunConfig
from dit.config.sparsity import TokenRoute
from dit.models.dit.model import DiT
from dit.objectives.registry import training_objective
from dit.objectives.token_draws import draw_route
from dit.objectives.training_target import training_problem
from dit.planner.times import expected_load
from dit.planner.traffic import traffic
from dit.sizing.activations import seen_tokens
from dit.sizing.flops import forward_flops, pack_forward_flops
from dit.sizing.memory import memory
from dit.sizing.passes import data_lines, route_lines
from dit.train.model_and_optimizer import randomise
from dit.train.validation import validate
from tests.families.flux import flux_model
from tests.learning import assert_equal, tiny_run, weights_and_averages
from tests.packs import random_pack
from tests.resuming import STEPS, built, resumed, saved, step
from tests.toy_networks import NETWORKS, level_rows, toy_model, toy_pack

ROUTE = {"route_from": 1, "route_to": 2}


def _run(**model) -> RunConfig:
    return tiny_run(num_layers=4, **model)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"route_from": 1}, "route_from=1 and route_to=None .* set both, or neither"),
        ({"route_from": 2, "route_to": 1}, r"must be layers, .* counted from 0 to 3"),
        ({"route_from": 0, "route_to": 4}, r"route_to=4 must be layers"),
        ({**ROUTE, "route_rate": 1.0}, r"route_rate=1.0 must lie in \[0, 1\)"),
        (
            {**ROUTE, "route_rate": 0.3},
            "route_rate=0.3 sets 3 of 10 neighbouring tokens apart, and"
            " dataset.sample_multiple=16 does not divide by 10; use dataset.sample_multiple=80",
        ),
        (
            {
                **ROUTE,
                "route_rate": 0.125,
                "context_parallel_size": 4,
                "cp_comm_type": ContextComm.ALL_GATHER,
            },
            "sets 1 of 8 neighbouring tokens apart in each of 4 pieces .* use"
            " dataset.sample_multiple=32",
        ),
        (
            {
                **ROUTE,
                "route_rate": 0.25,
                "context_parallel_size": 4,
                "cp_comm_type": ContextComm.P2P,
            },
            "in each of 8 pieces of a sample, and dataset.sample_multiple=16 does not divide by 32",
        ),
    ],
)
def test_a_route_that_cannot_be_is_refused_by_name(keys, said):
    with pytest.raises(Problems, match=said):
        _run(**keys)


def test_short_samples_and_adapters_are_warned_of():
    def said(config: RunConfig) -> str:
        return "\n".join(route_lines(config, None))

    def of(side: int, **model) -> RunConfig:
        geometry = MockGeometry(height=side, width=side, text_length=4, weight=1.0)
        config = _run(**model)
        data = replace(config.dataset, mock=True, mock_samples=(geometry,))
        return replace(config, dataset=replace(data, task_encoder_seq_length=1024))

    assert said(of(32)) == ""
    assert said(of(32, **ROUTE)).startswith(
        "token routing: layers 1 to 2 of 4 see 1 of each 2 tokens in training, for about 70% of"
    )
    # Text that is attended with is never left out, so that it makes the part larger.
    joint = flux_model(route_from=1, route_to=2)
    geometry = MockGeometry(height=64, width=64, text_length=512, weight=1.0)
    data = replace(of(64).dataset, mock_samples=(geometry,))
    flux = RunConfig(model=joint, dataset=data)
    counts = {"tokens": [1024], "text": [512]}
    part = forward_flops(joint, **counts) / forward_flops(joint.with_all_tokens(), **counts)
    assert f"for about {part:.0%} of the operations of a step" in said(flux)
    assert "WARNING: samples have about 256 tokens" in said(of(32, **ROUTE))
    assert "WARNING" not in said(of(64, **ROUTE))
    assert data_lines(of(64)) == "" and data_lines(of(64, **ROUTE)).startswith("# route  ")
    adapted = replace(of(64, **ROUTE), lora=LoraConfig(rank=2))
    assert "the frozen layers have never seen a part of the tokens" in said(adapted)


@pytest.mark.parametrize("rate", [0.5, 0.75])
@pytest.mark.parametrize(("name", "last"), [("dit", 1), ("flux", 2), ("wan_ti2v", 1)])
def test_counted_operations_are_those_of_torch(groups, name, last, rate):
    """Those that the route spares; of a DiT, and of Wan, all of them too."""
    route = {"route_from": 1, "route_to": last, "route_rate": rate}
    model = toy_model("cross" if name == "dit" else name, **route)
    network = NETWORKS.get(name, DiT)(model, groups)
    randomise(network, seed=1)
    # No padding: torch cannot know which tokens count.
    few = 1 if name == "flux" else 2  # the second sample of FLUX has a reference
    batch = toy_pack(model, [(1, 4, 4), (1, 8, 2)][:few], [4, 8][:few])
    assert batch.real_tokens == batch.starts[-1]
    assert model.token_route is not None
    routed = draw_route(batch, model.token_route, torch.Generator())
    levels, found = level_rows(torch.zeros(batch.num_samples), batch), []
    for pack in (routed, batch):
        # The counter has no formula for the CPU's fused attention, so that one runs unfused.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            network(pack.latent_TC, levels, pack)
        found.append(counter.get_total_flops())
    counted = [pack_forward_flops(model, pack) for pack in (routed, batch)]
    assert found[1] - found[0] == counted[1] - counted[0] > 0
    assert found == counted or name == "flux"


def test_memory_and_planner_count_the_tokens_that_layers_see():
    plain, routed = _run(), _run(**ROUTE)
    assert seen_tokens(routed.model) == 0.75 and seen_tokens(plain.model) == 1
    need = [memory(one, world_size=1) for one in (plain, routed)]
    assert need[1].activations == pytest.approx(0.75 * need[0].activations, rel=0.1)
    assert need[1].activations < need[0].activations and need[1].weights == need[0].weights
    loads = [expected_load(one, fill=1.0) for one in (plain, routed)]
    assert loads[1].flops < loads[0].flops and loads[1].attention < loads[0].attention
    assert loads[1].tokens == loads[0].tokens
    split = {"tensor_model_parallel_size": 2, "context_parallel_size": 2}
    split |= {"pipeline_model_parallel_size": 2, "num_attention_heads": 4}
    sent = [
        traffic(_run(**split, **more), tokens=1024, accumulated=1, replicas=1)
        for more in ({}, ROUTE)
    ]
    assert sent[1].tensor == 0.75 * sent[0].tensor and sent[1].context == 0.75 * sent[0].context
    assert sent[1].pipeline == sent[0].pipeline  # waiting tokens travel as well


def test_planner_knows_which_passes_without_gradients_see_all_tokens():
    """Five exchanges of both passes that learn, and two of the one before."""

    def sent(options: dict[str, float], lora: LoraConfig, **model) -> float:
        config = _run(tensor_model_parallel_size=2, **model)
        objective = replace(config.objective, **options)
        config = replace(config, objective=objective, lora=lora)
        return traffic(config, tokens=1024, accumulated=1, replicas=1).tensor

    for options, lora, part in (
        ({"cfg_target": 2.0}, LoraConfig(), (5 * 0.75 + 2) / 7),
        ({"drift_weight": 0.5}, LoraConfig(rank=2), 0.75),
    ):
        assert sent(options, lora, **ROUTE) == pytest.approx(part * sent(options, lora))


def test_validation_sees_all_tokens(groups):
    objective = training_objective(_run().objective)
    losses = []
    for config in (_run(), _run(**ROUTE)):
        model = built(config, groups)
        pack = random_pack([(1, 4, 4), (2, 3, 3)], [5, 2], model=config.model)
        losses.append(validate(model, [pack], objective=objective, config=config))
    assert losses[0] == losses[1]


def test_a_draw_moves_no_other_draw():
    config = _run(**ROUTE)
    pack = random_pack([(1, 4, 4), (2, 3, 3)], [5, 2], model=config.model)
    made = [
        training_problem(
            training_objective(config.objective),
            pack,
            seed=1,
            step=2,
            null={"text": torch.zeros(1, config.model.crossattn_emb_size)},
            options=config.objective,
            route=route,
        )
        for route in (None, config.model.token_route)
    ]
    (plain, problem), (routed, other) = made
    assert plain.route_T is None and routed.route_T is not None
    for name, value in plain.tensors.items():
        assert torch.equal(routed.tensors[name].nan_to_num(), value.nan_to_num()), name
    assert torch.equal(problem.input_TC, other.input_TC)
    assert torch.equal(problem.level_M, other.level_M)


def test_a_resumed_run_sees_the_tokens_of_one_that_was_not_stopped(groups, tmp_path):
    config = _run(**ROUTE)
    straight = built(config, groups)
    for number in range(1, STEPS + 1):
        step(straight, config, number)
    place = saved(tmp_path, straight, config)
    step(straight, config, STEPS + 1)
    going_on = resumed(place, config, groups)
    step(going_on, config, STEPS + 1)
    assert_equal(weights_and_averages(going_on), weights_and_averages(straight))
    dense = resumed(place, _run(), groups)
    step(dense, _run(), STEPS + 1)
    moved = zip(weights_and_averages(dense), weights_and_averages(straight), strict=True)
    assert not all(torch.equal(one, other) for one, other in moved)


def test_a_part_of_a_sample_is_counted_run_by_run():
    route = TokenRoute.of_rate(0.75, first=1, last=2)
    assert (route.run, route.kept) == (4, 1)
    # Of a rank's rows, tensor ranks have equal parts, which are whole runs.
    split = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    assert _run(**ROUTE, **split, route_rate=0.75).model.token_multiple == 8
    assert [route.tokens(real) for real in (1, 4, 5, 8)] == [1, 1, 2, 2]
    assert route.parts(0, 4) == [(0, 1, False), (1, 3, True), (3, 4, False)]
    assert route.parts(2, 3) == [(2, 3, True)]
    assert [route.holds(layer) for layer in range(5)] == [False, False, True, False, False]
