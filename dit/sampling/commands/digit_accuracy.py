"""Accuracy of generated handwritten digits: the program of evaluate_digits.py.

Of clips, which --moving is about: moving_digit_accuracy.py. Of --edits: edited_digit_accuracy.py.

1. judge     a support vector classifier is trained on real digits and tested on held-out ones
2. generate  a number of pictures for each of the ten captions
3. score     the part of the pictures that the classifier reads as the digit asked for
"""

# N pictures; F H W 3 frames, rows, columns, colours of one picture; P = 64 pixels of a real digit

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from dit.command_line import OptionParser
from dit.config import Sampler
from dit.console import Console
from dit.local_path import checkpoint_place, is_address, local_text
from dit.sampling.commands.options import MOST_SAMPLES, GenerationOptions, check_count, check_seed

# These facts of the digits equal those of data_prep/sources/digits.py, which dit/ must not import;
# a test compares them.
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
CAPTIONS = tuple(f"a handwritten {name}" for name in NAMES)
LEVELS = 16  # the darkest pixel of a real digit; the lightest is 0
SIDE = 8  # pixels of a real digit
MIDDLE = 8  # mean grey below which every real digit lies, and above which every inverted one


@dataclass(frozen=True, kw_only=True)
class Judge:
    """A classifier of real digits, and its accuracy on held-out real digits."""

    classifier: Any  # sklearn.svm.SVC
    held_out_accuracy: float

    def read(self, pictures: Sequence[np.ndarray]) -> np.ndarray:
        """The digit in each uint8 [F, H, W, 3] picture; int64 [N]."""
        return self.classifier.predict(np.stack([grey_levels(p) for p in pictures]))


@dataclass(frozen=True, kw_only=True)
class Score:
    """How many pictures show the digit that was asked for."""

    asked: tuple[int, ...]  # pictures of each digit
    right: tuple[int, ...]  # pictures read as that digit
    confused: tuple[tuple[int, ...], ...]  # [asked][read], counts
    light: float | None = None  # part of inverted pictures that are lighter than `MIDDLE`

    @property
    def accuracy(self) -> float:
        return sum(self.right) / sum(self.asked)


def train_judge(*, seed: int = 0) -> Judge:
    """Trains on three quarters of scikit-learn's 1,797 digits, and tests on the others."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from sklearn.svm import SVC

    image_NP, digit_N = load_digits(return_X_y=True)
    train_NP, test_NP, train_N, test_N = train_test_split(
        image_NP, digit_N, test_size=0.25, stratify=digit_N, random_state=seed
    )
    # pyright infers from the default "scale" that gamma must be a string; a number is valid.
    classifier = SVC(gamma=0.001).fit(train_NP, train_N)  # type: ignore[reportArgumentType]
    return Judge(classifier=classifier, held_out_accuracy=float(classifier.score(test_NP, test_N)))


def grey_levels(picture_FHW3: np.ndarray) -> np.ndarray:
    """The first frame of a uint8 picture on the scale of the real digits: float [64], 0 to 16.

    Raises:
        ValueError: rows or columns are no multiple of 8.
    """
    _, height, width, _ = picture_FHW3.shape
    if height % SIDE or width % SIDE:
        raise ValueError(f"a picture of {height}x{width} pixels is not a whole multiple of 8x8")
    grey_HW = picture_FHW3[0].astype(np.float64).mean(-1)
    blocks = grey_HW.reshape(SIDE, height // SIDE, SIDE, width // SIDE)
    return blocks.mean((1, 3)).ravel() * (LEVELS / 255)


def score(*, asked: Sequence[int], read: Sequence[int]) -> Score:
    """Confusion counts of `read` against `asked`."""
    confused = np.zeros((len(NAMES), len(NAMES)), dtype=int)
    np.add.at(confused, (np.asarray(asked), np.asarray(read)), 1)
    return Score(
        asked=tuple(confused.sum(1).tolist()),
        right=tuple(confused.diagonal().tolist()),
        confused=tuple(tuple(row) for row in confused.tolist()),
    )


def part_light(pictures: Sequence[np.ndarray]) -> float:
    """Part of the pictures whose mean grey is above `MIDDLE`."""
    return float(np.mean([grey_levels(picture).mean() > MIDDLE for picture in pictures]))


def score_table(result: Score) -> Table:
    """One line for each digit, and the total."""
    shown = Table("prompt", "recognised", "read as something else")
    for digit, caption in enumerate(CAPTIONS):
        wrong = [
            f"{count} as {NAMES[other]}"
            for other, count in enumerate(result.confused[digit])
            if count and other != digit
        ]
        shown.add_row(caption, f"{result.right[digit]} of {result.asked[digit]}", ", ".join(wrong))
    shown.add_section()
    total = f"{sum(result.right)} of {sum(result.asked)}"
    shown.add_row("all", Text(f"{total} = {result.accuracy:.1%}", style="bold"), "")
    return shown


def digits_parser() -> argparse.ArgumentParser:
    parser = OptionParser(description="Generates digits; counts those that are read as asked.")
    parser.add_argument(
        "--checkpoint_path", type=checkpoint_place, required=True, help="run folder or checkpoint"
    )
    parser.add_argument(
        "--moving",
        action="store_true",
        help="clips of moving digits; for a run on `python -m data_prep digits --moving`",
    )
    parser.add_argument(
        "--edits",
        action="store_true",
        help="200 given digits that get a frame or are mirrored; for a run on"
        " `python -m data_prep digits --edits`",
    )
    parser.add_argument(
        "--inverted",
        action="store_true",
        help="dark ink on white; for a run on `python -m data_prep digits --invert`: pictures are"
        " inverted back and read, and the same part must be lighter than mid grey",
    )
    parser.add_argument(
        "--lora",
        type=local_text,
        action="append",
        default=[],
        metavar="FILE[:SCALE]",
        help="adapters for the checkpoint, as for generate_dit.py",
    )
    parser.add_argument(
        "--per_prompt",
        type=int,
        default=50,
        help="pictures of each digit (default: 50); clips of each caption (default: 5)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first picture; the i-th takes seed + i"
    )
    parser.add_argument("--num_steps", type=int, help="steps of the sampler")
    parser.add_argument(
        "--guidance", type=float, help="classifier-free guidance scale; 1 means none"
    )
    parser.add_argument(
        "--sampler", choices=[str(sampler) for sampler in Sampler], help="as for generate_dit.py"
    )
    parser.add_argument("--weights", choices=("ema", "model"), default="ema")
    parser.add_argument(
        "--output_dir", type=Path, help="folder for evaluation.json (default: the run)"
    )
    parser.add_argument(
        "--min_accuracy",
        type=float,
        default=0.95,
        help="below this the exit code is 1 (default: 0.95; for edits and clips 0.9; for clips from"
        " a first frame 0.95 for digits and 0.9 for directions)",
    )
    parser.add_argument(
        "--dataset_path", type=Path, help="data for --moving and --edits (default: the run's)"
    )
    return parser


def check_arguments(args: argparse.Namespace) -> None:
    """Raises for invalid options, before anything is trained or sampled.

    Raises:
        ValueError: an option is out of range; the message names it.
    """
    prompts = len(NAMES) * (4 if args.moving else 1)
    check_count("per_prompt", args.per_prompt, most=MOST_SAMPLES // prompts)
    check_seed(args.seed, count=args.per_prompt * prompts)
    if args.min_accuracy is not None and not 0 <= args.min_accuracy <= 1:
        raise ValueError(f"--min_accuracy {args.min_accuracy} must lie in [0, 1]")
    kinds = [f"--{kind}" for kind in ("moving", "edits", "inverted") if getattr(args, kind)]
    if len(kinds) > 1:
        raise ValueError(f"{' and '.join(kinds)} exclude each other; leave one out")
    if is_address(args.checkpoint_path) and args.output_dir is None:
        raise ValueError(f"--checkpoint_path {args.checkpoint_path}: give --output_dir, too")
    generation_options(args)


def generation_options(args: argparse.Namespace) -> GenerationOptions:
    """Sampling options that the command line sets; the others keep their defaults."""
    names = ("num_steps", "guidance", "sampler", "weights")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return GenerationOptions(**given)


def generate_pictures(args: argparse.Namespace, prompts: list[str]) -> list[np.ndarray]:
    """One uint8 [F, H, W, 3] picture for each prompt; options not given keep their defaults."""
    from dit.sampling.commands.generate_media import generate, shown_progress

    options = asdict(generation_options(args)) | {"track": shown_progress()}
    return generate(args.checkpoint_path, prompts, seed=args.seed, lora=args.lora, **options)


def conclude(result: Score, judge: Judge, args: argparse.Namespace) -> int:
    """Prints the result, writes evaluation.json and returns the exit code."""
    console, folder = Console(), report_folder(args)
    report = asdict(result) | {
        "accuracy": result.accuracy,
        "held_out_accuracy": judge.held_out_accuracy,
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
    }
    (folder / "evaluation.json").write_text(json.dumps(report, indent=2) + "\n")
    console.print(score_table(result))
    if result.light is not None:
        console.print(f"{result.light:.1%} have a mean grey above {MIDDLE} of {LEVELS}")
    console.print(f"the classifier reads {judge.held_out_accuracy:.1%} of held-out real digits")
    console.print(f"written: {folder / 'evaluation.json'}")
    lowest = min(result.accuracy, 1.0 if result.light is None else result.light)
    if lowest < args.min_accuracy:
        console.print(f"{lowest:.1%} is below {args.min_accuracy:.1%}", style="red")
        return 1
    return 0


def report_folder(args: argparse.Namespace) -> Path:
    """The folder of the report: --output_dir, else that of the run."""
    checkpoint = Path(args.checkpoint_path)
    folder = args.output_dir or (checkpoint if checkpoint.is_dir() else checkpoint.parent)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 1 where fewer digits than `--min_accuracy` are recognised."""
    parser = digits_parser()
    args = parser.parse_args(argv)
    if args.moving:
        from dit.sampling.commands.moving_digit_accuracy import evaluate

        parser.set_defaults(per_prompt=5, min_accuracy=None)
        args = parser.parse_args(argv)
        check_arguments(args)
        return evaluate(args)
    if args.edits:
        from dit.sampling.commands.edited_digit_accuracy import evaluate

        parser.set_defaults(min_accuracy=None)
        args = parser.parse_args(argv)
        check_arguments(args)
        return evaluate(args)
    check_arguments(args)
    asked = [digit for digit in range(len(NAMES)) for _ in range(args.per_prompt)]
    judge = train_judge()
    pictures, light = generate_pictures(args, [CAPTIONS[digit] for digit in asked]), None
    if args.inverted:
        light, pictures = part_light(pictures), [255 - picture for picture in pictures]
    result = score(asked=asked, read=judge.read(pictures).tolist())
    return conclude(replace(result, light=light), judge, args)
