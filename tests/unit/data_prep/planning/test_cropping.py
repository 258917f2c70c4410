"""The area that cropping takes, of everything that is cropped, and what is said of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_prep.cli.parser import main
from data_prep.media.clips import Entry, PlannedReference
from data_prep.media.resizing import Buckets, Fit
from data_prep.planning.cropping import CropStatistics, crop_line
from tests.media_files import video


def entry(name, file, resized, size, references=()):
    return Entry(
        key=name, source=name, width=file[0], height=file[1], resized=resized, size=size,
        references=references,
    )  # fmt: skip


def test_samples_and_control_pictures_are_counted_by_their_area():
    control = PlannedReference(
        name="c.png", folder=0, where="c.png", stamp="", resized=(40, 40), size=(40, 20)
    )
    others = {
        "--half": Buckets(sizes=((16, 16),)),
        "--whole": Buckets(sizes=((16, 16),), center_crop=False),
        "--never": Fit(size_multiple=1000, max_pixels=None),
    }
    found = CropStatistics(others=others)
    found.add(entry("a.png", (32, 16), (32, 16), (32, 16)))
    found.add(entry("b.png", (100, 50), (32, 16), (24, 16), (control,)))
    found.add(Entry(key="refused", source="refused", refused="too small"))
    assert found.summary == {
        "cropped": 2,
        "of": 3,
        "what": "samples and control pictures",
        "mean_area": 0.25,
        "largest_area": 0.5,
        "worst": "c.png: 40 x 40 -> 40 x 20",
        "less_with": {"--whole": 0.0},
    }
    assert crop_line(found.summary) == (
        "2 of 3 samples and control pictures are cropped, which takes 25.0% of the area on average"
        " and 50.0% at most (c.png: 40 x 40 -> 40 x 20); --whole would take 0.0%"
    )
    assert crop_line(CropStatistics().summary) == ""


def picture(path: Path, size) -> None:
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(np.zeros((size[1], size[0], 3), np.uint8)).save(path)


@pytest.mark.parametrize(
    ("options", "size", "lost", "better"),
    [
        ("--max_pixels 1024", (32, 32), 0.0588, "--bucketing aspect --no_center_crop (stretched)"),
        ("--max_pixels 600", (24, 24), 0.0769, "--max_pixels 1200"),
        ("", (136, 128), 0.0, None),
        ("--size_multiple 32", (128, 128), 0.0588, "--size_multiple 4 (for model.patch_spatial=1)"),
        ("--bucketing aspect --max_pixels 1024", (32, 32), 0.0588, "--no_center_crop (stretched)"),
        ("--width 32 --height 16", (32, 16), 0.4667, "--bucketing native --max_pixels 512"),
        ("--width 32 --height 16 --no_center_crop", (32, 16), 0.0, None),
    ],
)
@pytest.mark.parametrize("kind", ["image", "video"])
def test_a_plan_counts_what_each_option_crops(
    tmp_path, capsys, kind, options, size, lost, better
) -> None:
    """Pictures with masks and control pictures, and videos."""
    given = ["--image_dir", tmp_path / "in", "--mask_dir", tmp_path / "masks"]
    given += ["--control_dir", tmp_path / "before"]
    if kind == "video":
        given = ["--video_dir", tmp_path / "in", "--processor", "pixel", "--num_frames", "5"]
        video(tmp_path / "in/a.mp4", size=(136, 128))
    else:
        for folder in ("in", "masks", "before"):
            picture(tmp_path / folder / "a.png", (136, 128))
    out = ["--output_dir", tmp_path / "out", "--plan"]
    assert main([kind, *map(str, [*given, *out]), *options.split()]) == 0
    said, plan = capsys.readouterr().out, tmp_path / "out"
    found = json.loads((plan / "plan_summary.json").read_text())["cropped"]
    (line,) = (plan / "plan.jsonl").read_text().splitlines()
    assert tuple(json.loads(line)["size"]) == size
    assert found.get("mean_area", 0.0) == lost
    assert ("cropped, which takes" in said) == bool(lost)
    assert ("cropped, which takes" in (plan / "plan.html").read_text()) == bool(lost)
    assert better is None or f"{better} would take" in said
