"""Checkpoints with files that are lost, cut short, changed, or of another version."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dit.checkpoint_paths import MANIFEST, CheckpointError, find_checkpoint, saved_config
from dit.config import CheckpointConfig
from dit.train.checkpoint.async_save import save_checkpoint
from dit.train.checkpoint.state_dict import TrainProgress, load_checkpoint
from dit.train.model_and_optimizer import build_model_and_optimizer
from tests.learning import DATA, tiny_run

CONFIG = replace(tiny_run(), checkpoint=CheckpointConfig(keep_last=0))
OURS = ("config.yaml", "loader_00000.pt", "null_text.safetensors", "dataset_card.json")
OURS += ("log_interval.safetensors",)
FILES = (".metadata", "metadata.json", "__0_0.distcp", "common.pt", *OURS)
INSTEAD = "write step_00000001 into"


@pytest.fixture(scope="module")
def model(groups):
    return build_model_and_optimizer(CONFIG, groups)


@pytest.fixture
def newest(model, tmp_path) -> Path:
    """The second of two checkpoints."""
    for step in (1, 2):
        place = save_checkpoint(
            tmp_path, model, progress=TrainProgress(step=step), config=CONFIG, data=DATA
        )
    return place


def _load(path: Path, model) -> None:
    found = find_checkpoint(path)
    assert found is not None
    load_checkpoint(found, model, config=CONFIG)


def test_the_manifest_names_every_file(newest):
    found = {f.name for f in newest.iterdir()} - {MANIFEST}
    assert found == json.loads((newest / MANIFEST).read_text())["files"].keys()
    # Megatron-Core 0.19 writes no common.pt of its own, and 0.16 needs it.
    assert {*FILES} <= found <= {*FILES, "__0_1.distcp"}


@pytest.mark.slow
def test_whatever_is_lost_or_changed_is_named_with_the_checkpoint_to_go_on_from(newest, model):
    for name in json.loads((newest / MANIFEST).read_text())["files"]:
        file = newest / name
        whole = file.read_bytes()
        file.unlink()
        with pytest.raises(CheckpointError, match=rf"step_00000002 has no {name}; {INSTEAD}"):
            _load(newest.parent, model)
        file.write_bytes(whole[:-1])
        with pytest.raises(CheckpointError, match=rf"{name} of .* instead of .* {INSTEAD}"):
            _load(newest.parent, model)
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 1
        file.write_bytes(flipped)
        with pytest.raises(CheckpointError, match=rf"damaged: {name} changed .*{INSTEAD}"):
            _load(newest.parent, model)
        file.write_bytes(whole)
    _load(newest.parent, model)


def test_a_checkpoint_that_is_no_good_either_is_not_offered(newest, model):
    (newest / "metadata.json").unlink()
    (newest.with_name("step_00000001") / "metadata.json").unlink()
    with pytest.raises(CheckpointError, match=r"no other checkpoint is beside it"):
        _load(newest.parent, model)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": 1}', b"\xff"])
def test_a_damaged_manifest_is_named(newest, model, content):
    (newest / MANIFEST).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"has a damaged manifest.json .*{INSTEAD}"):
        _load(newest.parent, model)


def test_a_checkpoint_from_before_there_were_manifests_loads(newest, model):
    (newest / MANIFEST).unlink()
    _load(newest.parent, model)


def test_a_newer_format_is_refused(newest, model):
    content = json.loads((newest / MANIFEST).read_text())
    content |= {"format": 2, "software": "megatron-dit 9.0"}
    (newest / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(CheckpointError) as error:
        _load(newest.parent, model)
    assert "has format 2, of megatron-dit 9.0, and this is megatron-dit 0." in str(error.value)
    assert "reads formats up to 1; install that version, or a newer one" in str(error.value)


def test_settings_of_another_version_are_told_from_damage(model, tmp_path, monkeypatch):
    from dit import checkpoint_paths as paths
    from dit.train.checkpoint import async_save

    def save_newer(config, path):
        path.write_text("model:\n  thinking: deep\n")

    monkeypatch.setattr(async_save, "save_config", save_newer)
    monkeypatch.setattr(paths, "SOFTWARE", "megatron-dit 9.0")
    place = save_checkpoint(tmp_path, model, progress=TrainProgress(), config=CONFIG, data=DATA)
    with pytest.raises(CheckpointError) as error:
        saved_config(place)
    assert "config.yaml was saved by megatron-dit 9.0, and this is" in str(error.value)
    assert "model.thinking" in str(error.value)
    assert "unknown key" in str(error.value)


def test_a_process_that_dies_during_a_load_or_a_save_is_no_damage(newest, model, monkeypatch):
    def die(*_):
        raise RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error")

    monkeypatch.setattr("dit.train.checkpoint.state_dict.load", die)
    with pytest.raises(RuntimeError, match="gloo"):
        _load(newest, model)
    monkeypatch.setattr("dit.train.checkpoint.async_save.plan_files", die)
    with pytest.raises(RuntimeError, match="gloo"):
        save_checkpoint(newest, model, progress=TrainProgress(step=3), config=CONFIG, data=DATA)
