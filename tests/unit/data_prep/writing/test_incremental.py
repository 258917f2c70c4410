"""A second run over changed files makes what a first run would, without doing it all again."""

import json
import shutil
from pathlib import Path

import pytest

from data_prep.cli.parser import main
from data_prep.media.clips import Clip, Entry
from data_prep.sources.digits import Digits
from data_prep.sources.media_source import MediaSource
from dit.codecs.vae import Pixel
from tests.media_files import image

ALL_TRAIN = ("--split", "0.8,0.2,0", "--num_workers", "0", "--text_width", "16")


class Unwhitened(Pixel):
    """Does not depend on the rest of the dataset, as most processors."""

    whitens_by_dataset = False


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sources of all files that were decoded."""
    found: list[str] = []
    before = MediaSource.read

    def read(self: MediaSource, entry: Entry) -> Clip:
        found.append(entry.source)
        return before(self, entry)

    monkeypatch.setattr(MediaSource, "read", read)
    monkeypatch.setattr("data_prep.packing.PICTURES", 0)  # of README.md, which are read again
    monkeypatch.setattr(Pixel, "whitens_by_dataset", False)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for index in range(40):
        image(tmp_path / f"in/{index}.png", 16 + 8 * (index % 3), 16, seed=index)
    return tmp_path / "in"


def run(folder: Path, out: Path, *more: str) -> int:
    words = ("image", "--image_dir", str(folder), "--output_dir", str(out), "--shard_size", "9")
    return main([*words, *ALL_TRAIN, *more])


def test_changed_added_and_removed_files(folder: Path, tmp_path: Path, reads, content_of) -> None:
    out = tmp_path / "out"
    assert run(folder, out) == 0 and len(reads) == 40
    reads.clear()
    assert run(folder, out) == 0 and reads == []
    (folder / "3.png").unlink()
    image(folder / "7.png", 32, 32, seed=99)
    image(folder / "new/41.png")
    (folder / "9.txt").write_text("a caption now")
    assert run(folder, out) == 0
    assert sorted(reads) == ["7.png", "9.png", "new/41.png"]
    assert run(folder, tmp_path / "fresh") == 0
    assert content_of(out) == content_of(tmp_path / "fresh")
    assert not list((out / ".ledger").glob("earlier-*"))


def test_a_kill_while_files_are_taken_over(folder: Path, tmp_path: Path, reads, content_of) -> None:
    out = tmp_path / "out"
    assert run(folder, out) == 0
    image(folder / "7.png", 32, 32, seed=99)
    before = MediaSource.read

    def die(*_: object) -> Clip:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MediaSource, "read", die)
        assert run(folder, out) == 130
    assert MediaSource.read is before and not (out / ".nv-meta").exists()
    image(folder / "8.png", 32, 32, seed=100)  # and changes once more
    reads.clear()
    assert run(folder, out) == 0
    assert sorted(reads) == ["7.png", "8.png"]
    assert run(folder, tmp_path / "fresh") == 0
    assert content_of(out) == content_of(tmp_path / "fresh")


def test_whitening_follows_the_dataset(folder: Path, tmp_path: Path, content_of) -> None:
    out = tmp_path / "out"
    assert run(folder, out) == 0
    image(folder / "new.png", 64, 64, "L")
    assert run(folder, out) == 0  # every sample is whitened by other numbers now
    assert run(folder, tmp_path / "fresh") == 0
    assert content_of(out) == content_of(tmp_path / "fresh")


def test_trusted_plans_are_not_looked_up_again(folder: Path, tmp_path: Path, reads, capsys) -> None:
    out = tmp_path / "out"
    assert run(folder, out) == 0
    shutil.rmtree(folder)
    assert run(folder, out, "--trust_cache", "--cache_only") == 0
    assert run(folder, out) == 1 and "is not a folder" in capsys.readouterr().err
    assert (out / ".nv-meta").exists() and (out / "plan.jsonl").exists()


def test_other_options_never_mix(folder: Path, tmp_path: Path, reads, capsys, content_of) -> None:
    out = tmp_path / "out"
    assert run(folder, out) == 0
    before = content_of(out)
    assert run(folder, out, "--max_pixels", "200") == 1
    error = capsys.readouterr().err
    assert "max_pixels: None -> 200" in error and "--overwrite" in error
    assert content_of(out) == before
    assert run(folder, out, "--max_bad_fraction", "0.5") == 0 and content_of(out) == before
    assert run(folder, out, "--max_pixels", "200", "--overwrite", "--plan") == 0
    planned = content_of(out)  # a plan removes no shards, whatever is asked for
    assert all(planned[name] == before[name] for name in before if name != "plan.jsonl")
    assert main(["video", "--image_dir", str(folder), "--output_dir", str(out)]) == 1
    assert "block_size: 32 -> 4 (of the command: image or video)" in capsys.readouterr().err
    assert run(folder, out, "--max_pixels", "200", "--regenerate_cache") == 0
    assert run(folder, tmp_path / "fresh", "--max_pixels", "200") == 0
    assert content_of(out) == content_of(tmp_path / "fresh")


def test_a_repaired_file_is_taken_in(folder: Path, tmp_path: Path, reads, content_of) -> None:
    out = tmp_path / "out"
    whole = (folder / "5.png").read_bytes()
    for index in range(4, 8):
        (folder / f"{index}.png").write_bytes(whole[:60])
    assert run(folder, out) == 1 and not (out / ".nv-meta").exists()
    assert len((out / "refused.jsonl").read_text().splitlines()) == 4
    for index in range(4, 8):
        image(folder / f"{index}.png", seed=index)
    assert run(folder, out) == 0 and len(set(reads)) == 40 and len(reads) == 44
    assert json.loads((out / "dataset_card.json").read_text())["refused"] == {}


def test_digits_are_the_same_source(tmp_path: Path, pack_digits, content_of) -> None:
    pack_digits(tmp_path / "a", Digits(num_samples=60), Unwhitened.of(block=2, colours=1))
    pack_digits(tmp_path / "b", Digits(num_samples=40), Unwhitened.of(block=2, colours=1))
    pack_digits(tmp_path / "b", Digits(num_samples=60), Unwhitened.of(block=2, colours=1))
    assert content_of(tmp_path / "a") == content_of(tmp_path / "b")
