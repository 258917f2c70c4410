"""The judges are right on real digits that they never saw, and errors are counted."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from data_prep.cli.parser import main as data_prep
from data_prep.sources import digits as packed
from dit.codecs import vae
from dit.codecs.dataset_card import read_card
from examples.digits.accuracy import digits_parser
from examples.digits.judges import (
    CAPTIONS,
    DIRECTIONS,
    EDITS,
    LEVELS,
    MOTIONS,
    SIDE,
    ClipJudge,
    DigitJudge,
    Edit,
    Motion,
    RealClip,
    after_edits,
    count_digits,
    grey_levels,
    real_clips,
    score_edits,
    score_motions,
)
from examples.digits.kinds import HELD_OUT, asked_edits, asked_motions

DIGITS = load_digits().images[:180]
ASKED = asked_edits(len(DIGITS), seed=0)


def test_digits_are_asked_for_as_they_were_packed() -> None:
    assert tuple(map(packed.caption_of, range(10))) == CAPTIONS
    assert (packed.SIDE, packed.LEVELS) == (SIDE, LEVELS)
    assert tuple(packed.DIRECTIONS) == DIRECTIONS and packed.EDITS == EDITS
    made = {packed.moving_caption_of(digit, way) for digit in range(10) for way in DIRECTIONS}
    assert {motion.caption for motion in MOTIONS} == made and len(made) == 40
    source = packed.EditedDigits(num_samples=20)
    states_KEHW = after_edits(DIGITS[:20])
    for number, entry in enumerate(source.entries):
        levels_HW = (source.read(entry).video_CFHW[0, 0] + 1) * 8
        wanted_HW = states_KEHW[number // 2, 1 + EDITS.index(entry.caption)]
        np.testing.assert_array_equal(levels_HW, wanted_HW)


@pytest.fixture(scope="module")
def judge() -> DigitJudge:
    return DigitJudge.trained()


def pictures(levels_NHW: np.ndarray, *, scale: int = 1) -> list[np.ndarray]:
    """Grey levels as a generator would return them: uint8 [1, H, W, 3]."""
    large_NHW = levels_NHW.clip(0, 16).repeat(scale, 1).repeat(scale, 2)
    bytes_NHW = np.round(large_NHW * (255 / 16)).astype(np.uint8)
    return [np.repeat(image[None, :, :, None], 3, axis=-1) for image in bytes_NHW]


def accuracy(asked: Any, read: Any) -> float:
    return sum(count_digits(asked=asked, read=read)["right"]) / len(asked)


def test_judge_is_right_on_digits_it_never_saw(judge: DigitJudge) -> None:
    assert judge.held_out_accuracy > 0.98


@pytest.mark.parametrize("scale", [1, 4])
def test_real_digits_are_recognised(judge: DigitJudge, scale: int) -> None:
    digits = load_digits()
    read = judge.read(pictures(digits.images[:500], scale=scale))
    assert accuracy(digits.target[:500], read) > 0.98


def test_shuffled_labels_are_right_one_time_in_ten(judge: DigitJudge) -> None:
    digits = load_digits()
    asked = np.random.default_rng(0).permutation(digits.target)
    assert 0.06 < accuracy(asked, judge.read(pictures(digits.images))) < 0.14


def test_grey_levels_undo_the_picture() -> None:
    image_HW = load_digits().images[7]
    (picture,) = pictures(image_HW[None], scale=3)
    np.testing.assert_allclose(grey_levels(picture), image_HW.ravel(), atol=0.04)


def test_grey_levels_refuse_sizes_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="12 x 8 pixels"):
        grey_levels(np.zeros((1, 12, 8, 3), dtype=np.uint8))


def test_every_picture_is_counted_once() -> None:
    counts = count_digits(asked=[3, 3, 5], read=[3, 8, 5])
    assert counts["asked"][3] == 2 and counts["right"][3] == 1 and counts["confused"][3][8] == 1
    assert sum(map(sum, counts["confused"])) == 3 and sum(counts["right"]) == 2


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
        found.append(RealClip(motion, levels_FHW1.repeat(3, -1)))
    return found


@pytest.fixture(scope="module")
def held_out() -> list[RealClip]:
    return drawn(train=False)


@pytest.fixture(scope="module")
def clip_judge() -> ClipJudge:
    return ClipJudge.trained_on(*zip(*drawn(train=True), strict=True))


def motions_right(judge: ClipJudge, clips: list[RealClip], frames: list[np.ndarray]) -> dict:
    return score_motions([clip.motion for clip in clips], judge.read(frames))


@pytest.mark.slow
def test_judge_is_right_on_clips_of_digits_it_never_saw(clip_judge, held_out) -> None:
    found = motions_right(clip_judge, held_out, [clip.frames_FHW3 for clip in held_out])
    assert found["both"] > HELD_OUT and found["direction"] == 1.0


def test_judge_reads_motion_and_not_one_frame(clip_judge, held_out) -> None:
    # Backwards, no clip begins at the centre; turned upside down, up becomes down.
    few = [clip for clip in held_out[:200] if clip.motion.direction >= 2]
    flipped = motions_right(clip_judge, few, [clip.frames_FHW3[:, ::-1] for clip in few])
    assert flipped["direction"] < 0.05
    still = [np.repeat(clip.frames_FHW3[:1], 9, axis=0) for clip in held_out[:200]]
    assert motions_right(clip_judge, held_out[:200], still)["direction"] < 0.5
    grey = [np.full((9, 16, 16, 3), 40, np.uint8)] * 200
    assert motions_right(clip_judge, held_out[:200], grey)["both"] < 0.1


def test_a_digit_that_is_lost_on_its_way_is_seen_in_the_last_frame(clip_judge, held_out) -> None:
    asked = [clip.motion for clip in held_out]
    real = clip_judge.score(asked, [clip.frames_FHW3 for clip in held_out])
    assert real["last_digit"] > HELD_OUT and real["direction"] == 1.0
    by_motion = {clip.motion: clip.frames_FHW3 for clip in held_out}
    changed = []
    for clip in held_out:  # the last frame is that of another digit
        other = by_motion[Motion((clip.motion.digit + 1) % 10, clip.motion.direction)]
        changed.append(np.concatenate([clip.frames_FHW3[:-1], other[-1:]]))
    found = clip_judge.score(asked, changed)
    assert found["last_digit"] < 0.05 and found["both"] > 0.8


def test_score_counts_digit_and_direction_alone_and_together() -> None:
    asked = [Motion(3, 0), Motion(3, 1), Motion(5, 2), Motion(7, 3)]
    read = [Motion(3, 0), Motion(8, 1), Motion(5, 0), Motion(1, 0)]
    assert score_motions(asked, read) == {"digit": 0.5, "direction": 0.5, "both": 0.25}


def arguments(*flags: str) -> argparse.Namespace:
    return digits_parser().parse_args(["--checkpoint_path", "nowhere", "--moving", *flags])


def test_first_frames_are_those_of_held_out_clips(held_out, tmp_path: Path) -> None:
    motions, prompts = asked_motions(arguments("--seed", "3"), held_out, tmp_path)
    assert len(motions) == len(prompts) == 200
    by_picture = {clip.frames_FHW3[0].tobytes(): clip.motion.digit for clip in held_out}
    for motion, prompt in zip(motions, prompts, strict=True):
        assert prompt.text == motion.caption and prompt.image is not None
        assert by_picture[np.asarray(Image.open(prompt.image)).tobytes()] == motion.digit
    assert len(set(motions)) == 40
    again, _ = asked_motions(arguments("--seed", "3"), held_out, tmp_path)
    assert again == motions != asked_motions(arguments("--seed", "4"), held_out, tmp_path)[0]


def test_every_caption_is_asked_for_as_often() -> None:
    motions, prompts = asked_motions(arguments("--per_prompt", "5"), [], None)
    assert sorted(motions) == sorted(MOTIONS * 5)
    assert all(prompt.image is None for prompt in prompts)


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


def part_right(levels_NHW: np.ndarray) -> float:
    return score_edits(pictures(levels_NHW), ASKED, DIGITS)["right"]


def test_what_was_asked_for_is_right_and_nothing_else() -> None:
    states_KEHW = after_edits(DIGITS)
    digit_N, edit_N = np.array(ASKED).T
    real_NHW = states_KEHW[digit_N, edit_N + 1]
    assert part_right(real_NHW) == 1
    noise_NHW = np.random.default_rng(0).normal(size=real_NHW.shape)
    assert part_right(real_NHW + noise_NHW) > 0.97  # one level of 16 is little
    assert part_right(real_NHW * 0 + 8 + 4 * noise_NHW) < 0.05
    # The digit as it was, the other edit, and the edit of another digit.
    assert part_right(states_KEHW[digit_N, 0]) == 0
    assert part_right(states_KEHW[digit_N, 2 - edit_N]) == 0
    assert part_right(states_KEHW[(digit_N + 1) % len(DIGITS), edit_N + 1]) == 0


def test_score_tells_the_edits_apart() -> None:
    asked = [Edit(0, 0), Edit(1, 0), Edit(2, 1), Edit(3, 1)]
    states_KEHW = after_edits(DIGITS)
    made = [states_KEHW[0, 1], states_KEHW[1, 0], states_KEHW[2, 2], states_KEHW[3, 2]]
    report = score_edits(pictures(np.stack(made)), asked, DIGITS)
    assert report["edits"] == {"with a frame": 0.5, "mirrored": 1.0} and report["right"] == 0.75
    assert report["found"] == [[1, 1, 0], [0, 0, 2]]
    off = np.sqrt(np.square(states_KEHW[1, 0] - states_KEHW[1, 1]).mean()) / 4
    assert report["distance"] == pytest.approx(off, abs=0.02)  # of one in four; 255 levels are 16
