"""The small files that a run reads again, whatever has happened to their bytes."""

from __future__ import annotations

import io
import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from dit.checkpoint_paths import (
    MANIFEST,
    CheckpointError,
    Manifest,
    find_checkpoint,
    read_manifest,
    saved_card,
    saved_config,
    saved_null_inputs,
    write_manifest,
)
from dit.config_loading import save_config
from dit.data.loader_state import LoaderLayout, LoaderState
from dit.data.rejections import DataError
from dit.train.checkpoint.data_position import data_positions, loader_file
from dit.train.metrics.jsonl import JsonlWriter, LogFileError
from dit.train.metrics.writers import _wandb_id
from tests.hostile import damaged, deep_json, json_bytes, mistaken, odd_text, odd_values
from tests.learning import tiny_run

LINES = [{"step": n, "loss": 1 / n, "tokens_per_sample": [[8, n]]} for n in range(1, 6)]
CONTENT = b"".join(json.dumps(line).encode() + b"\n" for line in LINES)
SKIPS = [{"step": n, "because": "loss", "keys": ["a/\u2028b", "c"]} for n in (2, 5)]
SKIP_CONTENT = b"".join(json.dumps(s, ensure_ascii=False).encode() + b"\n" for s in SKIPS)


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """One folder for all examples of a test."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def _reopened(file: Path, content: bytes, *, start: int, every_step: bool = True) -> JsonlWriter:
    file.write_bytes(content)
    lines = JsonlWriter(file, start=start, every_step=every_step)
    lines.write({"step": start + 1})
    lines.close()
    return lines


@given(
    content=damaged(CONTENT)
    | damaged(SKIP_CONTENT)
    | st.lists(json_bytes(LINES[0]), max_size=4).map(b"\n".join)
    | st.lists(odd_values.map(lambda value: json.dumps({"step": value}).encode())).map(b"\n".join),
    start=st.integers(1, 6),
)
def test_hostile_lines_of_a_run(place: Path, content: bytes, start: int) -> None:
    """Whole lines stay as they are, byte for byte; whatever else there is goes and is said."""
    file = place / "metrics.jsonl"
    lines = _reopened(file, content, start=start)
    *kept, new, end = file.read_bytes().split(b"\n")
    assert json.loads(new) == {"step": start + 1} and end == b""
    given_lines = content.split(b"\n")[:-1]
    assert all(line in given_lines and json.loads(line)["step"] <= start for line in kept)
    for line in CONTENT.splitlines():  # no neighbour of a fault is lost
        if json.loads(line)["step"] <= start:
            assert kept.count(line) == given_lines.count(line)
    steps = {json.loads(line)["step"] for line in kept}
    lost = set(range(min(steps, default=1), start + 1)) - steps
    assert any("has lost the lines" in note for note in lines.notes) == bool(lost)
    assert all(str(file) in note for note in lines.notes)
    assert not list(place.glob("*.partial"))


@pytest.mark.parametrize(
    ("content", "start", "said"),
    [
        (CONTENT, 5, []),
        (CONTENT, 3, []),
        (CONTENT + b'{"step": 6, "lo', 5, []),  # of a step that is made again
        (CONTENT[:-3], 5, ["has lost the lines of 1 step up to step 5 (the first is step 5)"]),
        (CONTENT[:40], 5, ["has lost the lines of 5 steps up to step 5 (the first is step 1)"]),
        (b"", 5, ["has lost the lines of 5 steps"]),
        (
            CONTENT.replace(b'{"step": 2', b'{"st\xffp": 2'),
            5,
            ["is damaged: 1 line that cannot be read (the first is line 2)", "has lost the lines"],
        ),
        (b'{"step": -9223372036854775808}\n' + CONTENT, 5, ["is damaged: 1 line"]),
        (CONTENT.partition(b"\n")[2], 5, []),  # begun from a checkpoint of another run
    ],
)
def test_what_is_lost_of_the_metrics_is_said(tmp_path, content, start, said):
    notes = _reopened(tmp_path / "metrics.jsonl", content, start=start).notes
    assert len(notes) == len(said)
    for note, part in zip(notes, said, strict=True):
        assert note.startswith(f"{tmp_path}/metrics.jsonl {part}")


def test_a_line_may_hold_what_ends_lines_elsewhere(tmp_path):
    file = tmp_path / "skipped_samples.jsonl"
    lines = _reopened(file, SKIP_CONTENT, start=5, every_step=False)
    assert file.read_bytes().startswith(SKIP_CONTENT) and not lines.notes


def test_lines_are_cut_where_there_is_no_room_for_a_second_file(tmp_path, monkeypatch):
    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    (tmp_path / "metrics.jsonl").open("wb").write(CONTENT)
    JsonlWriter(tmp_path / "metrics.jsonl", start=3)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(CONTENT.splitlines(True)[:3])
    (tmp_path / "metrics.jsonl").open("ab").write(b"[]\n" + CONTENT.splitlines(True)[3])
    with pytest.raises(LogFileError, match=rf"{tmp_path}/metrics.jsonl cannot be written \(No spa"):
        JsonlWriter(tmp_path / "metrics.jsonl", start=4)
    assert b"[]" in (tmp_path / "metrics.jsonl").read_bytes()


def _run(folder: Path) -> Path:
    """A run folder with two checkpoints, whole as far as names and sizes tell."""
    for step in (1, 2):
        path = folder / f"checkpoints/step_{step:08d}"
        path.mkdir(parents=True)
        for name in ("metadata.json", ".metadata", "null_text.safetensors"):
            (path / name).write_bytes(b"{}")
        save_config(tiny_run(), path / "config.yaml")
        write_manifest(path, {})
    return folder / "checkpoints"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "elsewhere").mkdir()
    (folder / "LATEST").write_text("elsewhere")
    return _run(folder / "run")


NAMES = ["step_00000001", "step_00000002"]
LEAVING = ["../elsewhere", "../../run/checkpoints/step_00000001", ".", "..", "/etc", "", "a/../b"]


@given(
    damaged(b"step_00000002\n")
    | odd_text.map(lambda text: text.encode("utf-8", "surrogatepass"))
    | st.sampled_from([name.encode() for name in (*LEAVING, *NAMES, "x" * 5000)])
    | st.binary(max_size=64)
)
@pytest.mark.parametrize("name", ["LATEST", "LOWEST_VAL"])
def test_hostile_pointers(checkpoints: Path, name: str, content: bytes) -> None:
    """A pointer means a checkpoint beside it, or ends in an error that names the pointer."""
    (checkpoints / name).write_bytes(content)
    try:
        found = find_checkpoint(checkpoints / name)
    except CheckpointError as error:
        assert str(checkpoints / name) in str(error) and len(str(error)) < 2000
    else:
        assert found is not None and found.parent == checkpoints and found.name in NAMES
        assert content.decode().strip() == found.name
    finally:
        (checkpoints / name).unlink()


@pytest.mark.parametrize("name", LEAVING)
def test_a_pointer_does_not_leave_its_folder(tmp_path, name):
    places = _run(tmp_path / "run")
    (tmp_path / "run/elsewhere").mkdir()
    (places / "LATEST").write_text(name)
    with pytest.raises(
        CheckpointError, match=r"LATEST names .* folder next to it; write step_0000"
    ):
        find_checkpoint(tmp_path / "run")


_MANIFEST = {
    "format": 1,
    "software": "megatron-dit 0.1.0",
    "files": {
        name: {"bytes": 2, "sha256": "ab"} for name in ("config.yaml", "metadata.json", ".metadata")
    },
}
_FOREIGN_NAMES = st.sampled_from(["../a", "/dev/zero", "a\x00b", "x" * 300, "..", ""]).map(
    lambda name: json.dumps(_MANIFEST | {"files": {name: {"bytes": 1, "sha256": ""}}}).encode()
)


@given(json_bytes(_MANIFEST) | _FOREIGN_NAMES)
def test_hostile_manifests(checkpoints: Path, content: bytes) -> None:
    path = checkpoints / NAMES[1]
    whole = (path / MANIFEST).read_bytes()
    (path / MANIFEST).write_bytes(content)
    try:
        with suppress(ValueError):
            found = read_manifest(path)
            assert isinstance(found, Manifest)
            assert all("/" not in name for name in found.files)
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            find_checkpoint(checkpoints)
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            saved_config(path)
    finally:
        (path / MANIFEST).write_bytes(whole)


@given(st.data())
def test_hostile_saved_configurations(checkpoints: Path, data: st.DataObject) -> None:
    """Other bytes than were saved are damage, whatever could be read of them."""
    file = checkpoints / NAMES[0] / "config.yaml"
    whole = file.read_bytes()
    content = data.draw(damaged(whole) | deep_json.map(str.encode) | st.binary(max_size=64))
    file.write_bytes(content)
    try:
        if content != whole:
            with pytest.raises(CheckpointError, match=re.escape(str(file.parent))):
                saved_config(file.parent)
    finally:
        file.write_bytes(whole)


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"model: [", b"[1]", b"5", b"model: 5", b"[" * 2000]
)
def test_a_saved_configuration_without_checksum_that_cannot_be_read_is_named(tmp_path, content):
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/config.yaml cannot be read"):
        saved_config(tmp_path)


@given(st.sampled_from(["dataset_card.json", "null_text.safetensors"]), st.data())
def test_hostile_small_files_of_a_checkpoint(place: Path, name: str, data: st.DataObject) -> None:
    """What generation reads, of a checkpoint that has no checksums."""
    texts = safetensors.torch.save({"text": torch.ones(2, 3)})
    of_card = json_bytes({"format_version": 1, "latent": {"mean": [0.5], "std": [1]}})
    content = data.draw(of_card if name == "dataset_card.json" else damaged(texts) | st.binary())
    (place / name).write_bytes(content)
    read = saved_card if name == "dataset_card.json" else saved_null_inputs
    try:
        found = read(place)
    except CheckpointError as error:
        assert str(place / name) in str(error)
    else:
        assert isinstance(found, dict | torch.Tensor)


def _saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


LAYOUT = LoaderLayout(ranks=1, workers=0)
POSITION = LoaderState.start(LAYOUT, rank=0, identity={"rng.seed": 1}).plain()


@pytest.mark.usefixtures("groups")
@given(
    damaged(_saved(POSITION))
    | mistaken({k: v for k, v in POSITION.items() if k != "readers"}).map(_saved)
    | odd_values.map(_saved)
    | st.binary(max_size=64)
)
def test_hostile_loader_positions(place: Path, content: bytes) -> None:
    """The file is named where it cannot be read, the checkpoint's loader state where it is odd."""
    (place / loader_file(0)).write_bytes(content)
    try:
        LoaderState.of(data_positions(place, LAYOUT, rank=0)[0])
    except CheckpointError as error:
        assert str(place) in str(error)
    except DataError as error:
        assert "the loader state of the checkpoint" in str(error)


@pytest.mark.parametrize("content", [b"", b"\xff", b"a b", b"x" * 999, b"../a"])
def test_an_identity_of_wandb_that_is_none_names_its_file(tmp_path, content):
    (tmp_path / "wandb_id").write_bytes(content)
    with pytest.raises(ValueError, match=rf"{tmp_path}/wandb_id holds .* remove it"):
        _wandb_id(tmp_path)
    (tmp_path / "wandb_id").write_bytes(b"0123abcd\n")
    assert _wandb_id(tmp_path) == "0123abcd"


@pytest.mark.parametrize("name", ["config.yaml", "metadata.json", ".metadata"])
def test_a_manifest_that_has_lost_an_entry_is_damaged(tmp_path, name):
    path = _run(tmp_path) / NAMES[1]
    content = json.loads((path / MANIFEST).read_bytes())
    del content["files"][name]
    (path / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=rf"damaged manifest.json .*not list {name}"):
        find_checkpoint(path)
