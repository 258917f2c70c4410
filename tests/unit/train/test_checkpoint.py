"""A run on disk and back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dit.config import (
    CheckpointConfig,
    DatasetConfig,
    DdpConfig,
    EmaConfig,
    EmaKind,
    ObjectiveConfig,
    Precision,
    RunConfig,
)
from dit.model.dit import DiT
from dit.objective import make_objective, training_problem
from dit.train import checkpoint
from dit.train.build import set_learning_rate
from dit.train.checkpoint import (
    DataState,
    Progress,
    data_positions,
    load_checkpoint,
    load_weights,
    save_checkpoint,
)
from dit.train.learner import build_learner
from dit.train.locate import CheckpointError, find_checkpoint
from dit.train.step import run_schedule, update
from tests.packs import random_pack, tiny_model

MODEL = tiny_model(hidden_size=48, num_attention_heads=2, crossattn_emb_size=8, adaln_lora_dim=8)
DATA = DataState(
    position={"ranks": 1, "at": 3}, card={"format_version": 1}, null_text_LE=torch.ones(2, 8)
)


def _config(**model) -> RunConfig:
    return RunConfig(model=replace(MODEL, **model), dataset=DatasetConfig(mock=True))


def _steps(learner, config, first, last) -> list[float]:
    objective, losses = make_objective(config.objective), []
    batch = random_pack([(1, 4, 4), (2, 3, 3)], [5, 2], model=config.model)
    for step in range(first, last + 1):
        item = training_problem(
            objective, batch, seed=1, step=step, null_text_LE=torch.zeros(1, 8), text_dropout=0.5
        )
        for chunk in learner.chunks:
            chunk.zero_grad_buffer()
        learner.optimizer.zero_grad()
        report = run_schedule(learner.chunks, [item], mean=config.objective.loss_mean)
        set_learning_rate(learner.optimizer, 1e-2, weight_decay=0.1)
        done = update(learner.optimizer, clip_grad=1.0)
        learner.ema.update(step)
        losses += [float(report[0] / report[1]), done.grad_norm]
    return losses


def _state(learner) -> list[torch.Tensor]:
    weights = [p.detach().clone() for p in learner.chunks[0].parameters()]
    return weights + [a.clone() for a in learner.ema.averages]


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("precision", list(Precision))
def test_run_continues_bit_for_bit(groups, tmp_path, sharded, precision):
    config = replace(_config(precision=precision), ddp=DdpConfig(use_distributed_optimizer=sharded))
    whole = build_learner(config, groups)
    _steps(whole, config, 1, 3)
    progress = Progress(step=3, consumed_samples=6)
    place = save_checkpoint(tmp_path, whole, progress=progress, config=config, data=DATA)
    rest = _steps(whole, config, 4, 6)

    again = build_learner(config, groups)
    assert find_checkpoint(tmp_path) == place
    assert load_checkpoint(place, again, config=config) == progress
    assert data_positions(place) == [DATA.position]
    assert _steps(again, config, 4, 6) == rest
    for a, b in zip(_state(whole), _state(again), strict=True):
        assert torch.equal(a, b)


def test_weights_and_average_load_without_an_optimizer(groups, tmp_path):
    config = _config()
    learner = build_learner(config, groups)
    _steps(learner, config, 1, 3)
    place = save_checkpoint(tmp_path, learner, progress=Progress(), config=config, data=DATA)
    model = DiT(config.model, groups)
    load_weights(place, model, averaged=False)
    for a, b in zip(model.parameters(), learner.chunks[0].parameters(), strict=True):
        assert torch.equal(a, b)
    load_weights(place, model, averaged=True)
    with learner.ema.as_weights(learner.chunks):
        for a, b in zip(model.parameters(), learner.chunks[0].parameters(), strict=True):
            assert torch.equal(a, b)


def test_latest_moves_only_when_a_save_is_whole(groups, tmp_path, monkeypatch):
    config = _config()
    learner = build_learner(config, groups)

    def save(step):
        return save_checkpoint(
            tmp_path, learner, progress=Progress(step=step), config=config, data=DATA
        )

    first = save(1)
    with monkeypatch.context() as patch:

        def full(*_args, **_kwargs):
            raise OSError(28, "No space left on device")

        patch.setattr(checkpoint.torch, "save", full)
        with pytest.raises(CheckpointError, match=r"No space left.*choose another checkpoint.save"):
            save(2)
    assert find_checkpoint(tmp_path) == first
    assert not (tmp_path / "checkpoints/step_00000002").exists()
    assert find_checkpoint(tmp_path) != save(2)


def test_old_checkpoints_are_removed(groups, tmp_path):
    config = replace(_config(), checkpoint=CheckpointConfig(keep_last=2))
    learner = build_learner(config, groups)
    for step in (1, 2, 10):
        save_checkpoint(tmp_path, learner, progress=Progress(step=step), config=config, data=DATA)
    kept = sorted(p.name for p in (tmp_path / "checkpoints").glob("step_*"))
    assert kept == ["step_00000002", "step_00000010"]


def test_a_run_that_went_back_keeps_what_it_writes(groups, tmp_path):
    """Checkpoints of the abandoned later steps neither count nor go."""
    config = replace(_config(), checkpoint=CheckpointConfig(keep_last=1))
    learner = build_learner(config, groups)
    abandoned = tmp_path / "checkpoints/step_00000006"
    abandoned.mkdir(parents=True)
    for step in (3, 4):
        save_checkpoint(tmp_path, learner, progress=Progress(step=step), config=config, data=DATA)
    assert find_checkpoint(tmp_path) == abandoned.with_name("step_00000004")
    assert sorted(abandoned.parent.glob("step_*")) == [
        abandoned.with_name("step_00000004"),
        abandoned,
    ]


def test_what_a_killed_save_left_is_removed_by_the_next(groups, tmp_path):
    config = _config()
    left = tmp_path / "checkpoints/.partial_step_00000007"
    left.mkdir(parents=True)
    (left / "__0_0.distcp").write_bytes(b"half")
    learner = build_learner(config, groups)
    save_checkpoint(tmp_path, learner, progress=Progress(step=8), config=config, data=DATA)
    assert not left.exists()


def test_a_lost_or_damaged_data_position_is_named(groups, tmp_path):
    config = _config()
    learner = build_learner(config, groups)
    place = save_checkpoint(tmp_path, learner, progress=Progress(), config=config, data=DATA)
    file = place / "loader_00000.pt"
    torch.save(DATA.position | {"ranks": 2}, file)
    with pytest.raises(CheckpointError, match=r"has no loader_00001.pt; no other checkpoint"):
        data_positions(place)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"loader_00000.pt cannot be read, .* damaged"):
        data_positions(place)


@pytest.mark.parametrize("name", ["common.pt", ".metadata", "metadata.json"])
def test_a_file_that_is_cut_short_is_damage(groups, tmp_path, name):
    config = _config()
    learner = build_learner(config, groups)
    place = save_checkpoint(tmp_path, learner, progress=Progress(), config=config, data=DATA)
    (place / name).write_bytes((place / name).read_bytes()[:40])
    with pytest.raises(CheckpointError, match=r"step_00000000 cannot be read, .* damaged"):
        load_checkpoint(place, learner, config=config)


def test_every_way_to_name_a_checkpoint(groups, tmp_path):
    config = _config()
    assert find_checkpoint(tmp_path) is None
    learner = build_learner(config, groups)
    place = save_checkpoint(tmp_path, learner, progress=Progress(), config=config, data=DATA)
    for path in (tmp_path, place.parent, place, place.parent / "LATEST"):
        assert find_checkpoint(path) == place
    (place / "metadata.json").unlink()
    with pytest.raises(CheckpointError, match=r"step_00000000 has no metadata.json; no other"):
        find_checkpoint(tmp_path)


def test_checkpoint_of_another_model_is_refused_with_every_difference(groups, tmp_path):
    config = _config()
    learner = build_learner(config, groups)
    place = save_checkpoint(tmp_path, learner, progress=Progress(), config=config, data=DATA)
    other = replace(
        _config(num_layers=3, hidden_size=96), objective=ObjectiveConfig(sigma_data=1.0)
    )
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(place, build_learner(other, groups), config=other)
    for expected in (
        "model.num_layers: 2 in the checkpoint, 3 here",
        "model.hidden_size: 48 in the checkpoint, 96 here",
        "objective.sigma_data: 0.5 in the checkpoint, 1.0 here",
    ):
        assert expected in str(error.value)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"ddp": DdpConfig(use_distributed_optimizer=False)}, "ddp.use_distributed_optimizer"),
        ({"ema": EmaConfig(kind=EmaKind.NONE)}, "ema.kind=none"),
    ],
)
def test_checkpoint_of_another_optimizer_is_refused(groups, tmp_path, changed, named):
    config = _config()
    learner = build_learner(config, groups)
    place = save_checkpoint(tmp_path, learner, progress=Progress(), config=config, data=DATA)
    other = replace(config, **changed)
    with pytest.raises(CheckpointError, match=named):
        load_checkpoint(place, build_learner(other, groups), config=other)
