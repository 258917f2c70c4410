"""A plan says what a run then does: samples, splits by their keys, the area that cropping takes."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.energon.flavors.webdataset.config import skip_meta_re, split_name_re
from PIL import Image

from data_prep.cli.parser import main
from data_prep.media.clips import Entry, PlannedReference
from data_prep.media.resizing import Buckets, Fit
from data_prep.planning.splits import Split, SplitFractions, key_of, position_of
from data_prep.planning.statistics import CropStatistics, crop_line
from data_prep.refusals import PrepError
from tests.media_files import image, numbered_video, video


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Good files, and two whose damage their headers do not show."""
    root = tmp_path / "in"
    for name in ("a.png", "b.png"):
        image(root / name, 40, 32)
    numbered_video(root / "good.ts", "libx264", {"bf": "3", "g": "12"})
    video(root / "uneven.mp4", 8, times=[0, 0.1, 0.2, 0.5, 0.6, 1.0, 1.1, 1.2])
    photo = image(root / "cut.jpg", 320, 240)
    photo.write_bytes(photo.read_bytes()[: photo.stat().st_size // 2])
    film = numbered_video(root / "hit.mkv", "mpeg4", {"b": "2000000"})
    content = bytearray(film.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 400] = bytes(400)
    film.write_bytes(content)
    (root / "meta.json").write_text("[]")
    return root


def run(folder: Path, out: Path, *options: str) -> int:
    arguments = ["video", "--dataset_config", str(folder.parent / "all.yaml"), "--max_bad_fraction"]
    (folder.parent / "all.yaml").write_text("directory: [{path: in}]\n")
    arguments += ["0.5", "--split", "1,0,0", "--num_workers", "0", "--text_width", "16"]
    return main([*arguments, "--output_dir", str(out), *options])


def planned(out: Path) -> dict[str, Entry]:
    lines = (out / "plan.jsonl").read_bytes().splitlines()
    return {entry.source: entry for entry in map(Entry.from_line, lines)}


def test_a_plan_decodes_and_promises_what_is_packed(
    folder: Path, tmp_path: Path, capsys, read_samples
) -> None:
    out = tmp_path / "out"
    assert run(folder, out, "--plan") == 0
    shown = capsys.readouterr()
    assert "planned: 4 samples" in shown.out and "judged by decoding" in shown.out
    assert "decoding" in shown.err  # progress
    refused = {name: entry.refused for name, entry in planned(out).items() if entry.refused}
    assert set(refused) == {"cut.jpg", "hit.mkv"}
    token = "each of 8 x 8 pixels (model.patch_spatial=2)"
    assert token in shown.out and token in (out / "plan.html").read_text()
    summary = json.loads((out / "plan_summary.json").read_text())
    assert summary["patch_spatial"] == 2
    assert (summary["samples"], summary["judged_by"]) == (4, "decoding")
    assert sum(summary["refused"].values()) == 2
    assert "judged by decoding" in (out / "plan.html").read_text()

    assert run(folder, out) == 0
    assert set(read_samples(out)) == {"a.png", "b.png", "good.ts", "uneven.mp4"}
    lines = (out / "refused.jsonl").read_text().splitlines()
    assert {line["source"]: line["reason"] for line in map(json.loads, lines)} == refused


def test_the_decoded_plan_can_be_packed_as_it_is(folder: Path, tmp_path: Path, content_of) -> None:
    assert run(folder, tmp_path / "one", "--plan") == 0
    assert run(folder, tmp_path / "one", "--trust_cache") == 0
    assert run(folder, tmp_path / "two") == 0
    one, two = content_of(tmp_path / "one"), content_of(tmp_path / "two")
    shards = [name for name in two if name.endswith((".tar", ".idx"))]
    assert shards and all(one[name] == two[name] for name in shards)


def test_a_quick_plan_says_that_it_read_headers(folder: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    assert run(folder, out, "--plan=quick") == 0
    shown = capsys.readouterr().out
    assert "planned: 6 samples" in shown and "judged by headers alone" in shown
    assert "headers alone" in (out / "plan.html").read_text()
    assert "headers alone" in json.loads((out / "plan_summary.json").read_text())["judged_by"]


def test_a_variable_rate_is_kept_and_said(
    folder: Path, tmp_path: Path, capsys, read_samples
) -> None:
    out, note = tmp_path / "out", "1 x variable frame rate: frames as they are, fps is their mean"
    assert run(folder, out, "--plan") == 0
    assert f"planned: {note}" in capsys.readouterr().out
    assert "variable frame rate: frames as they are" in (out / "plan.html").read_text()
    entry = planned(out)["uneven.mp4"]
    assert len(set(entry.keep)) == 8
    assert run(folder, out) == 0
    assert f"packed: {note}" in capsys.readouterr().out
    sample = read_samples(out)["uneven.mp4"]
    assert entry.duration and sample["num_frames"] == 8
    assert sample["fps"] == entry.kept_fps == pytest.approx(8 / entry.duration)

    assert run(folder, tmp_path / "even", "--train_fps", "10", "--plan") == 0
    assert "1 x variable frame rate: frames at the even times" in capsys.readouterr().out
    assert len(planned(tmp_path / "even")["uneven.mp4"].keep) == round(10 * entry.duration)

    slow = "fewer frames a second than --train_fps"  # good.ts has 10, and 30 for the test of 29
    for fps, said in (("10", False), ("29", True)):
        assert run(folder, tmp_path / fps, "--train_fps", fps, "--plan=quick") == 0
        assert (slow in capsys.readouterr().out) is said


@pytest.mark.parametrize("fps", ["0", "1e9", "nan", "1e-5"])
def test_absurd_rates_are_named(folder: Path, tmp_path: Path, capsys, fps: str) -> None:
    assert run(folder, tmp_path / "out", "--train_fps", fps) == 1
    assert "error: --train_fps" in capsys.readouterr().err


@settings(deadline=None)
@given(source=st.text(min_size=1, max_size=300))
def test_keys_are_what_tar_and_loaders_take(source: str) -> None:
    key, member = key_of(source), f"{key_of(source)}.safetensors"
    assert re.fullmatch(r"[A-Za-z0-9_-]+", key)
    assert len(member) <= 100  # longer names need a second header
    assert split_name_re.match(member).groups() == (key, "safetensors")
    assert not skip_meta_re.match(member)


@settings(deadline=None)
@given(sources=st.sets(st.text(min_size=1, max_size=20), min_size=2, max_size=20))
def test_different_files_have_different_keys(sources: set[str]) -> None:
    assert len({key_of(source) for source in sources}) == len(sources)


def test_same_name_elsewhere_or_with_another_ending_is_another_key() -> None:
    same = ["a/0001.png", "b/0001.png", "a/0001.jpg", "a_0001.png", "a/0001_png", "a 0001.png"]
    assert len({key_of(source) for source in same}) == len(same)
    assert key_of("cats/old cat.png").startswith("cats_old_cat_png-")


def test_keys_and_splits_never_change() -> None:
    # Pinned: a change would move samples of an existing dataset between train and val.
    assert key_of("cats/old cat.png") == "cats_old_cat_png-59204cff0818"
    assert position_of("cats_old_cat_png-59204cff0818") == 0.6235714515218689


def test_positions_are_even() -> None:
    positions = [position_of(f"digits-{index:04d}") for index in range(4000)]
    for edge in (0.1, 0.5, 0.9):
        assert abs(sum(position < edge for position in positions) / 4000 - edge) < 0.03
    assert min(positions) >= 0 and max(positions) < 1


@pytest.mark.parametrize("text", ["1,0,0", "0,1,0", "0.8,0.1,0.1", "0.7,0.2,0.1", "0,0.5,0.5"])
def test_only_wanted_splits_get_samples(text: str) -> None:
    fractions = SplitFractions.parse(text)
    found = {fractions.split_of(str(index)) for index in range(500)}
    assert found == set(fractions.wanted)
    assert set(fractions.wanted) == {
        split for split, part in zip(Split, text.split(","), strict=True) if float(part) > 0
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.9,0.2,0", "sums to 1.1; .* must sum to 1"),
        ("0.5,0.1,0", "sums to 0.6"),
        ("1.5,-0.5,0", r"must lie in \[0, 1\]"),
        ("nan,0,1", r"must lie in \[0, 1\]"),
        ("0.9,0.1", "three fractions"),
        ("train", "three fractions"),
        ("0.9,0.1,0,0", "three fractions"),
    ],
)
def test_impossible_splits_are_errors(text: str, message: str) -> None:
    with pytest.raises(PrepError, match=message):
        SplitFractions.parse(text)


def test_a_wanted_split_without_samples_is_an_error() -> None:
    fractions = SplitFractions.parse("0.999,0.001,0")
    with pytest.raises(PrepError, match=r"0.001 of the samples in val, but none of the 3 .*1,0,0"):
        fractions.check_found(Counter({Split.TRAIN: 3}))
    SplitFractions.parse("1,0,0").check_found(Counter({Split.TRAIN: 1}))


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
