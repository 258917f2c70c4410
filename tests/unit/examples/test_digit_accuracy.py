"""The program of evaluate_digits.py: what it demands, writes and returns."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from data_prep.cli.parser import main as data_prep
from dit.codecs import vae
from dit.codecs.dataset_card import read_card
from dit.sampling.conditions.clips import read_clip
from examples.digits.accuracy import check_arguments, conclude, digits_parser
from examples.digits.judges import CAPTIONS, EDITS, count_digits, score_edits
from examples.digits.kinds import (
    EditedKind,
    MirroredKind,
    MovingKind,
    StillKind,
    asked_edits,
    digit_table,
)

DIGITS = load_digits().images[:20]


def arguments(run: Path, *flags: str, **defaults: Any) -> argparse.Namespace:
    parser = digits_parser()
    parser.set_defaults(**defaults)
    return parser.parse_args(["--checkpoint_path", str(run / "LATEST"), *flags])


@pytest.mark.parametrize(("right", "exit_code"), [(19, 0), (18, 1)])
def test_exit_code_follows_the_accuracy(right: int, exit_code: int, tmp_path: Path) -> None:
    counts = count_digits(asked=[1] * 20, read=[1] * right + [7] * (20 - right))
    report = counts | {"light": None, "accuracy": right / 20, "held_out_accuracy": 0.99}
    assert digit_table(report).row_count == len(CAPTIONS) + 1
    assert conclude(StillKind, report, [], arguments(tmp_path)) == exit_code
    written = json.loads((tmp_path / "evaluation.json").read_text())
    assert written["accuracy"] == right / 20
    assert written["settings"]["min_accuracy"] == 0.95


@pytest.mark.parametrize(("part", "exit_code"), [(0.95, 0), (0.94, 1)])
def test_inverted_digits_must_be_light(part: float, exit_code: int, tmp_path: Path) -> None:
    light = [np.full((1, 8, 8, 3), 200, np.uint8)] * round(100 * part)
    dark = [np.zeros((1, 8, 8, 3), np.uint8)] * (100 - len(light))
    kind = StillKind(arguments(tmp_path, "--inverted", "--per_prompt", "10"))
    report = kind.judged([*light, *dark]) | {"accuracy": 1.0}
    assert report["light"] == part
    assert conclude(StillKind, report, [], arguments(tmp_path)) == exit_code


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
        (True, 0.0, 0.0, 0.0, 0.0, 0.0, []),
    ],
)
def test_what_is_demanded_of_clips(given, digit, direction, both, held_out, least, said) -> None:
    report = {"digit": digit, "direction": direction, "both": both, "first_frame_given": given}
    report |= {"last_digit": 0.5, "clips": 4, "held_out_clips": 9}
    report["held_out"] = report | {"both": held_out}
    _, demands = MovingKind.said(report, least)
    assert [name for name, (part, least) in demands.items() if part < least] == said


def test_result_and_picture_of_clips_are_written(tmp_path: Path) -> None:
    report = {"digit": 1.0, "direction": 0.75, "both": 0.75, "clips": 4, "held_out_clips": 9}
    report |= {"last_digit": 0.5, "held_out": dict.fromkeys(("both", *report, "last_digit"), 0.99)}
    report |= {"first_frame_given": False}
    drawn = [("a handwritten one moves left", np.zeros((16, 80, 3), np.uint8))] * 4
    args = arguments(tmp_path, min_accuracy=None)
    assert conclude(MovingKind, report, drawn, args) == 1
    args.min_accuracy = 0.7
    assert conclude(MovingKind, report, drawn, args) == 0
    assert json.loads((tmp_path / "evaluation.json").read_text())["direction"] == 0.75
    assert Image.open(tmp_path / "clips.png").size[0] > 100


def test_given_are_held_out_digits(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    words = ["digits", "--num_samples", "40", "--edits", "--output_dir", str(folder)]
    assert data_prep(words) == 0
    opened: Any = SimpleNamespace(decoder=vae.codec_of_card(read_card(folder)))
    args = arguments(tmp_path, "--edits", "--seed", "1")
    kind = EditedKind(args, opened, folder, tmp_path)
    digits_KHW, asked = kind._digits_KHW, kind._asked
    assert 0 < len(digits_KHW) < 20
    real_KHW = load_digits().images[:40]
    assert all(np.abs(real_KHW - one).max((1, 2)).min() < 0.04 for one in digits_KHW)
    assert len(asked) == 2 * len(digits_KHW) and asked != asked_edits(len(digits_KHW), seed=2)
    for one, prompt in zip(asked, kind.prompts, strict=True):
        (file,) = prompt.references
        shown_HW = np.asarray(Image.open(file))[..., 0] * (16 / 255)
        assert prompt.text == EDITS[one.edit]
        np.testing.assert_allclose(shown_HW, digits_KHW[one.digit], atol=0.04)
    same = [np.asarray(Image.open(prompt.references[0]))[None] for prompt in kind.prompts]
    assert kind.judged(same)["right"] == kind.judged(same)["unedited"] == 0
    with pytest.raises(ValueError, match="has no mirrored digits; give the folder"):
        EditedKind(args, opened, tmp_path / "none", tmp_path)


def test_given_clips_are_those_of_held_out_digits(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    words = ["digits", "--num_samples", "40", "--moving", "--edits", "--output_dir", str(folder)]
    assert data_prep(words) == 0
    opened: Any = SimpleNamespace(decoder=vae.codec_of_card(read_card(folder)))
    args = arguments(tmp_path, "--moving", "--edits")
    check_arguments(args)
    kind = MirroredKind(args, opened, folder, tmp_path)
    count, wanted = len(kind._asked), [kind._clips[one] for one in kind._asked]
    assert count == len(kind._clips) and count % 4 == 0
    files = [prompt.references[0] for prompt in kind.prompts]
    assert {prompt.text for prompt in kind.prompts} == {"mirrored"}
    assert len(files) == 2 * count and not any(map(str.__eq__, files[:count], files[count:]))
    for file, clip_FHW3 in zip(files, wanted, strict=False):
        read_FHW3 = 127.5 * (read_clip(file, (9, 16, 16), option="").permute(0, 2, 3, 1) + 1)
        np.testing.assert_allclose(read_FHW3, clip_FHW3[:, :, ::-1], atol=1e-4)
    report = kind.judged([*wanted, *np.roll(np.stack(wanted), -1, axis=0)])
    assert (report["right"], report["other_reference"], report["unedited"]) == (1, 0, 0)
    assert conclude(MirroredKind, report, kind.drawn(wanted), arguments(tmp_path)) == 0
    report |= {"other_reference": 0.2}
    args.min_accuracy = None
    assert conclude(MirroredKind, report, [], args) == 1
    still = tmp_path / "still"
    assert data_prep([*words[:3], "--output_dir", str(still)]) == 0
    with pytest.raises(ValueError, match=r"`python -m data_prep digits --moving --edits`"):
        MirroredKind(args, opened, still, tmp_path)


@pytest.mark.parametrize("option", ["--teacher_guidance", "--teacher_per_prompt"])
def test_an_option_of_a_teacher_needs_one(option: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{option} is an option of --teacher; give --teacher"):
        check_arguments(arguments(tmp_path, option, "2"))
    check_arguments(arguments(tmp_path, option, "2", "--teacher", str(tmp_path)))


@pytest.mark.parametrize(("right", "exit_code"), [(0.90, 0), (0.89, 1)])
def test_exit_code_follows_the_edits_that_are_right(
    right: float, exit_code: int, tmp_path: Path
) -> None:
    args = arguments(tmp_path, "--edits", min_accuracy=None)
    bytes_NHW = np.round(DIGITS * (255 / 16)).astype(np.uint8)
    made = [image[None, :, :, None].repeat(3, -1) for image in bytes_NHW]
    report = score_edits(made, asked_edits(20, seed=0)[:20], DIGITS)
    drawn = [(EDITS[0], np.zeros((8, 16, 3), np.uint8))]
    report |= {"right": right, "unedited": 0.0}
    assert conclude(EditedKind, report, drawn, args) == exit_code
    assert json.loads((tmp_path / "evaluation.json").read_text())["right"] == right
    assert (tmp_path / "pairs.png").is_file()
    with pytest.raises(ValueError, match="--edits and --inverted exclude each other"):
        check_arguments(arguments(tmp_path, "--edits", "--inverted", min_accuracy=None))
