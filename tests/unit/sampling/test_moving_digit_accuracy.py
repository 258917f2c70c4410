"""The judge of whole clips is right on real ones that it never saw, and errors are counted."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_prep.cli.parser import main as data_prep
from data_prep.sources import digits as packed
from dit.codecs import vae
from dit.codecs.dataset_card import read_card
from dit.sampling.commands.digit_accuracy import digits_parser
from dit.sampling.commands.moving_digit_accuracy import (
    DIRECTIONS,
    HELD_OUT,
    MOTIONS,
    ClipJudge,
    Motion,
    RealClip,
    conclude,
    real_clips,
    score,
    shortfalls,
    wanted,
)


def test_clips_are_asked_for_as_they_were_packed() -> None:
    assert tuple(packed.DIRECTIONS) == DIRECTIONS
    made = {packed.moving_caption_of(digit, way) for digit in range(10) for way in DIRECTIONS}
    assert {motion.caption for motion in MOTIONS} == made and len(made) == 40


def drawn(*, train: bool) -> list[RealClip]:
    """Clips as a decoder would return them: of four fifths of 1000 digits, or of the others."""
    source = packed.MovingDigits(num_samples=1000)
    found = []
    for number, entry in enumerate(source.entries):
        if (number // 4 % 5 == 0) == train:
            continue
        video_FHW = source.read(entry).video_CFHW[0]
        levels_FHW1 = ((video_FHW + 1) * 127.5).round().byte().numpy()[..., None]
        index, way = entry.source.split("/")[1:]
        motion = Motion(source._labels[int(index)], DIRECTIONS.index(way))
        found.append(RealClip(frames_FHW3=levels_FHW1.repeat(3, -1), motion=motion))
    return found


@pytest.fixture(scope="module")
def held_out() -> list[RealClip]:
    return drawn(train=False)


@pytest.fixture(scope="module")
def judge() -> ClipJudge:
    return ClipJudge.trained_on(drawn(train=True))


def accuracy(judge: ClipJudge, clips: list[RealClip], frames: list[np.ndarray]) -> dict:
    return score([clip.motion for clip in clips], judge.read(frames))


@pytest.mark.slow
def test_judge_is_right_on_clips_of_digits_it_never_saw(judge, held_out) -> None:
    found = accuracy(judge, held_out, [clip.frames_FHW3 for clip in held_out])
    assert found["both"] > HELD_OUT and found["direction"] == 1.0


def test_judge_reads_motion_and_not_one_frame(judge, held_out) -> None:
    # Backwards, no clip begins at the centre; turned upside down, up becomes down.
    few = [clip for clip in held_out[:200] if clip.motion.direction >= 2]
    flipped = accuracy(judge, few, [clip.frames_FHW3[:, ::-1] for clip in few])
    assert flipped["direction"] < 0.05
    still = [np.repeat(clip.frames_FHW3[:1], 9, axis=0) for clip in held_out[:200]]
    assert accuracy(judge, held_out[:200], still)["direction"] < 0.5
    grey = [np.full((9, 16, 16, 3), 40, np.uint8)] * 200
    assert accuracy(judge, held_out[:200], grey)["both"] < 0.1


def test_a_digit_that_is_lost_on_its_way_is_seen_in_the_last_frame(judge, held_out) -> None:
    asked = [clip.motion for clip in held_out]
    real = judge.score(asked, [clip.frames_FHW3 for clip in held_out])
    assert real["last_digit"] > HELD_OUT and real["direction"] == 1.0
    by_motion = {clip.motion: clip.frames_FHW3 for clip in held_out}
    changed = []
    for clip in held_out:  # the last frame is that of another digit
        other = by_motion[Motion((clip.motion.digit + 1) % 10, clip.motion.direction)]
        changed.append(np.concatenate([clip.frames_FHW3[:-1], other[-1:]]))
    found = judge.score(asked, changed)
    assert found["last_digit"] < 0.05 and found["both"] > 0.8


def test_score_counts_digit_and_direction_alone_and_together() -> None:
    asked = [Motion(3, 0), Motion(3, 1), Motion(5, 2), Motion(7, 3)]
    read = [Motion(3, 0), Motion(8, 1), Motion(5, 0), Motion(1, 0)]
    assert score(asked, read) == {"digit": 0.5, "direction": 0.5, "both": 0.25}


@pytest.mark.parametrize(
    ("given", "digit", "direction", "both", "held_out", "least", "said"),
    [
        (False, 0.5, 0.5, 0.90, 0.97, None, []),
        (False, 0.99, 0.99, 0.89, 0.97, None, ["both"]),
        (True, 0.95, 0.90, 0.85, 0.97, None, []),
        (True, 0.94, 0.89, 1.0, 0.97, None, ["digit", "direction"]),
        (True, 1.0, 1.0, 1.0, 0.96, None, ["held_out"]),
        (False, 1.0, 1.0, 0.5, 0.1, 0.6, ["both"]),
        (True, 0.7, 0.7, 0.5, 0.1, 0.6, []),
    ],
)
def test_what_is_demanded(given, digit, direction, both, held_out, least, said) -> None:
    report = {"digit": digit, "direction": direction, "both": both, "first_frame_given": given}
    report["held_out"] = {"both": held_out}
    assert [sentence.partition(":")[0] for sentence in shortfalls(report, least)] == said


def arguments(*flags: str) -> argparse.Namespace:
    return digits_parser().parse_args(["--checkpoint_path", "nowhere", "--moving", *flags])


def test_first_frames_are_those_of_held_out_clips(held_out, tmp_path: Path) -> None:
    motions, prompts = wanted(arguments("--seed", "3"), held_out, tmp_path)
    assert len(motions) == len(prompts) == 200
    by_picture = {clip.frames_FHW3[0].tobytes(): clip.motion.digit for clip in held_out}
    for motion, prompt in zip(motions, prompts, strict=True):
        assert prompt.text == motion.caption and prompt.image is not None
        assert by_picture[np.asarray(Image.open(prompt.image)).tobytes()] == motion.digit
    assert len(set(motions)) == 40
    again, _ = wanted(arguments("--seed", "3"), held_out, tmp_path)
    assert again == motions != wanted(arguments("--seed", "4"), held_out, tmp_path)[0]


def test_every_caption_is_asked_for_as_often() -> None:
    motions, prompts = wanted(arguments("--per_prompt", "5"), [], None)
    assert sorted(motions) == sorted(MOTIONS * 5)
    assert all(prompt.image is None for prompt in prompts)


def test_result_and_picture_are_written(held_out, tmp_path: Path) -> None:
    report = {"digit": 1.0, "direction": 0.75, "both": 0.75, "clips": 4, "held_out_clips": 9}
    report |= {"last_digit": 0.5, "held_out": dict.fromkeys(("both", *report, "last_digit"), 0.99)}
    report |= {"first_frame_given": False}
    args = argparse.Namespace(
        checkpoint_path=str(tmp_path / "LATEST"), output_dir=None, min_accuracy=None
    )
    clips = [(clip.motion.caption, clip.frames_FHW3) for clip in held_out[:4]]
    assert conclude(report, clips, args) == 1
    args.min_accuracy = 0.7
    assert conclude(report, clips, args) == 0
    assert json.loads((tmp_path / "evaluation.json").read_text())["direction"] == 0.75
    assert Image.open(tmp_path / "clips.png").size[0] > 100


def test_clips_of_a_dataset_are_read_by_split(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    words = ["digits", "--output_dir", str(folder), "--num_samples", "40"]
    assert data_prep([*words, "--moving"]) == 0
    decoder = vae.codec_of_card(read_card(folder))
    found = {split: real_clips(folder, split, decoder) for split in ("train", "val")}
    assert sum(map(len, found.values())) == 160
    source = packed.MovingDigits(num_samples=40)
    levels = {entry.caption: set[bytes]() for entry in source.entries}
    for entry in source.entries:
        ink = (source.read(entry).video_CFHW[0] + 1) * 8  # 0 to 16
        levels[entry.caption].add(ink.byte().numpy().tobytes())
    for clip in [clip for clips in found.values() for clip in clips]:
        ink = np.round(clip.frames_FHW3[..., 0] * (16 / 255)).astype(np.uint8)
        levels[clip.motion.caption].remove(ink.tobytes())
    assert not any(levels.values())
    with pytest.raises(ValueError, match="has no shards; give the folder"):
        real_clips(folder, "test", decoder)


def test_digits_that_stand_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    assert data_prep(["digits", "--output_dir", str(folder), "--num_samples", "40"]) == 0
    with pytest.raises(ValueError, match="has the caption 'a handwritten"):
        real_clips(folder, "train", vae.codec_of_card(read_card(folder)))
