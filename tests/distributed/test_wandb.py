"""Weights & Biases without an account: offline mode writes beside the run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launching import metrics, pretrain

_HEAD, _BLOCK = 7, 32_768  # bytes: before each piece and before the first; after which pieces begin


def _records(file: Path) -> Iterator[bytes]:
    """The records of a `.wandb` file, a log in pieces like LevelDB's."""
    content, at, record = file.read_bytes(), _HEAD, b""
    while at < len(content):
        if _BLOCK - at % _BLOCK < _HEAD:
            at += _BLOCK - at % _BLOCK
        size = int.from_bytes(content[at + 4 : at + 6], "little")
        kind = content[at + 6]  # 1 is whole; 2, 3 and 4 are first, middle and last
        record += content[at + _HEAD : at + _HEAD + size]
        at += _HEAD + size
        if kind in (1, 4):
            yield record
            record = b""


def _history(file: Path) -> dict[int, dict]:
    """What was logged, by step."""
    from wandb.proto.wandb_internal_pb2 import Record

    found: dict[int, dict] = {}
    for content in _records(file):
        record = Record()
        record.ParseFromString(content)
        line = {
            "/".join(item.nested_key) or item.key: json.loads(item.value_json)
            for item in record.history.item
        }
        if line:
            found[line["_step"]] = line
    return found


@pytest.mark.slow
def test_offline_run_continues_under_the_same_identity(digits, tmp_path):
    pytest.importorskip("wandb")
    file = tmp_path / "prompts.json"
    moving = {"caption": "a handwritten two", "num_frames": 3}
    file.write_text(json.dumps([moving, "a handwritten one"]))
    shared = (f"dataset.path={digits}", "logger.wandb_project=x", "logger.wandb_mode=offline")
    sampling = (f"validation.prompts_file={file}", "validation.sampling_steps=1")
    shared += ("train.eval_interval=3", "train.eval_iters=1", *sampling)
    said = pretrain(tmp_path, *shared, "train.train_iters=3").stdout
    identity = (tmp_path / "wandb_id").read_text()
    pretrain(tmp_path, *shared, "train.train_iters=5", "scheduler.lr_decay_iters=5")
    assert (tmp_path / "wandb_id").read_text() == identity
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert "step 3/3" in said

    places = sorted((tmp_path / "wandb").glob(f"offline-run-*-{identity}"))
    assert len(places) == 2
    for place, steps in zip(places, ([1, 2, 3], [4, 5]), strict=True):
        history = _history(next(place.glob("*.wandb")))
        assert sorted(history) == steps
        for step in steps:
            named = {k: v for k, v in lines[step - 1].items() if k != "step"}
            bins = named.pop("tokens_per_sample")
            assert history[step].items() >= named.items()
            assert [n for n in history[step]["tokens_per_sample/values"] if n] == [
                count for _, count in bins
            ]
            assert history[step]["tokens_per_sample/bins"][-1] == bins[-1][0]
        last = history[steps[-1]]
        drawn = tmp_path / f"validation_generation/step_0000000{steps[-1]}"
        grid = (place / "files" / last["samples/path"]).read_bytes()
        assert grid == (drawn / "grid.png").read_bytes()
        (video,) = last["videos/videos"]
        assert video["caption"] == "a handwritten two"
        assert (place / "files" / video["path"]).read_bytes() == (drawn / "00000.mp4").read_bytes()
