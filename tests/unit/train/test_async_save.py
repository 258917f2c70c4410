"""Saves while training goes on, and saves that fail."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dit.checkpoint_paths import CheckpointError, find_checkpoint
from dit.config import CheckpointConfig, DdpConfig, Precision
from dit.train.checkpoint import async_save
from dit.train.checkpoint.async_save import Saver, save_checkpoint
from dit.train.checkpoint.saving import close_saver
from dit.train.checkpoint.state_dict import TrainProgress, load_checkpoint
from dit.train.model_and_optimizer import build_model_and_optimizer
from tests.learning import DATA, assert_equal, tiny_run, train, weights_and_averages
from tests.stored import assert_same_stored

BACKGROUND = CheckpointConfig(async_save=True)


@pytest.fixture
def gate(monkeypatch):
    """Nothing is written before this is set."""
    opened, write = threading.Event(), async_save._write_distcp

    def wait(shard):
        assert opened.wait(timeout=60)
        return write(shard)

    monkeypatch.setattr(async_save, "_write_distcp", wait)
    return opened


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("precision", list(Precision))
def test_steps_go_on_while_the_step_before_them_is_written(
    groups, tmp_path, gate, sharded, precision
):
    config = replace(
        tiny_run(precision=precision),
        ddp=DdpConfig(use_distributed_optimizer=sharded),
        checkpoint=BACKGROUND,
    )
    model, progress = (
        build_model_and_optimizer(config, groups),
        TrainProgress(step=3, consumed_samples=6),
    )
    train(model, config, 1, 3)
    at_three = weights_and_averages(model)
    saver = Saver(tmp_path, config)
    saver.begin(model, progress=progress, data=DATA)
    rest = train(model, config, 4, 6)
    assert saver.writing
    assert find_checkpoint(tmp_path) is None
    gate.set()
    saved = saver.finish()
    assert saved is not None and not saver.writing
    assert saver.finish() is None
    saver.close()

    again = build_model_and_optimizer(config, groups)
    assert load_checkpoint(saved.path, again, config=config) == progress
    assert_equal(weights_and_averages(again), at_three)
    at_once = replace(config, checkpoint=CheckpointConfig())
    # A step sets its own before it updates; a checkpoint gives none.
    for group, trained in zip(
        again.optimizer.param_groups, model.optimizer.param_groups, strict=True
    ):
        group |= {key: trained[key] for key in ("lr", "weight_decay")}
    same = save_checkpoint(tmp_path / "2", again, progress=progress, config=at_once, data=DATA)
    assert_same_stored(same, saved.path)
    assert train(again, config, 4, 6) == rest


@pytest.mark.parametrize(
    "what", ["_write_distcp", "_write_bytes", "write_manifest", "sync_and_digest"]
)
def test_a_save_that_fails_costs_no_older_one(groups, tmp_path, monkeypatch, what):
    config = replace(tiny_run(), checkpoint=BACKGROUND)
    model = build_model_and_optimizer(config, groups)
    first = save_checkpoint(
        tmp_path, model, progress=TrainProgress(step=1), config=config, data=DATA
    )
    saver = Saver(tmp_path, config)

    def full(*_args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(async_save, what, full)
        saver.begin(model, progress=TrainProgress(step=2), data=DATA)
        with pytest.raises(CheckpointError, match=r"No space left.*choose another checkpoint.save"):
            saver.finish()
    assert find_checkpoint(tmp_path) == first
    assert {path.name for path in first.parent.iterdir()} == {first.name, "LATEST"}
    saver.begin(model, progress=TrainProgress(step=3), data=DATA)
    saved = saver.finish()
    saver.close()
    assert saved is not None and find_checkpoint(tmp_path) == saved.path
    load_checkpoint(saved.path, model, config=config)


@contextmanager
def _largest_file(size: int) -> Iterator[None]:
    """The system refuses to write more than `size` bytes of a file, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_nothing_is_left_of_a_save_that_did_not_fit_and_the_error_says_what_it_needs(
    groups, tmp_path
):
    config = tiny_run()
    model = build_model_and_optimizer(config, groups)
    first = save_checkpoint(
        tmp_path, model, progress=TrainProgress(step=1), config=config, data=DATA
    )
    largest = max(file.stat().st_size for file in first.glob("*.distcp"))
    with _largest_file(largest // 2), pytest.raises(CheckpointError) as error:
        save_checkpoint(tmp_path, model, progress=TrainProgress(step=2), config=config, data=DATA)
    assert {path.name for path in first.parent.iterdir()} == {first.name, "LATEST"}
    found = re.search(
        r"File too large.* A checkpoint needs about ([\d.]+) MB, and ([\d.,]+) MB are free there",
        str(error.value),
    )
    assert found is not None, error.value
    size = sum(file.stat().st_size for file in first.iterdir())
    assert 0.8 * size < 1e6 * float(found[1]) < 1.2 * size
    free = shutil.disk_usage(tmp_path).free
    assert abs(1e6 * float(found[2].replace(",", "")) - free) < 0.1 * free


def test_what_a_killed_save_has_left_goes(groups, tmp_path):
    config = tiny_run()
    model, saver = build_model_and_optimizer(config, groups), Saver(tmp_path, config)
    (tmp_path / "checkpoints/.partial_step_00000002").mkdir(parents=True)
    (tmp_path / "checkpoints/.partial_step_00000002/__0_0.distcp").write_bytes(b"x" * 100)
    (tmp_path / "checkpoints/.LATEST.new").write_text("step_00000002")
    saver.clear()
    assert not list((tmp_path / "checkpoints").iterdir())
    saver.begin(model, progress=TrainProgress(step=3), data=DATA)
    saver.finish()
    saver.close()


def test_a_save_that_an_error_of_the_only_rank_interrupts_is_finished(groups, tmp_path):
    config = replace(tiny_run(), checkpoint=BACKGROUND)
    model, saver = build_model_and_optimizer(config, groups), Saver(tmp_path, config)
    saver.begin(model, progress=TrainProgress(step=2), data=DATA)
    run: Any = SimpleNamespace(saver=saver, export=lambda path: exported.append(path))
    exported, said = list[Path](), list[str]()
    logger: Any = SimpleNamespace(info=said.append)
    close_saver(run, logger)
    assert find_checkpoint(tmp_path) == tmp_path / "checkpoints/step_00000002" == exported[0]
    assert said[0].startswith(f"saved {exported[0]} in") and said[1].startswith("exported to")


def test_an_old_checkpoint_that_cannot_be_removed_yet_does_not_end_the_run(
    groups, tmp_path, monkeypatch
):
    """On NFS a folder is not empty while somebody reads a file that has been removed."""
    config = replace(tiny_run(), checkpoint=CheckpointConfig(keep_last=1))
    model, saver = build_model_and_optimizer(config, groups), Saver(tmp_path, config)

    def refuse(path, **_):
        raise OSError(errno.ENOTEMPTY, "Directory not empty", path)

    with monkeypatch.context() as busy:
        busy.setattr(os, "rmdir", refuse)
        for step in (1, 2, 3):
            saver.begin(model, progress=TrainProgress(step=step), data=DATA)
            saver.finish()
        saver.clear()  # waits for the thread that removes
    saver.begin(model, progress=TrainProgress(step=4), data=DATA)
    saver.finish()
    saver.close()
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["LATEST", "step_00000004"]


def test_a_folder_that_has_gone_is_named(groups, tmp_path):
    config = tiny_run()
    model = build_model_and_optimizer(config, groups)
    (tmp_path / "checkpoints").touch()
    with pytest.raises(CheckpointError, match=r"checkpoints/.partial_step_00000002 cannot be wr"):
        save_checkpoint(tmp_path, model, progress=TrainProgress(step=2), config=config, data=DATA)


def test_the_best_checkpoint_is_named_and_kept(groups, tmp_path):
    config = replace(tiny_run(), checkpoint=CheckpointConfig(keep_last=1))
    model, saver = build_model_and_optimizer(config, groups), Saver(tmp_path, config)
    places = tmp_path / "checkpoints"
    copy = places / "step_00000002_good"  # somebody's own
    copy.mkdir(parents=True)
    for step, best in ((1, True), (2, True), (3, False), (4, False)):
        saver.begin(model, progress=TrainProgress(step=step), data=DATA, best=best)
        saver.finish()
    saver.close()
    copy.rmdir()
    assert sorted(path.name for path in places.glob("step_*")) == ["step_00000002", "step_00000004"]
    assert find_checkpoint(places / "LOWEST_VAL") == places / "step_00000002"
    assert find_checkpoint(tmp_path) == places / "step_00000004"
