"""Rejected partners of media, in a folder of their own."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import pytest
import torch
from PIL import Image

from data_prep.cli.parser import main
from data_prep.media.clips import REJECTED_LATENT
from dit import batch
from tests.media_files import image
from tests.unit.data_prep.sources.test_references import TEXT, by_name, latent_of, pack, refused

OPTIONS = ("--size_multiple", 16, "--max_bad_fraction", "0.9", "--missing_caption", "empty", *TEXT)


@pytest.fixture
def media(tmp_path: Path) -> Path:
    for number, name in enumerate(("deep/a.png", "b.png", "none.png", "size.png", "bad.png")):
        image(tmp_path / "good" / name, 48, 32, seed=number)
    image(tmp_path / "bad/deep/a.webp", 48, 32, seed=11)
    image(tmp_path / "bad/b.bmp", 48, 32, seed=12)
    image(tmp_path / "bad/size.png", 32, 48, seed=13)
    (tmp_path / "bad/bad.png").write_bytes(b"no picture")
    return tmp_path


def test_pairs_of_two_folders(media: Path, read_samples, capsys) -> None:
    paired = ("--image_dir", media / "good", "--rejected_dir", media / "bad")
    assert pack(media / "plan", *OPTIONS, *paired, "--plan") == 0
    assert "2 x rejected partner" in capsys.readouterr().out
    assert pack(media / "out", *OPTIONS, *paired) == 0
    assert "packed: 2 x rejected partner" in capsys.readouterr().out
    found = by_name(read_samples(media / "out"))
    assert found.keys() == {"a.png", "b.png"} and found["a.png"]["rejected"] == "deep/a.webp"
    for name, path in (("a.png", "deep/a.webp"), ("b.png", "b.bmp")):
        expected = latent_of(media / "out", media / "bad" / path, (48, 32))
        torch.testing.assert_close(found[name][REJECTED_LATENT], expected)
        assert not torch.equal(found[name][REJECTED_LATENT], found[name]["latent"])
    why = refused(media / "out")
    assert why["none.png"][0] == "rejected picture or video is missing"
    assert "bad/none with the ending of a picture (--rejected_dir)" in why["none.png"][1]
    assert "size.png has 32 x 48 pixels, and its preferred one 48 x 32" in why["size.png"][1]
    assert "bad.png" in why["bad.png"][1] and "cannot be used" in why["bad.png"][0]
    assert main(["inspect", str(media / "out")]) == 0
    assert "2 samples with a rejected partner" in capsys.readouterr().out
    assert batch.REJECTED_LATENT == REJECTED_LATENT


def test_pairs_of_a_dataset_file(media: Path, read_samples) -> None:
    lines = f"directory:\n  - path: {media / 'good'}\n    rejected_path: {media / 'bad'}\n"
    (media / "sets.yaml").write_text(lines)
    assert pack(media / "out", *OPTIONS, "--dataset_config", media / "sets.yaml") == 0
    assert all(REJECTED_LATENT in one for one in read_samples(media / "out").values())


def test_pairs_of_a_table(media: Path, read_samples, capsys) -> None:
    """A row that names none has no partner; what is named as one alone is no sample."""
    image(media / "good/less.png", 48, 32, seed=21)
    image(media / "good/small.png", 16, 32, seed=22)
    rows = ("deep/a.png,less.png", "b.png,", "size.png,small.png", "none.png,gone.png")
    (media / "good/bad.png").unlink()
    table = "\n".join(["file_name,rejected_path,text", *(f"{row},words" for row in rows)])
    (media / "good/metadata.csv").write_text(table)
    assert pack(media / "out", *OPTIONS, "--image_dir", media / "good") == 0
    assert "2 x control or rejected picture that a table names" in capsys.readouterr().out
    found = by_name(read_samples(media / "out"))
    assert found.keys() == {"a.png", "b.png"} and REJECTED_LATENT not in found["b.png"]
    expected = latent_of(media / "out", media / "good/less.png", (48, 32))
    torch.testing.assert_close(found["a.png"][REJECTED_LATENT], expected)
    why = refused(media / "out")
    assert why["none.png"][0] == "rejected picture or video is missing"
    assert "gone.png" in why["none.png"][1]
    assert "small.png has 16 x 32 pixels, and its preferred one 48 x 32" in why["size.png"][1]
    two = '{"file_name": "b.png", "text": "words", "rejected_path": ["less.png", "small.png"]}'
    (media / "good/metadata.csv").unlink()
    (media / "good/metadata.jsonl").write_text(two)
    pack(media / "two", *OPTIONS, "--image_dir", media / "good")
    assert "2 files in rejected_path; give it one" in refused(media / "two")["b.png"][1]


def test_a_file_is_no_partner_of_itself(media: Path, read_samples, capsys) -> None:
    """Also through links, and in another spelling of the folder; copies are counted."""
    good, mixed = media / "good", media / "mixed"
    for folder in (good, good / "../good/deep/.."):
        assert pack(media / "own", *OPTIONS, "--image_dir", good, "--rejected_dir", folder) == 1
        assert "b.png is the preferred file itself" in capsys.readouterr().err
    mixed.mkdir()
    (mixed / "b.png").symlink_to(good / "b.png")
    (mixed / "none.png").hardlink_to(good / "none.png")
    shutil.copy(good / "size.png", mixed / "size.png")
    Image.open(good / "bad.png").save(mixed / "bad.bmp")
    paired = ("--image_dir", good, "--rejected_dir", mixed)
    said = "2 x rejected partner of the same pixels: the pair teaches nothing"
    assert pack(media / "plan", *OPTIONS, *paired, "--plan") == 0
    assert said in capsys.readouterr().out
    assert pack(media / "out", *OPTIONS, *paired) == 0
    assert said in capsys.readouterr().out
    assert {"b.png", "none.png"} < refused(media / "out").keys()
    assert by_name(read_samples(media / "out")).keys() == {"size.png", "bad.png"}


@pytest.mark.parametrize("in_archive", [False, True])
def test_a_row_that_names_its_own_file(in_archive: bool, media: Path, capsys) -> None:
    row = '{"file_name": "deep/a.png", "text": "words", "rejected_path": "deep/../deep/a.png"}'
    (media / "good/metadata.jsonl").write_text(row)
    folder = media / "good"
    if in_archive:
        folder = media / "archives"
        folder.mkdir()
        with tarfile.open(folder / "a.tar", "w") as archive:
            for path in sorted((media / "good").rglob("*.*")):
                archive.add(path, path.relative_to(media / "good"))
    assert pack(media / "out", *OPTIONS, "--image_dir", folder) == 0
    ((reason, detail),) = refused(media / "out").values()
    assert reason == "rejected picture or video cannot be used"
    assert "deep/a.png is the preferred file itself, and such a pair teaches nothing" in detail


def test_controls_and_masks_that_are_the_sample_itself_are_counted(media: Path, capsys) -> None:
    good = media / "good"
    own = ("--image_dir", good, "--control_dir", good, "--mask_dir", good)
    for out, more in (("quick", ["--plan=quick"]), ("out", [])):
        assert pack(media / out, *OPTIONS, *own, *more) == 0
        said = capsys.readouterr().out
        assert "5 x control picture that is the sample itself" in said
        assert "5 x loss mask that is the sample itself" in said
    image(media / "copies/b.png", 48, 32, seed=1)
    paired = ("--image_dir", good, "--control_dir", media / "copies")
    assert pack(media / "copied", *OPTIONS, *paired) == 0
    assert "1 x control picture that is the sample itself" in capsys.readouterr().out
