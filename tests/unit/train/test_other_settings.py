"""Checkpoints under another configuration: resumed, or the start of a new run."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from dit.checkpoint_paths import CheckpointError
from dit.config import (
    CheckpointConfig,
    DdpConfig,
    EmaConfig,
    EmaKind,
    LossKind,
    ObjectiveConfig,
    ObjectiveName,
    Precision,
    Problems,
    RunConfig,
    Weights,
)
from dit.config_loading import changes, save_config
from dit.distributed.data_parallel import main_param_shards
from dit.train.checkpoint.async_save import save_checkpoint
from dit.train.checkpoint.state_dict import TrainProgress, load_checkpoint, start_from
from dit.train.checkpoint.without_tensors import check_same_model
from dit.train.model_and_optimizer import build_model_and_optimizer
from tests.learning import DATA, assert_equal, tiny_run, train, weights_and_averages
from tests.packs import run_config

NO_AVERAGE = EmaConfig(kind=EmaKind.NONE)
WHOLE = DdpConfig(use_distributed_optimizer=False)


def _saved(folder, groups, config: RunConfig):
    """A checkpoint after three steps, and the model that it was saved from."""
    model = build_model_and_optimizer(config, groups)
    train(model, config, 1, 3)
    progress = TrainProgress(step=3)
    return save_checkpoint(folder, model, progress=progress, config=config, data=DATA), model


def _weights(model) -> list[torch.Tensor]:
    return [p.detach().float() for p in model.chunks[0].parameters()]


def test_an_expert_goes_on_in_its_own_levels_alone(groups, tmp_path):
    def of(level_range):
        objective = ObjectiveConfig(name="flow", level_range=level_range)
        return replace(tiny_run(), objective=objective)

    place, model = _saved(tmp_path, groups, of((0.875, 1.0)))
    load_checkpoint(place, model, config=of((0.875, 1.0)))
    for other in ((0.0, 0.875), None):
        with pytest.raises(CheckpointError, match=r"level_range: \[0\.875, 1\.0\] in the"):
            load_checkpoint(place, model, config=of(other))


def test_a_checkpoint_of_a_version_without_level_range_is_one_of_all_levels(tmp_path):
    config = replace(tiny_run(), objective=ObjectiveConfig(name="flow"))
    save_config(config, tmp_path / "config.yaml")
    lines = (tmp_path / "config.yaml").read_text().splitlines()
    later = ("level_range", "given_frames", "image_dropout", "image_condition_probability")
    later += ("loss", "huber_c")
    kept = [line for line in lines if line.strip().partition(":")[0] not in later]
    assert len(kept) == len(lines) - len(later)
    (tmp_path / "config.yaml").write_text("\n".join(kept))
    check_same_model(tmp_path, config)
    expert = replace(config.objective, level_range=(0.875, 1.0))
    with pytest.raises(
        CheckpointError, match=r"level_range: null in the checkpoint, \[0.875, 1.0\] here"
    ):
        check_same_model(tmp_path, replace(config, objective=expert))


def test_a_run_goes_on_with_the_error_that_it_began_with(tmp_path):
    def of(**options):
        return replace(tiny_run(), objective=ObjectiveConfig(**options))

    save_config(of(loss=LossKind.HUBER, huber_c=0.2), tmp_path / "config.yaml")
    check_same_model(tmp_path, of(loss=LossKind.HUBER, huber_c=0.2))
    with pytest.raises(CheckpointError, match=r"huber_c: 0\.2 in the checkpoint, 0\.1 here"):
        check_same_model(tmp_path, of(loss=LossKind.HUBER))
    with pytest.raises(CheckpointError, match="loss: huber in the checkpoint, mse here"):
        check_same_model(tmp_path, of())
    save_config(of(), tmp_path / "config.yaml")
    check_same_model(tmp_path, of(huber_c=0.2))  # which squares do not read


def test_every_difference_that_forbids_to_go_on_is_named(groups, tmp_path):
    place, model = _saved(tmp_path, groups, tiny_run())
    other = replace(
        tiny_run(num_layers=3, hidden_size=96),
        objective=ObjectiveConfig(sigma_data=1.0),
        ddp=WHOLE,
    )
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(place, model, config=other)
    for expected in (
        "model.num_layers: 2 in the checkpoint, 3 here",
        "model.hidden_size: 48 in the checkpoint, 96 here",
        "objective.sigma_data: 0.5 in the checkpoint, 1.0 here",
        "ddp.use_distributed_optimizer: true in the checkpoint, false here",
        f"checkpoint.finetune=true checkpoint.load={place}",
    ):
        assert expected in str(error.value)


@pytest.mark.parametrize("ddp", [DdpConfig(), WHOLE])
@pytest.mark.parametrize("precision", list(Precision))
def test_a_precision_is_named_where_it_differs_and_is_fixed(groups, tmp_path, ddp, precision):
    saved = replace(tiny_run(precision=Precision.BF16), ddp=ddp)
    here = replace(tiny_run(precision=precision), ddp=WHOLE)
    save_config(saved, tmp_path / "config.yaml")
    fits = saved.ddp == here.ddp and saved.model.precision == here.model.precision
    with nullcontext() if fits else pytest.raises(CheckpointError) as error:
        check_same_model(tmp_path, here)
    if error is not None:
        assert "None" not in str(error.value)
        said = "model.precision: bf16 in the checkpoint, fp32 here" in str(error.value)
        assert said == (saved.ddp == here.ddp)


def test_an_average_can_begin_and_end_at_a_checkpoint(groups, tmp_path):
    config = tiny_run()
    without = replace(config, ema=NO_AVERAGE)
    place, whole = _saved(tmp_path, groups, config)
    again = build_model_and_optimizer(without, groups)
    load_checkpoint(place, again, config=without)
    assert again.ema is None
    assert train(again, without, 4, 5) == train(whole, config, 4, 5)

    place = save_checkpoint(
        tmp_path, again, progress=TrainProgress(step=5), config=without, data=DATA
    )
    averaged = build_model_and_optimizer(config, groups)
    load_checkpoint(place, averaged, config=config)
    assert averaged.ema is not None
    assert_equal(averaged.ema.averages, [s.value for s in main_param_shards(averaged.optimizer)])
    assert train(averaged, config, 6, 7) == train(whole, config, 6, 7)


@pytest.mark.parametrize("ddp", [DdpConfig(), WHOLE])
@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("source", list(Precision))
def test_a_new_run_takes_weights_and_nothing_else(groups, tmp_path, source, precision, ddp):
    place, old = _saved(tmp_path, groups, tiny_run(precision=source))
    new = replace(
        tiny_run(precision=precision), objective=ObjectiveConfig(name=ObjectiveName.FLOW), ddp=ddp
    )
    model = build_model_and_optimizer(new, groups)
    start_from(place, model, config=new)
    dtype = next(model.chunks[0].parameters()).dtype
    expected = [w.to(dtype).float() for w in _weights(old)]
    assert_equal(_weights(model), expected)
    assert model.ema is not None
    masters = [shard.value for shard in main_param_shards(model.optimizer)]
    assert_equal(model.ema.averages, masters)
    # The same steps as of a new run that began with these weights: no moments came along.
    fresh = build_model_and_optimizer(new, groups)
    for mine, its in zip(fresh.chunks[0].parameters(), model.chunks[0].parameters(), strict=True):
        mine.data.copy_(its)
    fresh.optimizer.reload_model_params()
    assert train(model, new, 1, 3) == train(fresh, new, 1, 3)


def test_a_new_run_may_take_the_average(groups, tmp_path):
    place, old = _saved(tmp_path, groups, tiny_run())
    new = replace(
        tiny_run(),
        checkpoint=CheckpointConfig(load=str(place), finetune=True, finetune_weights=Weights.EMA),
        ema=NO_AVERAGE,
    )
    model = build_model_and_optimizer(new, groups)
    start_from(place, model, config=new)
    assert old.ema is not None
    with old.ema.as_weights(old.chunks):
        assert_equal(weights_and_averages(model), _weights(old))


def test_a_new_run_is_of_the_same_model(groups, tmp_path):
    place, model = _saved(tmp_path, groups, replace(tiny_run(), ema=NO_AVERAGE))
    other = tiny_run(num_layers=3)
    with pytest.raises(CheckpointError) as error:
        start_from(place, model, config=other)
    assert "model.num_layers: 2 in the checkpoint, 3 here" in str(error.value)
    assert "leaves free all that is not the model" in str(error.value)


def test_changes_are_named_with_both_values():
    before = run_config()
    after = replace(
        before,
        train=replace(before.train, global_batch_size=16),
        ema=NO_AVERAGE,
        checkpoint=replace(before.checkpoint, save="runs/a"),
    )
    assert not changes(before, before)
    assert [*changes(before, after).values()] == [
        "train.global_batch_size 8 -> 16",
        'ema.kind "power" -> "none"',
        'checkpoint.save null -> "runs/a"',
    ]


@pytest.mark.parametrize("places", [{}, {"save": "runs/a"}, {"save": "runs/a", "load": "runs/a"}])
def test_a_new_run_from_weights_needs_two_folders(places):
    with pytest.raises(Problems, match=r"finetune=true takes weights from load=.* different"):
        CheckpointConfig(finetune=True, **places)
