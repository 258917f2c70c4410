"""Layers of a token route see a part of the tokens, as a plain loop of gather and scatter does."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from dit.batch import CleanTokens, Problem, ReferenceGrids, Route, SequenceShard
from dit.config.sparsity import TokenRoute
from dit.distributed.model_parallel import split_tokens
from dit.models.dit.family import ExtraPosition
from dit.models.dit.model import DiT
from dit.models.layer_spec import JOINT_TOKENS, TEXT_TOKENS, TOKENS
from dit.models.stacks import stacked_transformer
from dit.models.stacks.token_routing import kept_pack
from dit.objectives.objective import real_only
from dit.objectives.pack_draws import Draw, pack_rng
from dit.objectives.token_draws import draw_route
from dit.train.model_and_optimizer import randomise
from tests.packs import random_pack, single, tiny_model
from tests.toy_networks import NETWORKS, RECOMPUTED, level_rows, toy_model, toy_pack

GRIDS, TEXTS = [(1, 4, 6), (3, 3, 5), (1, 1, 1), (2, 4, 3)], [9, 4, 4, 30]
LEVELS = torch.tensor([0.1, -0.2, 0.4, 0.3])
ROUTES = {
    "joint": [(1, 3), (0, 4), (3, 3)],  # layers 0 and 1 are double-stream
    "double": [(0, 0), (1, 1)],
    "cross": [(1, 2), (0, 3)],
    "wan_flf2v": [(0, 1)],
    "wan_ti2v": [(0, 0)],
    "flux": [(0, 1)],
    "dit": [(1, 2)],
}
CASES = [(name, *route) for name, routes in ROUTES.items() for route in routes]


def _model(name: str, **changes):
    if name == "dit":
        learned = {"extra_pos_embed": ExtraPosition.LEARNABLE, "max_size": (4, 16, 16)}
        return tiny_model(num_layers=4, **learned | changes)
    return toy_model(name, **changes)


def _network(groups, name: str, **changes):
    network = NETWORKS.get(name, DiT)(_model(name, **changes), groups)
    randomise(network, seed=7)
    return network.train()


def _pack(name: str, *, rate: float = 0.5, multiple: int = 8):
    model = _model(name)
    build = random_pack if name == "dit" else toy_pack
    args = {"model": model} if name == "dit" else {}
    batch = build(*(() if args else (model,)), GRIDS, TEXTS, multiple=multiple, **args)
    route = TokenRoute.of_rate(rate, first=0, last=0)
    return draw_route(batch, route, torch.Generator().manual_seed(3))


def _results(network, batch, weight_TC) -> dict[str, torch.Tensor]:
    network.zero_grad()
    out_TC = network(batch.latent_TC, level_rows(LEVELS, batch), batch)
    (out_TC * weight_TC)[batch.is_real_T].sum().backward()
    found = {n: p.grad.clone() for n, p in network.named_parameters()}
    return found | {"output": out_TC.detach()[batch.is_real_T]}


def _kept_rows(batch, n: int, route: TokenRoute) -> list[int]:
    """Real tokens of a sample that the layers see, counted in the sample."""
    start, stop = batch.starts[n : n + 2]
    rows = []
    for first in range(start, stop, route.run):
        moves = batch.method(Route).move_T[first : first + route.kept].tolist()
        rows += [first + i + move - start for i, move in enumerate(moves)]
    return [row for row in rows if row < batch.num_tokens[n]]


def _one_by_one(network, batch, route: TokenRoute) -> torch.Tensor:
    """Output of the real tokens, sample by sample and layer by layer."""
    outputs = []
    for n, (start, _) in enumerate(pairwise(batch.starts)):
        alone = single(batch, n)
        real, kept = alone.real_tokens, torch.tensor(_kept_rows(batch, n, route))
        few = alone.with_tensors({name: x[kept] for name, x in alone.token_tensors.items()})
        few = replace(
            few.without(ReferenceGrids), starts=(0, len(kept)), grids=((1, 1, len(kept)),)
        )
        if (given := few.method(CleanTokens)) is not None:
            few = few.with_method(replace(given, counts=(0,)))
        outputs.append(_looped(network, alone, few, kept, route, LEVELS[n : n + 1])[:real])
        assert start % route.run == 0
    return torch.cat(outputs)


def _looped(network, alone, few, kept, route, level_N):
    alone, few = network.prepared(alone), network.prepared(few)
    layouts = network.layout(alone), network.layout(few)
    blocks = network.embed(alone.latent_TC, level_rows(level_N, alone), alone, layouts[0])
    few_blocks = {n: x[kept] if n in (TOKENS, "position") else x for n, x in blocks.items()}
    conditions = (
        network.conditions(blocks, alone, layouts[0]),
        network.conditions(few_blocks, few, layouts[1]),
    )
    h_TD, text_LD = blocks[TOKENS], blocks.get(TEXT_TOKENS)
    layers = [layer for stack in network.stacks.values() for layer in stack.layers]
    for number, layer in enumerate(layers):
        inside = route.first <= number <= route.last
        rows = kept if inside else torch.arange(len(h_TD))
        seen, x_TD = conditions[inside], h_TD[rows]
        if layer.rows == (TOKENS,):
            x_TD = layer(x_TD, seen)
        elif layer.rows == (JOINT_TOKENS,):
            joint_JD = layer(seen.order.join((x_TD, text_LD)), seen)
            x_TD, text_LD = seen.order.split(joint_JD)
        else:
            x_TD, text_LD = layer((x_TD, text_LD), seen)
        h_TD = h_TD.index_copy(0, rows, x_TD)
    blocks = {**blocks, TOKENS: h_TD}
    return network.head(blocks, alone, layouts[0]).float()


@pytest.mark.parametrize(
    ("name", "first", "last", "rate"),
    [*((*case, 0.5) for case in CASES), ("joint", 1, 3, 0.25), ("wan_ti2v", 0, 0, 0.75)],
)
def test_a_pack_gives_what_a_loop_over_samples_gives(groups, name, first, last, rate):
    network = _network(groups, name, route_from=first, route_to=last, route_rate=rate)
    batch, route = _pack(name, rate=rate), network.model.token_route
    weight_TC = torch.randn(batch.latent_TC.shape, generator=torch.Generator().manual_seed(2))
    found = _results(network, batch, weight_TC)
    network.zero_grad()
    out_RC = _one_by_one(network, batch, route)
    (out_RC * weight_TC[batch.is_real_T]).sum().backward()
    torch.testing.assert_close(found.pop("output"), out_RC.detach(), rtol=1e-5, atol=1e-5)
    wanted = {n: p.grad for n, p in network.named_parameters()}
    furthest = max(((found[n] - g).norm() / g.norm()).item() for n, g in wanted.items() if g.norm())
    assert furthest <= 1e-4
    dense = _network(groups, name)
    apart = (_results(dense, batch, weight_TC)["output"] - out_RC.detach()).norm()
    assert apart > 1e-3 * out_RC.norm()  # which layers see what is told


@pytest.mark.parametrize("field", ["position_TA", "level_row_T"])
def test_rows_of_other_tokens_would_be_found(groups, monkeypatch, field):
    network = _network(groups, "wan_ti2v", route_from=0, route_to=0)
    batch, route = _pack("wan_ti2v"), network.model.token_route

    def others(batch, route):
        kept = kept_pack(batch, route)
        return kept.with_tensors({field: kept.tensors[field].roll(1, 0)})

    monkeypatch.setattr(stacked_transformer, "kept_pack", others)
    with torch.no_grad():
        out_TC = network(batch.latent_TC, level_rows(LEVELS, batch), batch)
        wanted_RC = _one_by_one(network, batch, route)
    assert (out_TC[batch.is_real_T] - wanted_RC).norm() > 1e-3 * wanted_RC.norm()


@pytest.mark.parametrize(("name", "first", "last"), CASES)
def test_closed_gates_pass_every_token_bit_for_bit(groups, name, first, last):
    """Random weights, but that gates are zero: each layer is the identity."""
    without = {"extra_pos_embed": ExtraPosition.NONE} if name == "dit" else {}  # no gate holds them
    route = {"route_from": first, "route_to": last, "route_rate": 0.25}  # runs that do not mirror
    network, batch = _network(groups, name, **route, **without), _pack(name, rate=0.25)
    _close_gates(network)
    x_TC, levels = batch.latent_TC, level_rows(LEVELS, batch)
    with torch.no_grad():
        routed = network(x_TC, levels, batch)
        dense = network(x_TC, levels, batch.without(Route))
    assert torch.equal(routed[batch.is_real_T], dense[batch.is_real_T])
    assert dense[batch.is_real_T].norm() > 0


def _close_gates(network) -> None:
    for stack in network.stacks.values():
        for layer in stack.layers:
            for name, weight in layer.named_parameters():
                if any(part in name for part in ("linear_proj", "linear_fc2", "linear_out")):
                    weight.data.zero_()


@pytest.mark.parametrize("name", ["joint", "cross", "dit"])
def test_a_rate_of_zero_leaves_nothing_out(groups, name):
    batch = _pack(name, rate=0.0)
    weight_TC = torch.ones_like(batch.latent_TC)
    through = _network(groups, name, route_from=1, route_to=2, route_rate=0.0)
    found, plain = (_results(n, batch, weight_TC) for n in (through, _network(groups, name)))
    for n, value in plain.items():
        torch.testing.assert_close(found[n], value, rtol=1e-6, atol=1e-6 * value.norm().item())


@pytest.mark.parametrize("name", ["joint", "wan_ti2v"])
def test_without_a_draw_nothing_changes(groups, name):
    """As in validation and generation; the route of the configuration says nothing there."""
    batch = _pack(name).without(Route)
    weight_TC = torch.ones_like(batch.latent_TC)
    routed = _network(groups, name, route_from=0, route_to=1)
    found, plain = (_results(n, batch, weight_TC) for n in (routed, _network(groups, name)))
    for n, value in plain.items():  # a route may pad texts, and some kernels round by the rows
        assert (found[n] - value).abs().max() <= 1e-5 * value.abs().max(), n


@pytest.mark.parametrize(
    "changes",
    [
        *RECOMPUTED,
        {"cpu_offloading_num_layers": 4},
    ],
    ids=["full", "groups", "block", "selective", "offload"],
)
@pytest.mark.parametrize("name", ["joint", "cross"])
def test_recomputation_and_offload_change_no_bit(groups, name, changes):
    batch, route = _pack(name), {"route_from": 1, "route_to": 2}
    weight_TC = torch.ones_like(batch.latent_TC)
    plain = _results(_network(groups, name, **route), batch, weight_TC)
    found = _results(_network(groups, name, **route, **changes), batch, weight_TC)
    assert all(torch.equal(found[n], value) for n, value in plain.items())


SHARES = [
    {"count": 2},
    {"count": 2, "halves": True},
    {"count": 2, "contiguous": True},
    {"count": 4},
]


@pytest.mark.parametrize("rate", [0.5, 0.25, 0.75])
@pytest.mark.parametrize("kind", SHARES, ids=["parts", "ring", "pieces", "four parts"])
def test_each_rank_keeps_its_share_of_what_a_whole_pack_keeps(kind, rate):
    """A rank's part of the kept pack is what is kept of its part of the pack, filling included."""
    batch = _pack("wan_ti2v", rate=rate, multiple=16)
    route = TokenRoute.of_rate(rate, first=0, last=0)
    problem = _problem(batch)
    whole = kept_pack(batch, route)
    assert whole.starts[-1] == len(whole.segment_T) == len(batch.segment_T) * (1 - rate)
    for index in range(kind["count"]):
        share = SequenceShard(index=index, **kind)
        part, _ = split_tokens(batch, problem, share=share, multiple=3 * route.run)
        found = kept_pack(part, route)
        wanted, _ = split_tokens(whole, _problem(whole), share=share, multiple=3 * route.kept)
        assert found.tensors.keys() == wanted.tensors.keys()
        rows = len(whole.rows(share))
        for name, value in wanted.token_tensors.items():
            assert torch.equal(found.token_tensors[name][:rows], value[:rows]), name
        assert len(found.segment_T) == len(part.segment_T) // route.run * route.kept
        assert (found.starts, found.shared_spans) == (wanted.starts, wanted.shared_spans)


def _problem(batch):
    zeros_N = torch.zeros(batch.num_samples)
    x_TC = real_only(batch.latent_TC.float(), batch)
    return Problem(
        input_TC=x_TC, level_M=zeros_N, target_TC=x_TC, weight_N=zeros_N, noise_N=zeros_N
    )


@pytest.mark.parametrize("rate", [0.5, 0.25, 0.75])
def test_the_draw_follows_from_real_tokens_and_keeps_so_many_of_each_run(rate):
    route = TokenRoute.of_rate(rate, first=0, last=0)
    seen = {}
    for multiple in (8, 16):
        batch = _pack("cross", rate=rate, multiple=multiple)
        rows = [_kept_rows(batch, n, route) for n in range(batch.num_samples)]
        seen[multiple] = rows
        for kept, real in zip(rows, batch.num_tokens, strict=True):
            assert len({*kept}) == len(kept) == route.tokens(real)
            assert kept == sorted(kept)
            runs = [row // route.run for row in kept]
            whole = real // route.run
            assert all(runs.count(run) == route.kept for run in range(whole))
    assert seen[8] == seen[16]  # padding does not move it


def test_the_draw_is_its_own():
    batch = _pack("cross")
    route = TokenRoute.of_rate(0.5, first=0, last=0)

    def drawn(**of):
        named = {"seed": 1, "step": 2, "pack_id": 3} | of
        rng = pack_rng(**named, device=torch.device("cpu"), draw=Draw.ROUTE)
        return draw_route(batch, route, rng).method(Route).move_T

    assert torch.equal(drawn(), drawn())
    assert not any(
        torch.equal(drawn(), drawn(**of)) for of in ({"seed": 2}, {"step": 3}, {"pack_id": 4})
    )
