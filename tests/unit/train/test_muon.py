"""Muon: iterations with known answers, torch's own Muon, AdamW beside it, resumes, refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dit.checkpoint_paths import CheckpointError
from dit.config import (
    DdpConfig,
    LoraConfig,
    MomentType,
    OptimizerConfig,
    OptimizerKind,
    ParameterGroup,
    Precision,
    Problems,
    RunConfig,
)
from dit.config.training import NewtonSchulz
from dit.distcp import tensor_names
from dit.distributed.data_parallel import chained_optimizers, main_param_shards, named_weights
from dit.models.linears import linear_shapes, orthogonalisation, orthogonalised
from dit.models.registry import family_named, pairs
from dit.train.checkpoint.shares import data_of, entries_of, weight_of
from dit.train.model_and_optimizer import ModelAndOptimizer
from dit.train.optimizer.muon import coefficients, orthogonalise
from dit.train.optimizer.states import optimizer_values
from dit.train.step import optimizer_step
from tests.families.flux import flux_model
from tests.families.wan import wan_model
from tests.resuming import built, resumed, saved
from tests.resuming import step as step_on_a_pack

OPTIONS: dict[str, Any] = {
    "kind": OptimizerKind.MUON,
    "lr": 1e-2,
    "weight_decay": 0.1,
    "clip_grad": 0.0,
}
FLUX, WAN = flux_model(), wan_model()
FLUX2: Any = family_named("flux2").config(
    name="custom", **family_named("flux2").tiny["flux2_klein_4b"]
)
BOUNDS = {
    NewtonSchulz.SIMPLE: (0.68, 1.20, 0.002),
    NewtonSchulz.QUINTIC: (0.97, 1.11, 0.005),
    NewtonSchulz.POLAR_EXPRESS: (0.86, 1.13, 0.005),
}
"""Where singular values come to lie, and from which part of the norm on."""


def run(*, sharded: bool = True, model: Any = WAN, **optimizer: Any) -> RunConfig:
    return RunConfig(
        model=model,
        optimizer=OptimizerConfig(**(OPTIONS | optimizer)),
        ddp=DdpConfig(use_distributed_optimizer=sharded),
    )


def gradients(model: ModelAndOptimizer, number: int) -> dict[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    network = model.chunks[0].module
    return {p: torch.randn(p.shape, generator=generator) for p in network.parameters()}


def step(model: ModelAndOptimizer, config: RunConfig, given: dict[Tensor, Tensor]) -> None:
    for p, gradient in given.items():
        p.main_grad.copy_(gradient)  # type: ignore[attr-defined]
    optimizer_step(model, config=config, number=1, loss=1.0)


def matrices(model: ModelAndOptimizer, config: RunConfig) -> dict[Tensor, Any]:
    """Weight -> its pair, of those that Muon updates."""
    pairs = {
        (pair.ours, pair.layer): pair for pair in orthogonalised(config.model, config.optimizer)
    }
    entries = entries_of(model.modules[0])
    return {data_of(e): pairs[weight_of(e)] for e in entries if weight_of(e) in pairs}


def moved_by(config: RunConfig, groups: Any, given: Any) -> dict[str, Tensor]:
    """By how much each weight of a new model changes in a step of gradients `given` makes."""
    model = built(config, groups)
    before = {name: weight.detach().clone() for name, weight in named_weights(model.chunks[0])}
    step(model, config, given(model))
    return {name: w.detach() - before[name] for name, w in named_weights(model.chunks[0])}


@pytest.mark.parametrize("kind", NewtonSchulz)
@pytest.mark.parametrize("shape", [(48, 80), (80, 48), (48, 48)])
def test_iterations_bring_singular_values_near_one(kind, shape):
    low, high, least = BOUNDS[kind]
    torch.manual_seed(0)
    x = torch.randn(shape)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    assert (s / s.square().sum().sqrt()).min() > least / 10
    s = torch.linspace(1, 40 * least, len(s))  # of a norm of about 4
    x = u @ torch.diag(s) @ v
    found = orthogonalise(x, coefficients(OptimizerConfig(muon_coefficients=kind)))
    inside = torch.diag(u.T @ found @ v.T)
    assert low <= inside.min()
    assert inside.max() <= high
    torch.testing.assert_close(u @ torch.diag(inside) @ v, found, rtol=0, atol=1e-5)


def test_further_iterations_repeat_the_last_coefficients():
    each = coefficients(OptimizerConfig(muon_steps=8))
    assert len(each) == 8
    assert each[4] == each[5] == each[7] != each[3]


@pytest.mark.parametrize("model", [WAN, FLUX], ids=["wan", "flux"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("sharded", [True, False])
def test_steps_are_those_of_torch_on_each_linear_of_diffusers(
    groups, monkeypatch, model, nesterov, sharded
):
    """Queries, keys, values and the feed-forward of a single-stream layer each by themselves."""
    options = {"muon_coefficients": NewtonSchulz.SIMPLE, "muon_nesterov": nesterov}
    config = run(model=model, sharded=sharded, **options)
    ours = built(config, groups)
    of = matrices(ours, config)
    assert any(len(pair.theirs) == (4 if model is FLUX else 3) for pair in of.values())
    theirs = {w: [part.clone() for part in pair.split(w.detach())] for w, pair in of.items()}
    params = [torch.nn.Parameter(part) for parts in theirs.values() for part in parts]
    reference = torch.optim.Muon(
        params, lr=1e-2, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn="match_rms_adamw"
    )
    # It iterates in bfloat16.
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    for number in range(1, 5):
        given = gradients(ours, number)
        parts = [part for w, pair in of.items() for part in pair.split(given[w])]
        for param, gradient in zip(params, parts, strict=True):
            param.grad = gradient.clone()
        step(ours, config, given)
        reference.step()
    wanted = iter(params)
    for weight, pair in of.items():
        whole = pair.join([next(wanted).detach() for _ in pair.theirs])
        torch.testing.assert_close(weight.detach(), whole, rtol=0, atol=3e-6)


@pytest.mark.parametrize("name", ["linear_in", "mlp.linear_fc1"])
def test_linears_that_diffusers_fuses_are_apart(groups, name):
    """Singular values of the update of each: of FLUX.2's q, k, v, gates and values in one matrix.

    As one matrix q and k would get a small part of its norm, where gradients of v are larger.
    """
    config = run(model=FLUX2, weight_decay=0.0)
    model = built(config, groups)
    width, hidden = FLUX2.hidden_size, FLUX2.ffn_hidden_size
    rows = [width] * 3 * (name == "linear_in") + [hidden] * 2
    weight, pair = next((w, p) for w, p in matrices(model, config).items() if f".{name}." in p.ours)
    given = gradients(model, 1)
    theirs = pair.split(given[weight])[0].split(rows)
    scaled = torch.cat([part * 3.0**n for n, part in enumerate(theirs)])
    before = weight.detach().clone()
    step(model, config, given | {weight: pair.join([scaled])})
    for part in pair.split(before - weight.detach())[0].split(rows):
        values = torch.linalg.svdvals(part / (1e-2 * 0.2 * math.sqrt(max(part.shape))))
        assert values.quantile(0.1) > 0.9 and values.max() < 1.15
    counted = [
        shape
        for pair in orthogonalised(config.model, config.optimizer)
        for shape in linear_shapes(pair)
    ]
    assert orthogonalisation(config.model, config.optimizer).matrices == len(counted)
    assert linear_shapes(pair) == [(n, width) for n in rows]


def test_the_layouts_of_a_plan_share_one_look_at_the_matrices(monkeypatch):
    """At every layout it took nine tenths of the time of a plan."""
    found: list[Any] = []

    def looked(model: Any) -> Any:
        found.append(model)
        return pairs(model)

    monkeypatch.setattr("dit.models.linears.pairs", looked)
    works = [
        orthogonalisation(replace(WAN, tensor_model_parallel_size=ranks), run(lr=0.0123).optimizer)
        for ranks in (1, 2)
    ]
    assert len(found) == 1
    assert works[0].numbers_here == works[0].numbers == 2 * works[1].numbers_here


def test_all_other_weights_are_adamws(groups):
    """Embedders, head, norms, biases, tables and modulation: bit for bit."""
    config = run(weight_decay=0.0)
    model = built(config, groups)
    of = matrices(model, config)
    names = {name for name, weight in named_weights(model.chunks[0]) if weight in of}
    muon, adamw = (
        moved_by(replace(config, optimizer=replace(config.optimizer, kind=kind)), groups, one)
        for kind in (OptimizerKind.MUON, OptimizerKind.ADAMW)
        for one in [lambda model: gradients(model, 1)]
    )
    assert names
    assert all("attention" in name or "mlp" in name for name in names)
    for name, moved in adamw.items():
        assert torch.equal(moved, muon[name]) is (name not in names), name
    for name in names:  # of its gradient, and so of its update, all directions are alike
        assert muon[name].square().mean().sqrt().item() == pytest.approx(0.2e-2, rel=0.1), name


def test_a_step_knows_directions_and_no_sizes(groups):
    """A gradient three times as large gives the same step, and a turned one the turned step."""
    config = run(weight_decay=0.0)
    name = "blocks.layers.0.mlp.linear_fc1.weight"
    torch.manual_seed(0)

    def turned(model: ModelAndOptimizer) -> dict[Tensor, Tensor]:
        given = gradients(model, 1)
        weight = dict(named_weights(model.chunks[0]))[name]
        return given | {weight: turn @ given[weight]}

    plain = moved_by(config, groups, lambda model: gradients(model, 1))
    turn = torch.linalg.qr(torch.randn(len(plain[name]), len(plain[name])))[0]
    large = moved_by(config, groups, lambda m: {p: 3 * g for p, g in gradients(m, 1).items()})
    torch.testing.assert_close(large[name], plain[name], rtol=0, atol=1e-7)
    torch.testing.assert_close(
        moved_by(config, groups, turned)[name], turn @ plain[name], rtol=0, atol=1e-7
    )


@pytest.mark.parametrize("period", [1, 2])
def test_gradients_of_zeros_and_of_one_direction_are_finite(groups, period):
    config = run(weight_decay=0.0, muon_period=period)

    def given(model: ModelAndOptimizer) -> dict[Tensor, Tensor]:
        first, *others = gradients(model, 1).items()
        of = {p: torch.zeros_like(g) for p, g in others}
        return dict([first]) | {
            p: torch.ones_like(g) if n % 2 else g for n, (p, g) in enumerate(of.items())
        }

    model = built(config, groups)
    for _ in range(2):
        step(model, config, given(model))
    assert all(p.isfinite().all() for p in model.chunks[0].parameters())


@pytest.mark.parametrize(("period", "rows"), [(1, None), (2, None), (2, 1)])
def test_a_gradient_that_is_rounding_makes_no_step_of_full_size(groups, period, rows):
    """Of a matrix, and between orthogonalisations of a row beside others of full size."""
    config = run(weight_decay=0.0, muon_period=period)
    name = "blocks.layers.1.self_attention.linear_proj.weight"

    def given(model: ModelAndOptimizer) -> dict[Tensor, Tensor]:
        every = gradients(model, 1)
        every[dict(named_weights(model.chunks[0]))[name]][:rows] *= 1e-7
        return every

    model, before = built(config, groups), dict[str, Tensor]()
    for _ in range(period):
        before = {n: w.detach().clone() for n, w in named_weights(model.chunks[0])}
        step(model, config, given(model))
    moved = {n: w.detach() - before[n] for n, w in named_weights(model.chunks[0])}
    other = moved[name.replace("layers.1", "layers.0")]
    assert moved[name][:rows].norm() < 0.02 * other[:rows].norm()
    assert rows is None or moved[name][rows:].norm() > 0.5 * other[rows:].norm()


def test_between_orthogonalisations_rows_are_normalised(groups):
    """Closed form of the second update; the first and the third are those of whole matrices."""
    whole, rows = (run(weight_decay=0.0, muon_period=period) for period in (1, 2))
    models = [built(config, groups) for config in (whole, rows)]
    before: dict[Tensor, Tensor] = {}
    for number in (1, 2):
        before = {w: w.detach().clone() for w in matrices(models[1], rows)}
        for model, config in zip(models, (whole, rows), strict=True):
            step(model, config, gradients(model, number))
        same = [
            torch.equal(a, b)
            for (_, a), (_, b) in zip(*(named_weights(m.chunks[0]) for m in models), strict=True)
        ]
        assert all(same) is (number == 1)
    first, second = (gradients(models[1], number) for number in (1, 2))
    for weight in matrices(models[1], rows):
        mean = 0.95 * 0.05 * first[weight] + 0.05 * second[weight]
        momentum = 0.95 * mean + 0.05 * second[weight]
        wanted = -1e-2 * 0.2 * math.sqrt(weight.shape[1]) * momentum
        wanted /= momentum.norm(dim=1, keepdim=True)
        torch.testing.assert_close(weight.detach() - before[weight], wanted, rtol=0, atol=1e-6)


def test_a_group_without_a_weight_need_not_count(groups):
    """Transformer Engine's AdamW counts none: the second update is by rows on every rank."""
    config = run(muon_period=2)
    whole, lacking = (built(config, groups) for _ in range(2))
    for number in (1, 2):
        for model in (whole, lacking):
            step(model, config, gradients(model, number))
        if number == 1:
            inner: Any = chained_optimizers(lacking.optimizer)[0]
            empty = {**inner.optimizer.param_groups[0], "params": [], "step": 0}
            inner.optimizer.param_groups.insert(0, empty)
    for (_, a), (_, b) in zip(*(named_weights(m.chunks[0]) for m in (whole, lacking)), strict=True):
        assert torch.equal(a, b)
    assert {group["step"] for group in lacking.optimizer.param_groups} == {2}


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("sharded", [True, False])
def test_a_resume_goes_on_bit_for_bit_with_one_state_of_each_matrix(
    groups, tmp_path, precision, sharded
):
    config = run(model=wan_model(precision=precision), sharded=sharded, muon_period=3)
    model = built(config, groups)
    for number in (1, 2):
        step_on_a_pack(model, config, number)
    place = saved(tmp_path, model, config)
    names = {pair.ours for pair in orthogonalised(config.model, config.optimizer)}
    stored = {name: tensor_names(place) for name in names}
    for name, every in stored.items():
        assert f"optimizer.state.exp_avg.{name}" in every
        assert f"optimizer.state.exp_avg_sq.{name}" not in every
    again = resumed(place, config, groups)
    for number in (3, 4, 5):
        step_on_a_pack(model, config, number)
        step_on_a_pack(again, config, number)
    for a, b in zip(*(m.chunks[0].parameters() for m in (model, again)), strict=True):
        assert torch.equal(a, b)
    kept = optimizer_values(again.optimizer, again.states.names)
    sizes = [shard.value.numel() for shard in main_param_shards(again.optimizer)]
    squares = [one.numel() for one in kept["optimizer.state.exp_avg_sq."]]
    assert 0 < sum(squares) < sum(sizes)
    assert [one.numel() for one in kept["optimizer.state.exp_avg."]] == sizes
    other = replace(config, optimizer=replace(config.optimizer, kind=OptimizerKind.ADAMW))
    with pytest.raises(CheckpointError, match=r"optimizer\.kind: muon in the checkpoint, adamw"):
        resumed(place, other, groups)


def test_groups_leave_matrices_to_adamw(groups):
    feed_forward = ParameterGroup(pattern="*ffn*", kind=OptimizerKind.ADAMW)
    slower = ParameterGroup(pattern="blocks.1.*", lr_factor=0.5)
    plain, mixed = (
        moved_by(run(weight_decay=0.0, groups=chosen), groups, lambda m: gradients(m, 1))
        for chosen in ((), (slower, feed_forward))
    )
    names = [name for name in plain if not torch.equal(plain[name], mixed[name])]
    assert any("mlp" in name for name in names)
    name = "blocks.layers.{}.self_attention.linear_qkv.weight"
    assert torch.equal(plain[name.format(0)], mixed[name.format(0)])
    torch.testing.assert_close(plain[name.format(1)] / 2, mixed[name.format(1)], rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer_cpu_offload": True}, "optimizer_cpu_offload=true needs the moments of AdamW"),
        (
            {"exp_avg_dtype": MomentType.BF16},
            "exp_avg_dtype=bf16 and .* needs the moments of AdamW",
        ),
        ({"muon_momentum": 1.0}, "muon_momentum=1.0 must lie in"),
        ({"muon_steps": 0}, "muon_steps=0"),
        ({"muon_period": 0}, "muon_period=0"),
    ],
)
def test_settings_that_muon_cannot_have_are_refused(settings, message):
    with pytest.raises(Problems, match=message):
        OptimizerConfig(**(OPTIONS | settings))


def test_adapters_and_groups_of_muon_are_refused():
    with pytest.raises(Problems, match=r"kind=muon is not for single groups: optimizer\.kind"):
        ParameterGroup(pattern="*", kind=OptimizerKind.MUON)
    with pytest.raises(Problems, match=r"optimizer\.kind=muon makes a full-size step"):
        replace(run(), lora=LoraConfig(rank=2))
