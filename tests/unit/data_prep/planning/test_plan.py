"""A plan says what a run then does; one that read headers alone says that."""

import json
from pathlib import Path

import pytest

from data_prep.cli.parser import main
from data_prep.media.clips import Entry
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
