"""A run on disk and back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from megatron.core.dist_checkpointing import load, load_plain_tensors

from dit.checkpoint_paths import CheckpointError, find_checkpoint
from dit.config import CheckpointConfig, DdpConfig, EmaKind, OptimizerConfig, Precision
from dit.data import LoaderLayout
from dit.models.dit.model import DiT
from dit.planner.traffic import checkpoint_bytes
from dit.train.checkpoint.async_save import save_checkpoint
from dit.train.checkpoint.data_position import data_positions
from dit.train.checkpoint.state_dict import TrainProgress, load_checkpoint, load_weights, start_from
from dit.train.model_and_optimizer import build_model_and_optimizer
from dit.train.optimizer import states
from tests.learning import DATA, assert_equal, tiny_run, train, weights_and_averages

ALONE = LoaderLayout(ranks=1, workers=0)


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("precision", list(Precision))
def test_run_continues_bit_for_bit(groups, tmp_path, sharded, precision):
    config = replace(
        tiny_run(precision=precision), ddp=DdpConfig(use_distributed_optimizer=sharded)
    )
    whole = build_model_and_optimizer(config, groups)
    train(whole, config, 1, 3)
    progress = TrainProgress(step=3, consumed_samples=6)
    place = save_checkpoint(tmp_path, whole, progress=progress, config=config, data=DATA)
    rest = train(whole, config, 4, 6)

    again = build_model_and_optimizer(config, groups)
    assert find_checkpoint(tmp_path) == place
    assert load_checkpoint(place, again, config=config) == progress
    assert data_positions(place, ALONE, rank=0) == [DATA.position]
    assert train(again, config, 4, 6) == rest
    assert_equal(weights_and_averages(again), weights_and_averages(whole))


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("precision", list(Precision))
def test_a_checkpoint_has_the_bytes_that_are_planned(groups, tmp_path, sharded, precision):
    config = replace(
        tiny_run(precision=precision), ddp=DdpConfig(use_distributed_optimizer=sharded)
    )
    model = build_model_and_optimizer(config, groups)
    place = save_checkpoint(tmp_path, model, progress=TrainProgress(), config=config, data=DATA)
    tensors = load_plain_tensors(str(place)).values()
    stored = sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
    assert stored == checkpoint_bytes(config, world_size=1).whole


def test_an_average_that_is_not_there(groups, tmp_path):
    config = tiny_run()
    config = replace(config, ema=replace(config.ema, kind=EmaKind.NONE))
    model = build_model_and_optimizer(config, groups)
    place = save_checkpoint(tmp_path, model, progress=TrainProgress(), config=config, data=DATA)
    with pytest.raises(CheckpointError, match="no average of the weights; use --weights model"):
        load_weights(place, model.chunks, groups, averaged=True)


@pytest.mark.parametrize("averaged_before", [True, False])
def test_weights_that_are_never_drawn_are_those_of_the_checkpoint(
    groups, tmp_path, averaged_before
):
    """Nothing of what fills new memory is left, in weights, moments or averages."""

    def with_nans(model):
        for weight in model.parameters():
            weight.data.fill_(torch.nan)

    config = tiny_run()
    kind = config.ema.kind if averaged_before else EmaKind.NONE
    saved = replace(config, ema=replace(config.ema, kind=kind))
    whole = build_model_and_optimizer(saved, groups)
    train(whole, saved, 1, 2)
    place = save_checkpoint(
        tmp_path, whole, progress=TrainProgress(step=2), config=saved, data=DATA
    )
    drawn = build_model_and_optimizer(config, groups)
    empty = build_model_and_optimizer(config, groups, fill=with_nans)
    for model in (drawn, empty):
        load_checkpoint(place, model, config=config)
    assert_equal(weights_and_averages(empty), weights_and_averages(drawn))
    assert train(empty, config, 3, 4) == train(drawn, config, 3, 4)
    for model in (drawn, empty):
        start_from(place, model, config=config)
    assert_equal(weights_and_averages(empty), weights_and_averages(drawn))


def test_a_run_continues_with_adams_moments_on_the_host(groups, tmp_path):
    config = tiny_run()
    hosted = replace(config, optimizer=OptimizerConfig(optimizer_cpu_offload=True))
    whole, again = (
        build_model_and_optimizer(config, groups),
        build_model_and_optimizer(hosted, groups),
    )
    train(whole, config, 1, 3)
    place = save_checkpoint(tmp_path, whole, progress=TrainProgress(), config=config, data=DATA)
    load_checkpoint(place, again, config=hosted)
    assert train(again, hosted, 4, 6) == train(whole, config, 4, 6)
    assert_equal(weights_and_averages(again), weights_and_averages(whole))


def test_weights_and_average_load_without_an_optimizer(groups, tmp_path):
    config = tiny_run()
    model = build_model_and_optimizer(config, groups)
    train(model, config, 1, 3)
    place = save_checkpoint(tmp_path, model, progress=TrainProgress(), config=config, data=DATA)
    network = DiT(config.model, groups)
    load_weights(place, [network], groups, averaged=False)
    for a, b in zip(network.parameters(), model.chunks[0].parameters(), strict=True):
        assert torch.equal(a, b)
    load_weights(place, [network], groups, averaged=True)
    with model.ema.as_weights(model.chunks):
        for a, b in zip(network.parameters(), model.chunks[0].parameters(), strict=True):
            assert torch.equal(a, b)


def test_old_checkpoints_are_removed(groups, tmp_path):
    config = replace(tiny_run(), checkpoint=CheckpointConfig(keep_last=2))
    model = build_model_and_optimizer(config, groups)
    for step in (1, 2, 10):
        save_checkpoint(
            tmp_path, model, progress=TrainProgress(step=step), config=config, data=DATA
        )
    kept = sorted(p.name for p in (tmp_path / "checkpoints").glob("step_*"))
    assert kept == ["step_00000002", "step_00000010"]


def test_a_run_that_went_back_keeps_what_it_writes(groups, tmp_path):
    """Checkpoints of the abandoned later steps neither count nor go."""
    config = replace(tiny_run(), checkpoint=CheckpointConfig(keep_last=1))
    model = build_model_and_optimizer(config, groups)
    abandoned = tmp_path / "checkpoints/step_00000006"
    abandoned.mkdir(parents=True)
    for step in (3, 4):
        save_checkpoint(
            tmp_path, model, progress=TrainProgress(step=step), config=config, data=DATA
        )
    assert find_checkpoint(tmp_path) == abandoned.with_name("step_00000004")
    assert sorted(abandoned.parent.glob("step_*")) == [
        abandoned.with_name("step_00000004"),
        abandoned,
    ]


def test_what_a_killed_save_left_is_removed_by_the_next(groups, tmp_path):
    config = tiny_run()
    left = tmp_path / "checkpoints/.partial_step_00000007"
    left.mkdir(parents=True)
    (left / "__0_0.distcp").write_bytes(b"half")
    model = build_model_and_optimizer(config, groups)
    save_checkpoint(tmp_path, model, progress=TrainProgress(step=8), config=config, data=DATA)
    assert not left.exists()


def test_a_lost_or_damaged_data_position_is_named(groups, tmp_path):
    config = tiny_run()
    model = build_model_and_optimizer(config, groups)
    place = save_checkpoint(tmp_path, model, progress=TrainProgress(), config=config, data=DATA)
    file = place / "loader_00000.pt"
    torch.save(DATA.position | {"ranks": 2}, file)
    with pytest.raises(CheckpointError, match=r"has no loader_00001.pt; no other checkpoint"):
        data_positions(place, ALONE, rank=0)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"loader_00000.pt cannot be read, .* damaged"):
        data_positions(place, ALONE, rank=0)


def test_every_way_to_name_a_checkpoint(groups, tmp_path):
    config = tiny_run()
    assert find_checkpoint(tmp_path) is None
    model = build_model_and_optimizer(config, groups)
    place = save_checkpoint(tmp_path, model, progress=TrainProgress(), config=config, data=DATA)
    for path in (tmp_path, place.parent, place, place.parent / "LATEST"):
        assert find_checkpoint(path) == place
    (place / "metadata.json").unlink()
    with pytest.raises(CheckpointError, match=r"step_00000000 has no metadata.json; no other"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize("precision", list(Precision))
def test_a_rank_that_updates_no_weight_has_the_same_names(groups, precision, monkeypatch):
    """All ranks take part in each exchange with as many tensors of a weight."""
    model = build_model_and_optimizer(tiny_run(precision=precision), groups)
    names = list(states.optimizer_values(model.optimizer, model.states.names))
    only_one = states.optimizer_values(model.optimizer, ["exp_avg"])
    monkeypatch.setattr(states, "main_param_shards_of", lambda _: iter(()))
    assert states.optimizer_values(model.optimizer, model.states.names) == {
        name: [] for name in names
    }
    assert len(names) == 3 and [*only_one] == [name for name in names if "_sq" not in name]


@pytest.mark.parametrize("precision", list(Precision))
def test_megatron_cores_own_loader_reads_it(groups, tmp_path, precision):
    """What is stored is what Megatron-Core stores as `fully_reshardable`."""
    config = tiny_run(precision=precision)
    whole, again = (build_model_and_optimizer(config, groups) for _ in range(2))
    train(whole, config, 1, 3)
    place = save_checkpoint(tmp_path, whole, progress=TrainProgress(), config=config, data=DATA)
    (module,) = again.modules
    weights = module.sharded_state_dict()
    metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
    optimizer = again.optimizer.sharded_state_dict(weights, is_loading=True, metadata=metadata)
    loaded = load({"model": weights, "optimizer": optimizer}, str(place))
    module.load_state_dict(loaded["model"])
    again.optimizer.load_state_dict(loaded["optimizer"])
    assert train(again, config, 4, 6) == train(whole, config, 4, 6)
