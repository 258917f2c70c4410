"""Pictures of other colours than sRGB from the command line to the card, and in generation."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from data_prep.cli.parser import main
from data_prep.media.images import open_image, to_rgb
from dit.sampling.given_pictures import read_picture
from tests.colour_files import FILES

HDR = "HDR picture: colours are pale, as those of SDR are assumed; convert it to SDR"


def run(out: Path, *arguments: object) -> int:
    pack = ("--processor", "pixel", "--pixel_block", "8", "--minutes", "0", "--num_workers", "0")
    always = ("--split", "1,0,0", "--text_encoder", "bytes", *pack)
    return main(["image", "--output_dir", str(out), *always, *map(str, arguments)])


def written(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / f"{name}.{name.split()[0]}").write_bytes(FILES[name]())
    return folder


def test_plan_packing_and_card_count_hdr_pictures(tmp_path: Path, capsys) -> None:
    hdr = ("avif nclx 9-16", "avif nclx 9-18", "webp ICC numbers 9-16")
    media = written(tmp_path / "media", *hdr, "avif nclx 12-13", "jpeg Exif 65535 and R03")
    for plan in ("--plan=quick", "--plan"):
        assert run(tmp_path / "plan", "--image_dir", media, plan) == 0
        assert f"planned: 3 x {HDR}" in capsys.readouterr().out
        notes = json.loads((tmp_path / "plan/plan_summary.json").read_text())["notes"]
        assert notes[HDR] == 3
    assert run(tmp_path / "out", "--image_dir", media) == 0
    assert f"packed: 3 x {HDR}" in capsys.readouterr().out
    notes = json.loads((tmp_path / "out/dataset_card.json").read_text())["notes"]
    assert notes[HDR] == 3 and sum("EXIF says Adobe RGB" in note for note in notes) == 1


def test_controls_and_rejected_partners_are_counted(tmp_path: Path, capsys) -> None:
    for folder, told in (("after", "none"), ("before", "nclx 9-16"), ("worse", "nclx 9-18")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.avif").write_bytes(FILES[f"avif {told}"]())
    beside = ("--control_dir", tmp_path / "before", "--rejected_dir", tmp_path / "worse")
    assert run(tmp_path / "out", "--image_dir", tmp_path / "after", *beside) == 0
    assert f"packed: 1 x control or rejected: {HDR}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["png cICP 12-8", "avif nclx 12-13", "png RGB 16 iCCP linear sRGB"]
)
def test_generation_reads_the_colours_that_packing_reads(name: str, tmp_path: Path) -> None:
    (file := tmp_path / f"a.{name.split()[0]}").write_bytes(FILES[name]())
    packed = np.asarray(to_rgb(open_image(file)))
    (given_3HW,) = read_picture(str(file), *packed.shape[:2], option="--image")
    np.testing.assert_array_equal(((given_3HW + 1) * 127.5).round().byte().permute(1, 2, 0), packed)
    assert packed[0, 8, 0] > 210  # stored as 200
