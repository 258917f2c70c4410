"""`train.warm_start_ema`: the average of a new run goes on with that of its first weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dit.checkpoint_paths import CheckpointError
from dit.config import (
    CheckpointConfig,
    EmaConfig,
    EmaKind,
    OptimizerConfig,
    ParameterGroup,
    Precision,
    Problems,
    RunConfig,
    TrainConfig,
    Weights,
)
from dit.train.checkpoint.async_save import save_checkpoint
from dit.train.checkpoint.state_dict import TrainProgress, load_checkpoint, start_from
from dit.train.model_and_optimizer import build_model_and_optimizer
from dit.train.optimizer.ema import decay_at
from tests.learning import DATA, assert_equal, tiny_run, train, weights_and_averages

POWER, CONSTANT = EmaConfig(sigma_rel=0.2), EmaConfig(kind=EmaKind.CONSTANT, decay=0.9)
KINDS = [POWER, CONSTANT]
BEFORE = 3
"""Updates of the run whose weights are taken; one more of its steps was skipped."""


def _finetune(config: RunConfig, **options) -> RunConfig:
    start = CheckpointConfig(finetune=True, load="base", **options)
    return replace(config, train=TrainConfig(warm_start_ema=True), checkpoint=start)


def _base(groups, folder, config: RunConfig):
    """A run and its checkpoint."""
    model = build_model_and_optimizer(config, groups)
    train(model, config, 1, BEFORE)
    progress = TrainProgress(step=BEFORE + 1, skipped_steps=1)
    return model, save_checkpoint(folder, model, progress=progress, config=config, data=DATA)


def _weights(model) -> list[torch.Tensor]:
    return [shard.value.detach().clone() for shard in model.ema.shards]


@pytest.mark.parametrize("weights", list(Weights))
@pytest.mark.parametrize("ema", KINDS, ids=["power", "constant"])
def test_the_average_goes_on_with_that_of_the_base(groups, tmp_path, ema, weights):
    base, place = _base(groups, tmp_path, replace(tiny_run(), ema=ema))
    config = _finetune(replace(tiny_run(), ema=ema), finetune_weights=weights)
    model = build_model_and_optimizer(config, groups)
    progress = start_from(place, model, config=config)
    assert progress == TrainProgress(updates_before=BEFORE)
    assert_equal(model.ema.averages, base.ema.averages)
    assert_equal(_weights(model), base.ema.averages if weights is Weights.EMA else _weights(base))
    wanted = [average.double() for average in base.ema.averages]
    for step in (1, 2):
        train(model, config, step, step)
        old = decay_at(ema, BEFORE + step)
        news = _weights(model)
        wanted = [old * a + (1 - old) * w.double() for a, w in zip(wanted, news, strict=True)]
    for ours, theirs in zip(model.ema.averages, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("ema", KINDS, ids=["power", "constant"])
def test_a_resume_goes_on_bit_for_bit_and_another_run_counts_all_updates(groups, tmp_path, ema):
    _, place = _base(groups, tmp_path / "base", replace(tiny_run(), ema=ema))
    config = _finetune(replace(tiny_run(), ema=ema))
    whole = build_model_and_optimizer(config, groups)
    progress = start_from(place, whole, config=config)
    train(whole, config, 1, 2)
    progress = replace(progress, step=2)
    saved = save_checkpoint(tmp_path, whole, progress=progress, config=config, data=DATA)
    again = build_model_and_optimizer(config, groups)
    assert load_checkpoint(saved, again, config=config) == progress
    for model in (whole, again):
        train(model, config, 3, 4)
    assert_equal(weights_and_averages(again), weights_and_averages(whole))
    third = build_model_and_optimizer(config, groups)
    assert start_from(saved, third, config=config) == TrainProgress(updates_before=BEFORE + 2)


def test_a_base_without_an_average_is_one_itself(groups, tmp_path):
    base, place = _base(groups, tmp_path, replace(tiny_run(), ema=EmaConfig(kind=EmaKind.NONE)))
    config = _finetune(replace(tiny_run(), ema=POWER))
    model = build_model_and_optimizer(config, groups)
    assert start_from(place, model, config=config).updates_before == BEFORE
    assert_equal(model.ema.averages, _weights(model))
    assert_equal([*model.chunks[0].parameters()], [*base.chunks[0].parameters()])


@pytest.mark.parametrize("precision", list(Precision))
def test_what_the_base_had_frozen_is_its_own_average(groups, tmp_path, precision):
    frozen = ParameterGroup(pattern="decoder.layers.0.mlp.*", frozen=True)
    config = replace(tiny_run(precision=precision), ema=POWER)
    base, place = _base(
        groups, tmp_path, replace(config, optimizer=OptimizerConfig(groups=(frozen,)))
    )
    config = _finetune(config)
    model = build_model_and_optimizer(config, groups)
    start_from(place, model, config=config)
    averages = dict(zip([s.weight for s in base.ema.shards], base.ema.averages, strict=True))
    assert len(averages) < len(model.ema.averages)
    names = {p: name for name, p in model.chunks[0].named_parameters()}
    bases = dict(base.chunks[0].named_parameters())
    for shard, average in zip(model.ema.shards, model.ema.averages, strict=True):
        weight = bases[names[shard.weight]]
        wanted = averages.get(weight, weight.detach().float().flatten())
        assert torch.equal(average.flatten(), wanted.flatten())


def test_without_it_the_average_begins_anew(groups, tmp_path):
    _, place = _base(groups, tmp_path, replace(tiny_run(), ema=CONSTANT))
    config = _finetune(replace(tiny_run(), ema=CONSTANT))
    config = replace(config, train=TrainConfig())
    model = build_model_and_optimizer(config, groups)
    assert start_from(place, model, config=config) == TrainProgress()
    assert_equal(model.ema.averages, _weights(model))


def test_weights_of_unknown_age_are_no_power_average(groups, tmp_path):
    config = replace(tiny_run(), ema=POWER)
    base = build_model_and_optimizer(config, groups)
    place = save_checkpoint(tmp_path, base, progress=TrainProgress(), config=config, data=DATA)
    model = build_model_and_optimizer(_finetune(config), groups)
    with pytest.raises(CheckpointError, match=r"set ema\.kind=constant"):
        start_from(place, model, config=_finetune(config))
    constant = _finetune(replace(config, ema=CONSTANT))
    model = build_model_and_optimizer(constant, groups)
    start_from(place, model, config=constant)
    assert_equal(model.ema.averages, _weights(base))


@pytest.mark.parametrize(
    ("checkpoint", "ema", "said"),
    [
        ({}, POWER, "the run starts from none"),
        ({"load_hf": "x"}, POWER, r"set ema\.kind=constant"),
        ({"finetune": True, "load": "x"}, EmaConfig(kind=EmaKind.NONE), "ema.kind=none keeps none"),
    ],
)
def test_what_it_cannot_go_on_with_is_refused(checkpoint, ema, said):
    run = replace(tiny_run(), ema=ema, checkpoint=CheckpointConfig(**checkpoint))
    with pytest.raises(Problems, match=said):
        replace(run, train=TrainConfig(warm_start_ema=True))
