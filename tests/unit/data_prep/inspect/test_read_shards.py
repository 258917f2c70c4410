"""Damage anywhere in a packed folder is found, and named."""

import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from data_prep.cli.parser import main


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "digits"
    options = ["--num_samples", "60", "--shard_size", "20", "--split", "1,0,0"]
    options += ["--text_encoder", "bytes"]
    assert main(["digits", "--output_dir", str(folder), *options]) == 0
    return folder


@pytest.fixture
def inspect(whole: Path, tmp_path: Path, capsys) -> Callable[[Callable[[Path], None]], str]:
    """What `inspect` says on standard error about a copy that `damage` has changed."""

    def look(damage: Callable[[Path], None]) -> str:
        shutil.copytree(whole, tmp_path / "copy")
        damage(tmp_path / "copy" / "train" / "shard-000001.tar")
        capsys.readouterr()
        assert main(["inspect", str(tmp_path / "copy")]) == 1
        return capsys.readouterr().err

    return look


def key_in(shard: Path, number: int) -> str:
    start = int(np.fromfile(shard.with_suffix(".tar.idx"), np.uint64)[number])
    return shard.read_bytes()[start : start + 100].split(b".")[0].decode()


def test_a_whole_dataset(whole: Path, capsys) -> None:
    assert main(["inspect", str(whole)]) == 0
    out = capsys.readouterr().out
    assert "60 samples in 3 shards" in out and out.count("good") == 3
    assert "4,1,4,4" in out and "18-20" in out


def test_flipped_bits(inspect, whole: Path) -> None:
    def flip(shard: Path) -> None:
        content = bytearray(shard.read_bytes())
        with tarfile.open(shard) as tar:
            member = tar.getmember(f"{key}.safetensors")
        content[member.offset_data + member.size - 9] ^= 4
        shard.write_bytes(content)

    key = key_in(whole / "train/shard-000001.tar", 7)
    error = inspect(flip)
    assert f"train/shard-000001.tar, key {key}: checksum of .safetensors is" in error
    assert error.splitlines()[1:] == [error.splitlines()[-1]] and "are damaged;" in error


@pytest.mark.parametrize("kept", [0, 100, 30_000, 33_333])
def test_a_shard_cut_short(inspect, kept: int) -> None:
    def cut(shard: Path) -> None:
        shard.write_bytes(shard.read_bytes()[:kept])

    error = inspect(cut)
    assert "train/shard-000001.tar" in error and ".nv-meta says 20" in error


def test_a_shard_cut_exactly_between_two_samples(inspect) -> None:
    def cut(shard: Path) -> None:
        end = int(np.fromfile(shard.with_suffix(".tar.idx"), np.uint64)[12])
        shard.write_bytes(shard.read_bytes()[:end])

    assert "train/shard-000001.tar has 12 samples, .nv-meta says 20" in inspect(cut)


def test_the_end_of_the_archive_is_missing(inspect) -> None:
    def cut(shard: Path) -> None:
        end = int(np.fromfile(shard.with_suffix(".tar.idx"), np.uint64)[-1])
        shard.write_bytes(shard.read_bytes()[:end])

    assert "train/shard-000001.tar is damaged or cut short after 20 samples" in inspect(cut)


def test_a_missing_shard(inspect) -> None:
    assert "No such file" in inspect(Path.unlink)


def test_a_stale_index(inspect) -> None:
    def swap(shard: Path) -> None:
        index = np.fromfile(shard.with_suffix(".tar.idx"), np.uint64)
        index[3] += 512
        index.tofile(shard.with_suffix(".tar.idx"))

    assert "train/shard-000001.tar.idx has other offsets" in inspect(swap)


def test_encoders_that_cannot_be_rebuilt(inspect) -> None:
    def forget(shard: Path) -> None:
        (shard.parents[1] / "dataset_card.json").write_text('{"format_version": 1}')

    assert "dataset_card.json has no object 'processor'" in inspect(forget)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file"),
        (b"", "SafetensorError: "),
        (b"no safetensors at all", "SafetensorError: "),
        (safetensors.torch.save({"other": torch.ones(2)}), "'text' is missing"),
    ],
)
def test_a_null_text_that_cannot_be_read(inspect, content: bytes | None, why: str) -> None:
    def damage(shard: Path) -> None:
        path = shard.parents[1] / "null_text.safetensors"
        path.unlink() if content is None else path.write_bytes(content)

    found = inspect(damage)
    assert "null_text.safetensors cannot be read: " in found and why in found


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no .nv-meta"),
        ("{", ".info.json is damaged (it is not JSON: Expecting property name"),
        ("[]", "(it has no object 'shard_counts' with the samples of each shard); pack"),
        ('{"shard_counts": [3]}', "(it has no object 'shard_counts' with"),
        ('{"shard_counts": {"a.tar": "3"}}', "('a.tar': '3' in 'shard_counts' is not a number"),
        ('{"shard_counts": {"a.tar": null}}', "('a.tar': null in 'shard_counts' is not a number"),
        ('{"shard_counts": {"../a.tar": 3}}', "('../a.tar' in 'shard_counts' is not a path"),
    ],
)
def test_a_folder_without_readable_metadata(
    whole: Path, tmp_path: Path, capsys, content: str | None, message: str
) -> None:
    shutil.copytree(whole, tmp_path / "copy")
    info = tmp_path / "copy/.nv-meta/.info.json"
    info.unlink() if content is None else info.write_text(content)
    assert main(["inspect", str(tmp_path / "copy")]) == 1
    assert message in capsys.readouterr().err


def test_samples_are_read_where_the_metadata_says(whole: Path) -> None:
    counts = json.loads((whole / ".nv-meta/.info.json").read_text())["shard_counts"]
    assert counts == {f"train/shard-{index:06d}.tar": 20 for index in range(3)}
