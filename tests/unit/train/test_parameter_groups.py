"""`optimizer.groups`: rates and decays of their own, frozen weights, wrong patterns."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from dit.checkpoint_paths import CheckpointError
from dit.config import EmaConfig, EmaKind, OptimizerConfig, ParameterGroup, Problems, RunConfig
from dit.convert.megatron_checkpoint import StoredWeights
from dit.models.parameter_groups import own_name
from dit.models.registry import pairs
from dit.planner.traffic import checkpoint_bytes
from dit.sizing.describe import describe
from dit.sizing.memory import memory, parameter_count, trained_count
from dit.train.checkpoint.async_save import save_checkpoint
from dit.train.checkpoint.state_dict import TrainProgress, load_checkpoint, load_weights
from dit.train.model_and_optimizer import build_model_and_optimizer, randomise
from dit.train.optimizer.update import clip_and_step, set_learning_rate
from tests.families.wan import wan_model
from tests.unit.train.test_checkpoint import DATA

RATE = 1e-2
_PLAIN = OptimizerConfig()


def _run(*groups: ParameterGroup, **changes) -> RunConfig:
    options = {"lr": RATE, "weight_decay": 0.1, "clip_grad": 0.0} | changes
    return RunConfig(
        model=wan_model(),
        optimizer=OptimizerConfig(**options, groups=groups),
        ema=EmaConfig(kind=EmaKind.NONE),
    )


def _built(config: RunConfig, groups):
    return build_model_and_optimizer(config, groups, fill=partial(randomise, seed=2))


def _values(model) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.chunks[0].module.named_parameters()}


def _named(model) -> list[tuple[str, torch.nn.Parameter]]:
    return [*model.chunks[0].module.named_parameters()]


def _step(model, config: RunConfig, gradient: float = 1.0) -> None:
    for p in model.chunks[0].module.parameters():
        if p.requires_grad:
            p.main_grad.fill_(gradient)
    set_learning_rate(model.optimizer, RATE, weight_decay=config.optimizer.weight_decay)
    clip_and_step(model.optimizer, clip_grad=0.0)


def test_each_weight_moves_by_its_own_rate_and_decay(groups):
    """Adam's first step is the rate times (1 + decay of the weight), whatever the gradient."""
    config = _run(
        ParameterGroup(pattern="blocks.*", lr_factor=0.5, weight_decay=0.3),
        ParameterGroup(pattern="blocks.1.attn2.*", lr=0.03),
        ParameterGroup(pattern="blocks.0.ffn.*", frozen=True),
    )
    model = _built(config, groups)
    before = _values(model)
    _step(model, config)
    seen = set()
    for name, value in _values(model).items():
        start, matrix = before[name], value.ndim > 1 and not name.endswith("table")
        if ".0.mlp." in name:
            rate, decay = 0.0, 0.0
        elif "blocks.layers.1.cross_attention." in name:
            rate, decay = 0.03, 0.1
        elif name.startswith("blocks."):
            rate, decay = 0.005, 0.3
        else:
            rate, decay = RATE, 0.1
        seen.add(rate)
        wanted = start * (1 - rate * decay * matrix) - rate
        torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6, msg=name)
    assert len(seen) == 4


@pytest.mark.parametrize(
    "pattern", ["blocks.0.attn1.to_*", "blocks.layers.0.self_attention.linear_qkv.*"]
)
def test_names_of_both_sides(groups, pattern):
    model = _built(_run(ParameterGroup(pattern=pattern, frozen=True)), groups)
    frozen = [n for n, p in model.chunks[0].module.named_parameters() if not p.requires_grad]
    assert any("0.self_attention.linear_qkv" in name for name in frozen)
    assert all("layers.0.self_attention" in name for name in frozen)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("blocks.0.atn1.to_q.weight", "matches no weight.*use a name such as .*attn1.to_q.weight"),
        ("blocks.9.*", "matches no weight"),
        ("*.attn1.to_q.*", "but not .*to_k.weight, .*to_v.weight"),
    ],
)
def test_patterns_that_are_wrong(groups, pattern, said):
    with pytest.raises(Problems, match=rf"optimizer\.groups: .*{said}"):
        _built(_run(ParameterGroup(pattern=pattern, lr=1e-3)), groups)


@pytest.mark.parametrize(
    ("of_groups", "said"),
    [
        ([{"pattern": "*norm_q*", "weight_decay": 0.3}], r"weight_decay=0\.3 of pattern=\*norm_q"),
        ([{"pattern": "*.bias", "lr": 1.0, "weight_decay": 0.3}], r"weight_decay=0\.3 of pattern"),
        (
            [{"pattern": "*.attn2.*", "lr": 1.0}, {"pattern": "*", "lr_factor": 2.0}],
            r"pattern=\*\.attn2\.\* has no effect, because later groups",
        ),
    ],
)
def test_groups_without_effect(groups, of_groups, said):
    with pytest.raises(Problems, match=rf"optimizer\.groups.*: {said}"):
        _built(_run(*(ParameterGroup(**one) for one in of_groups)), groups)


@pytest.mark.parametrize("swapped", [0, 1])
def test_a_bias_is_trained_beside_its_frozen_matrix(groups, swapped):
    config = _run(ParameterGroup(pattern="blocks.*.weight", frozen=True))
    config = replace(config, model=replace(config.model, blocks_to_swap=swapped))
    model = _built(config, groups)
    for layer in model.modules[0].blocks.layers:
        for linear in (layer.self_attention.linear_qkv, layer.self_attention.linear_proj):
            linear(torch.randn(3, linear.weight.shape[1])).sum().backward()
            assert (linear.bias.main_grad == 3).all()
            assert not linear.weight.requires_grad


def test_contradictions_are_refused():
    for wrong in ({}, {"lr": 1.0, "lr_factor": 1.0}, {"lr": 1.0, "frozen": True}, {"lr": -1.0}):
        with pytest.raises(Problems):
            ParameterGroup(pattern="*", **wrong)
    with pytest.raises(Problems, match="put a group with pattern="):
        _run(ParameterGroup(pattern="x", weight_decay=0.1), weight_decay=0.0)


@pytest.mark.parametrize("rest", [{"frozen": True}, {"lr_factor": 0.1}])
def test_a_resume_goes_on_alike(groups, tmp_path, rest):
    config = _run(
        ParameterGroup(pattern="blocks.0.*", lr_factor=0.5), ParameterGroup(pattern="*ffn*", **rest)
    )
    whole = _built(config, groups)
    _step(whole, config)
    place = save_checkpoint(
        tmp_path, whole, progress=TrainProgress(step=1), config=config, data=DATA
    )
    again = build_model_and_optimizer(config, groups)
    load_checkpoint(place, again, config=config)
    for model in (whole, again):
        _step(model, config, gradient=-2.0)
    ours, theirs = _values(whole), _values(again)
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    alone = build_model_and_optimizer(_run(), groups)
    load_weights(place, alone.modules, groups, averaged=False)
    assert all(p.isfinite().all() for p in _values(alone).values())
    with pytest.raises(CheckpointError, match=r"optimizer\.groups"):
        load_checkpoint(place, alone, config=_run())


def test_the_average_of_a_frozen_weight_is_the_weight(groups, tmp_path):
    """One layer of a name that a checkpoint stores for all layers, and a name as a whole."""
    frozen = ("blocks.0.*", "*.attn2.*")
    config = _run(*(ParameterGroup(pattern=pattern, frozen=True) for pattern in frozen))
    config = replace(config, ema=EmaConfig(kind=EmaKind.CONSTANT, decay=0.5))
    model = _built(config, groups)
    for gradient in (1.0, -2.0):
        _step(model, config, gradient)
        model.ema.update(1)
    count = trained_count(config)
    trained = [p for p in model.chunks[0].parameters() if p.requires_grad]
    assert count == sum(p.numel() for p in trained) < parameter_count(config.model)
    assert sum(average.numel() for average in model.ema.averages) == count
    with model.ema.as_weights(model.chunks):
        wanted = _values(model)
    assert not any(torch.equal(p, wanted[n]) for n, p in _named(model) if p.requires_grad)
    assert all(torch.equal(p, wanted[n]) for n, p in _named(model) if not p.requires_grad)
    place = save_checkpoint(
        tmp_path, model, progress=TrainProgress(step=2), config=config, data=DATA
    )
    other = _built(replace(config, optimizer=OptimizerConfig()), groups)
    load_weights(place, other.modules, groups, averaged=True)
    ours = _values(other)
    assert all(torch.equal(value, ours[name]) for name, value in wanted.items())
    stored = StoredWeights(place, averaged=True)
    table = pairs(config.model)
    stored.check(table)
    for pair in table:
        assert torch.equal(
            stored.read(pair), wanted[own_name((pair.ours, pair.layer))].view(pair.shape)
        )
    again = build_model_and_optimizer(config, groups)
    load_checkpoint(place, again, config=config)
    for average, loaded in zip(model.ema.averages, again.ema.averages, strict=True):
        assert torch.equal(average, loaded)


def test_the_estimate_leaves_out_what_is_frozen():
    config = _run(ParameterGroup(pattern="*ffn*", frozen=True))
    config = replace(config, ema=EmaConfig())
    every, trained = parameter_count(config.model), trained_count(config)
    need, plain = (memory(one, world_size=1) for one in (config, replace(config, optimizer=_PLAIN)))
    assert need.weights == plain.weights == 4 * every
    assert (need.gradients, need.optimizer, need.ema) == (4 * trained, 8 * trained, 4 * trained)
    assert f"{trained:,} trainable (custom), {every - trained:,} frozen" in describe(
        config, world_size=1
    )
    assert checkpoint_bytes(config, world_size=1).whole == 4 * every + 16 * trained
