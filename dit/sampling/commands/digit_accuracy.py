"""Accuracy of generated handwritten digits: the program of evaluate_digits.py.

1. read      a `Kind` reads the data that it needs, and trains its judge on real digits
2. generate  what its prompts ask for
3. judge     the part that shows what was asked for: digit_judges.py
4. conclude  evaluation.json, a picture, tables, and what is less than demanded
"""

# N pictures or clips; F H W 3 frames, rows, columns, colours of one; K digits

from __future__ import annotations

import argparse
import json
import random
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from PIL import Image
from rich.table import Table
from rich.text import Text

from dit.command_line import OptionParser
from dit.config import Sampler
from dit.console import Console
from dit.local_path import checkpoint_place, is_address, local_text
from dit.models.registry import family_of
from dit.sampling.commands.digit_judges import (
    CAPTIONS,
    EDITS,
    LEVELS,
    MIDDLE,
    MOTIONS,
    NAMES,
    STATES,
    ClipJudge,
    DigitJudge,
    Edit,
    Motion,
    RealClip,
    count_digits,
    held_out_digits,
    part_light,
    real_clips,
    score_edits,
)
from dit.sampling.commands.options import MOST_SAMPLES, GenerationOptions, check_count, check_seed
from dit.sampling.grid import beside, draw_grid
from dit.sampling.prompts import Prompt

if TYPE_CHECKING:
    from dit.sampling.open_checkpoint import OpenCheckpoint

GIVEN = 200  # digits that are edited; clips of a run that is given first frames
HELD_OUT = 0.97  # part of the held-out real clips that the judge must read right

Report = dict[str, Any]
"""What evaluation.json says, beside the settings."""
Demands = dict[str, tuple[float, float]]
"""Parts by name, and how much each must be."""


class Kind(ABC):
    """A kind of digits: what is asked for, how it is judged, and what is demanded."""

    defaults: ClassVar[Mapping[str, Any]] = {}  # of options
    sheet: ClassVar[str] = ""  # file of the pictures that are drawn
    prompts: list[Prompt]

    @abstractmethod
    def __init__(self, args: argparse.Namespace, opened: OpenCheckpoint, data: Path, folder: Path):
        """Given pictures of the prompts are written into `folder`."""

    @abstractmethod
    def judged(self, pictures: Sequence[np.ndarray]) -> Report:
        """What the uint8 [F, H, W, 3] pictures show that were made of the prompts."""

    def drawn(self, pictures: Sequence[np.ndarray]) -> list[tuple[str, np.ndarray]]:  # noqa: ARG002
        """The (caption, picture [H, W, 3]) pairs that the sheet of samples shows."""
        return []

    @staticmethod
    @abstractmethod
    def said(report: Report, least: float | None) -> tuple[list[Table | str], Demands]:
        """The report as it is printed; `least` replaces what the kind demands."""


class StillKind(Kind):
    """Pictures of the ten captions; --inverted ones are inverted back before they are read."""

    def __init__(self, args: argparse.Namespace, *_: Any):
        self._inverted, self._judge = args.inverted, DigitJudge.trained()
        self._asked = [digit for digit in range(len(NAMES)) for _ in range(args.per_prompt)]
        self.prompts = [Prompt(text=CAPTIONS[digit]) for digit in self._asked]

    def judged(self, pictures: Sequence[np.ndarray]) -> Report:
        light = part_light(pictures) if self._inverted else None
        usual = [255 - picture for picture in pictures] if self._inverted else pictures
        counts = count_digits(asked=self._asked, read=self._judge.read(usual).tolist())
        accuracy = sum(counts["right"]) / len(self._asked)
        trusted = self._judge.held_out_accuracy
        return {**counts, "light": light, "accuracy": accuracy, "held_out_accuracy": trusted}

    @staticmethod
    def said(report: Report, least: float | None) -> tuple[list[Table | str], Demands]:
        light = report["light"]
        said = [] if light is None else [f"{light:.1%} have a mean grey above {MIDDLE} of {LEVELS}"]
        trusted = f"the classifier reads {report['held_out_accuracy']:.1%} of held-out real digits"
        lowest = min(report["accuracy"], 1.0 if light is None else light)
        assert least is not None
        return [digit_table(report), *said, trusted], {"": (lowest, least)}


def digit_table(report: Report) -> Table:
    """One line for each digit, and the total."""
    shown = Table("prompt", "recognised", "read as something else")
    for digit, caption in enumerate(CAPTIONS):
        wrong = [
            f"{count} as {NAMES[other]}"
            for other, count in enumerate(report["confused"][digit])
            if count and other != digit
        ]
        right = f"{report['right'][digit]} of {report['asked'][digit]}"
        shown.add_row(caption, right, ", ".join(wrong))
    shown.add_section()
    total = f"{sum(report['right'])} of {sum(report['asked'])}"
    shown.add_row("all", Text(f"{total} = {report['accuracy']:.1%}", style="bold"), "")
    return shown


class MovingKind(Kind):
    """Clips of all captions; of a run that reads first frames, those of held-out clips."""

    defaults: ClassVar = {"per_prompt": 5, "min_accuracy": None}
    sheet = "clips.png"

    def __init__(self, args: argparse.Namespace, opened: OpenCheckpoint, data: Path, folder: Path):
        assert opened.decoder is not None
        train, held_out = (real_clips(data, split, opened.decoder) for split in ("train", "val"))
        self._judge, self._held_out = ClipJudge.trained_on(*zip(*train, strict=True)), held_out
        model = opened.config.model
        self._given = any(one.pictures for one in family_of(model).inputs(model))
        self._asked, self.prompts = asked_motions(args, held_out, folder if self._given else None)

    def judged(self, pictures: Sequence[np.ndarray]) -> Report:
        pairs = zip(self._asked, self._judge.read(pictures), strict=True)
        return {
            **self._judge.score(self._asked, pictures),
            "clips": len(pictures),
            "first_frame_given": self._given,
            "held_out": self._judge.score(*zip(*self._held_out, strict=True)),
            "held_out_clips": len(self._held_out),
            "wrong": [f"{asked.caption}: {read.caption}" for asked, read in pairs if asked != read],
        }

    def drawn(self, pictures: Sequence[np.ndarray]) -> list[tuple[str, np.ndarray]]:
        """Six clips: every second frame, side by side."""
        shown = [*zip(self._asked, pictures, strict=True)][:: max(1, len(pictures) // 6)][:6]
        return [(motion.caption, beside(*clip_FHW3[::2])) for motion, clip_FHW3 in shown]

    @staticmethod
    def said(report: Report, least: float | None) -> tuple[list[Table | str], Demands]:
        heads = ("digit", "direction", "both", "digit of the last frame")
        table = Table("read by the classifier", *heads)
        named = {f"{report['clips']} generated clips": report}
        named[f"{report['held_out_clips']} held-out real clips"] = report["held_out"]
        for name, parts in named.items():
            keys = ("digit", "direction", "both", "last_digit")
            table.add_row(name, *(f"{parts[key]:.1%}" for key in keys))
        given = report["first_frame_given"]
        demands = {"digit": 0.95, "direction": 0.90} if given else {"both": 0.90}
        if least is not None:
            return [table], {name: (report[name], least) for name in demands}
        parts = {name: (report[name], usual) for name, usual in demands.items()}
        return [table], parts | {"held_out": (report["held_out"]["both"], HELD_OUT)}


def asked_motions(
    args: argparse.Namespace, held_out: Sequence[RealClip], folder: Path | None
) -> tuple[list[Motion], list[Prompt]]:
    """What is asked for; with a `folder`, held-out clips with their first frames, drawn by seed."""
    if folder is None:
        motions = [motion for motion in MOTIONS for _ in range(args.per_prompt)]
        return motions, [Prompt(text=motion.caption) for motion in motions]
    drawn = random.Random(args.seed).sample(held_out, min(GIVEN, len(held_out)))
    files = _written([clip.frames_FHW3[0] for clip in drawn], folder)
    pairs = zip(drawn, files, strict=True)
    prompts = [Prompt(text=clip.motion.caption, image=file) for clip, file in pairs]
    return [clip.motion for clip in drawn], prompts


class EditedKind(Kind):
    """Held-out digits, each of which is to be edited as its prompt says.

    A result is wrong if it is the unedited digit, shows the other edit, or shows another digit.
    """

    defaults: ClassVar = {"min_accuracy": None}
    sheet = "pairs.png"

    def __init__(self, args: argparse.Namespace, opened: OpenCheckpoint, data: Path, folder: Path):
        assert opened.decoder is not None
        self._digits_KHW = held_out_digits(data, opened.decoder)
        self._asked = asked_edits(len(self._digits_KHW), seed=args.seed)
        self._given = [_as_picture(self._digits_KHW[one.digit]) for one in self._asked]
        pairs = zip(self._asked, _written(self._given, folder), strict=True)
        self.prompts = [Prompt(text=one.caption, references=(file,)) for one, file in pairs]

    def judged(self, pictures: Sequence[np.ndarray]) -> Report:
        # What the judge says of digits that stay as they are: none may be right.
        same = [given_HW3[None] for given_HW3 in self._given]
        made, unedited = (
            score_edits(these, self._asked, self._digits_KHW) for these in (pictures, same)
        )
        return made | {"unedited": unedited["right"]}

    def drawn(self, pictures: Sequence[np.ndarray]) -> list[tuple[str, np.ndarray]]:
        """Twelve given digits, each beside what was made of it."""
        each = [*zip(self._asked, self._given, pictures, strict=True)][:12]
        return [(one.caption, np.concatenate((given, made[0]), 1)) for one, given, made in each]

    @staticmethod
    def said(report: Report, least: float | None) -> tuple[list[Table | str], Demands]:
        like = (f"like {state}" for state in STATES)
        table = Table("told", "given digit after this edit", *like)
        for edit, counts in zip(EDITS, report["found"], strict=True):
            table.add_row(edit, f"{report['edits'][edit]:.1%}", *map(str, counts))
        table.add_section()
        table.add_row("all", Text(f"{report['right']:.1%} of {report['pairs']}", style="bold"))
        distance = f"{report['distance']:.2f} of {LEVELS} levels"
        lines = [f"distance to what was asked for: {distance}"]
        lines += [f"digits that stay as they are: {report['unedited']:.1%} right"]
        return [table, *lines], {"": (report["right"], 0.9 if least is None else least)}


def asked_edits(digits: int, *, seed: int) -> list[Edit]:
    """Edits of held-out digits, drawn by seed."""
    every = [Edit(digit, number) for digit in range(digits) for number in range(len(EDITS))]
    return random.Random(seed).sample(every, min(GIVEN, len(every)))


def _as_picture(levels_HW: np.ndarray) -> np.ndarray:
    """Grey levels of 16 as a uint8 picture [H, W, 3]."""
    grey_HW = np.round(levels_HW * (255 / LEVELS)).astype(np.uint8)
    return grey_HW[..., None].repeat(3, axis=-1)


def _written(pictures: Sequence[np.ndarray], folder: Path) -> list[str]:
    """Files of uint8 pictures [H, W, 3]."""
    files = [str(folder / f"{number:05d}.png") for number in range(len(pictures))]
    for picture_HW3, file in zip(pictures, files, strict=True):
        Image.fromarray(picture_HW3).save(file)
    return files


KINDS: Mapping[str, type[Kind]] = {"moving": MovingKind, "edits": EditedKind}
"""By option; without one of these, digits stand still."""


def digits_parser() -> argparse.ArgumentParser:
    parser = OptionParser(description="Generates digits; counts those that are read as asked.")
    add = parser.add_argument
    add("--checkpoint_path", type=checkpoint_place, required=True, help="run folder or checkpoint")
    moving = "clips of moving digits; for a run on `python -m data_prep digits --moving`"
    add("--moving", action="store_true", help=moving)
    edits = "200 given digits that get a frame or are mirrored; for a run on"
    add("--edits", action="store_true", help=f"{edits} `python -m data_prep digits --edits`")
    add(
        "--inverted",
        action="store_true",
        help="dark ink on white; for a run on `python -m data_prep digits --invert`: pictures are"
        " inverted back and read, and the same part must be lighter than mid grey",
    )
    add(
        "--lora",
        type=local_text,
        action="append",
        default=[],
        metavar="FILE[:SCALE]",
        help="adapters for the checkpoint, as for generate_dit.py",
    )
    each = "pictures of each digit (default: 50); clips of each caption (default: 5)"
    add("--per_prompt", type=int, default=50, help=each)
    add("--seed", type=int, default=0, help="of the first picture; the i-th takes seed + i")
    add("--num_steps", type=int, help="steps of the sampler")
    add("--guidance", type=float, help="classifier-free guidance scale; 1 means none")
    add("--sampler", choices=[str(one) for one in Sampler], help="as for generate_dit.py")
    add("--weights", choices=("ema", "model"), default="ema")
    add("--output_dir", type=Path, help="folder for evaluation.json (default: the run)")
    add(
        "--min_accuracy",
        type=float,
        default=0.95,
        help="below this the exit code is 1 (default: 0.95; for edits and clips 0.9; for clips from"
        " a first frame 0.95 for digits and 0.9 for directions)",
    )
    data = "data for --moving and --edits (default: the run's)"
    add("--dataset_path", type=Path, help=data)
    return parser


def check_arguments(args: argparse.Namespace) -> None:
    """Raises for invalid options, before anything is trained or sampled.

    Raises:
        ValueError: an option is out of range; the message names it.
    """
    prompts = len(MOTIONS if args.moving else NAMES)
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


def report_folder(args: argparse.Namespace) -> Path:
    """The folder of the report: --output_dir, else that of the run."""
    checkpoint = Path(args.checkpoint_path)
    folder = args.output_dir or (checkpoint if checkpoint.is_dir() else checkpoint.parent)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 1 where less than is demanded is right."""
    parser = digits_parser()
    args = parser.parse_args(argv)
    kind = next((kind for option, kind in KINDS.items() if getattr(args, option)), StillKind)
    parser.set_defaults(**kind.defaults)
    args = parser.parse_args(argv)
    check_arguments(args)
    # Imported late: --help and a wrong option answer at once.
    from dit.sampling.commands.generate_media import generate_opened, shown_progress
    from dit.sampling.open_checkpoint import LoadOptions, open_checkpoint

    loading, options = LoadOptions(lora=args.lora), generation_options(args)
    opened = open_checkpoint(args.checkpoint_path, weights=args.weights, options=loading)
    data = args.dataset_path or Path(opened.config.dataset.path or "")
    with tempfile.TemporaryDirectory() as folder:
        asked = kind(args, opened, data, Path(folder))
        made = generate_opened(
            opened, asked.prompts, seed=args.seed, options=options, track=shown_progress()
        )
    pictures = [picture.frames_FHW3 for picture in made]
    return conclude(kind, asked.judged(pictures), asked.drawn(pictures), args)


def conclude(
    kind: type[Kind],
    report: Report,
    drawn: Sequence[tuple[str, np.ndarray]],
    args: argparse.Namespace,
) -> int:
    """Writes evaluation.json and the sheet, prints the result and returns the exit code."""
    console, folder = Console(), report_folder(args)
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    text = json.dumps(report | {"settings": settings}, indent=2)
    (folder / "evaluation.json").write_text(text + "\n")
    if drawn:
        captions, pictures = zip(*drawn, strict=True)
        draw_grid(pictures, captions, folder / kind.sheet)
    lines, demands = kind.said(report, args.min_accuracy)
    for line in lines:
        console.print(line)
    console.print(
        f"written: {folder / 'evaluation.json'}" + (f" and {kind.sheet}" if drawn else "")
    )
    missed = {name: each for name, each in demands.items() if each[0] < each[1]}
    for name, (part, least) in missed.items():
        said = f"{part:.1%} is below {least:.1%}"
        console.print(f"{name}: {said}" if name else said, style="red")
    return int(bool(missed))
