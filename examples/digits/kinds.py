"""Kinds of digits: their prompts, how results are judged, and how much is demanded."""

# N pictures or clips; F H W 3 frames, rows, columns, colours of one; K digits or clips

from __future__ import annotations

import argparse
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from PIL import Image
from rich.table import Table
from rich.text import Text

from dit.models.registry import family_of
from dit.sampling.grid import beside
from dit.sampling.prompts import Prompt
from examples.digits.judges import (
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
    digits_of_judge,
    grey_levels,
    held_out_digits,
    mirrored_clips,
    part_light,
    pixels_of,
    real_clips,
    score_edits,
    score_mirrored,
)
from examples.digits.likeness import Components, figure_lines

if TYPE_CHECKING:
    from dit.sampling.open_checkpoint import OpenCheckpoint

GIVEN = 200  # digits that are edited; clips of a run that is given first frames
HELD_OUT = 0.97  # part of the held-out real clips that the judge must read right
OTHERS = 0.9  # part of the clips that another reference must not lead to

Report = dict[str, Any]
"""The content of evaluation.json, except the settings."""
Demands = dict[str, tuple[float, float]]
"""(fraction that is right, fraction that is demanded) by name."""


class Kind(ABC):
    """A kind of digits: its prompts, how results are judged, and what is demanded."""

    defaults: ClassVar[Mapping[str, Any]] = {}  # of options
    sheet: ClassVar[str] = ""  # file of the pictures that are drawn
    prompts: list[Prompt]

    @abstractmethod
    def __init__(self, args: argparse.Namespace, opened: OpenCheckpoint, data: Path, folder: Path):
        """Reads the data of this kind; media that prompts give are written into `folder`."""

    @abstractmethod
    def judged(self, pictures: Sequence[np.ndarray]) -> Report:
        """Judges the uint8 pictures [F, H, W, 3] that were generated for the prompts."""

    def likeness(
        self,
        pictures: Sequence[np.ndarray],  # noqa: ARG002
        teacher: Sequence[Sequence[np.ndarray]] = (),  # noqa: ARG002
    ) -> Report:
        """Spread and distance of the generated pictures; empty for kinds without such figures.

        `teacher` has two sets of pictures for `teacher_prompts`, to compare with instead of real
        ones.
        """
        return {}

    def teacher_prompts(self, each: int | None) -> list[Prompt]:
        """The prompts for a teacher, each of them `each` times; None: a number usual for this kind.

        Raises:
            ValueError: this kind is not compared with a teacher.
        """
        raise ValueError(
            f"--teacher compares digits and clips (--teacher_per_prompt {each}), but no edits of"
            " given ones; leave --teacher out"
        )

    def drawn(self, pictures: Sequence[np.ndarray]) -> list[tuple[str, np.ndarray]]:  # noqa: ARG002
        """(caption, picture [H, W, 3]) of the samples on the sheet of this kind."""
        return []

    @staticmethod
    @abstractmethod
    def said(report: Report, least: float | None) -> tuple[list[Table | str], Demands]:
        """Returns (lines, demands): what to print about `report`, and the demanded fractions.

        `least` replaces the fraction that the kind demands; None keeps it.
        """


class StillKind(Kind):
    """Pictures for the ten captions of still digits.

    With --inverted they are inverted before they are read.
    """

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

    def likeness(
        self, pictures: Sequence[np.ndarray], teacher: Sequence[Sequence[np.ndarray]] = ()
    ) -> Report:
        def levels(given: Sequence[np.ndarray]) -> np.ndarray:
            usual = (255 - picture for picture in given) if self._inverted else given
            return np.stack([grey_levels(picture) for picture in usual])

        train_NP, _, train_N, _ = digits_of_judge()
        each = len(teacher[0]) // len(NAMES) if teacher else 0
        asked = [digit for digit in range(len(NAMES)) for _ in range(each)]
        found = Components.of(train_NP, train_N.tolist())
        return found.figures(levels(pictures), self._asked, [levels(s) for s in teacher], asked)

    def teacher_prompts(self, each: int | None) -> list[Prompt]:
        return [Prompt(text=caption) for caption in CAPTIONS for _ in range(each or 200)]

    @staticmethod
    def said(report: Report, least: float | None) -> tuple[list[Table | str], Demands]:
        light = report["light"]
        said = [] if light is None else [f"{light:.1%} have a mean grey above {MIDDLE} of {LEVELS}"]
        trusted = f"the classifier reads {report['held_out_accuracy']:.1%} of held-out real digits"
        lowest = min(report["accuracy"], 1.0 if light is None else light)
        assert least is not None
        return [digit_table(report), *said, trusted, *figure_lines(report)], {"": (lowest, least)}


def digit_table(report: Report) -> Table:
    """A table with a line for each digit, and the total."""
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
    """Clips for all captions of moving digits.

    For a run whose network reads first frames, the captions and first frames of held-out clips are
    the prompts.
    """

    defaults: ClassVar = {"per_prompt": 5, "min_accuracy": None}
    sheet = "clips.png"

    def __init__(self, args: argparse.Namespace, opened: OpenCheckpoint, data: Path, folder: Path):
        assert opened.decoder is not None
        train, held_out = (real_clips(data, split, opened.decoder) for split in ("train", "val"))
        self._judge, self._held_out = ClipJudge.trained_on(*zip(*train, strict=True)), held_out
        self._train = train
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

    def likeness(
        self, pictures: Sequence[np.ndarray], teacher: Sequence[Sequence[np.ndarray]] = ()
    ) -> Report:
        motions, clips = zip(*self._train, strict=True)
        each = len(teacher[0]) // len(MOTIONS) if teacher else 0
        asked = [motion for motion in MOTIONS for _ in range(each)]
        found, theirs = Components.of(pixels_of(clips), motions), [pixels_of(s) for s in teacher]
        return found.figures(pixels_of(pictures), self._asked, theirs, asked)

    def teacher_prompts(self, each: int | None) -> list[Prompt]:
        if self._given:
            return super().teacher_prompts(each)
        return [Prompt(text=motion.caption) for motion in MOTIONS for _ in range(each or 50)]

    def drawn(self, pictures: Sequence[np.ndarray]) -> list[tuple[str, np.ndarray]]:
        """At most six clips for the sheet, by every second frame, side by side."""
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
        said = [table, *figure_lines(report)]
        given = report["first_frame_given"]
        demands = {"digit": 0.95, "direction": 0.90} if given else {"both": 0.90}
        if least is not None:
            return said, {name: (report[name], least) for name in demands}
        parts = {name: (report[name], usual) for name, usual in demands.items()}
        return said, parts | {"held_out": (report["held_out"]["both"], HELD_OUT)}


def asked_motions(
    args: argparse.Namespace, held_out: Sequence[RealClip], folder: Path | None
) -> tuple[list[Motion], list[Prompt]]:
    """Returns (motions, prompts) to generate.

    With a `folder` the motions are those of held-out clips, drawn by `args.seed`; the first frames
    of these clips are written into `folder`, and the prompts give them. If `folder` is None, every
    caption occurs `args.per_prompt` times.
    """
    if folder is None:
        motions = [motion for motion in MOTIONS for _ in range(args.per_prompt)]
        return motions, [Prompt(text=motion.caption) for motion in motions]
    drawn = random.Random(args.seed).sample(held_out, min(GIVEN, len(held_out)))
    files = _written([clip.frames_FHW3[0] for clip in drawn], folder)
    pairs = zip(drawn, files, strict=True)
    prompts = [Prompt(text=clip.motion.caption, image=file) for clip, file in pairs]
    return [clip.motion for clip in drawn], prompts


class EditedKind(Kind):
    """Held-out digits that are to be edited as their prompts say.

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
        """At most twelve given digits for the sheet, each to the left of its edited result."""
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


class MirroredKind(Kind):
    """Held-out clips whose mirror images are to be generated; prompts name no digit or direction.

    Each mirror image is requested twice: with its own clip as the reference, and with another clip,
    which must not lead to it.
    """

    defaults: ClassVar = {"min_accuracy": None}
    sheet = "pairs.png"

    def __init__(self, args: argparse.Namespace, opened: OpenCheckpoint, data: Path, folder: Path):
        assert opened.decoder is not None
        self._clips = mirrored_clips(data, opened.decoder)
        number = len(self._clips)
        self._asked = random.Random(args.seed).sample(range(number), min(GIVEN, number))
        self._given = [self._clips[one][:, :, ::-1] for one in self._asked]
        files = written_clips(self._given, folder)
        given = [*files, *files[1:], files[0]]
        self.prompts = [Prompt(text=EDITS[1], references=(file,)) for file in given]

    def judged(self, pictures: Sequence[np.ndarray]) -> Report:
        count = len(self._asked)
        own, other, same = (
            score_mirrored(these, self._asked, self._clips)
            for these in (pictures[:count], pictures[count:], self._given)
        )
        more = {"other_reference": other["right"], "unedited": same["right"]}
        return own | more | {"clips": count, "held_out_clips": len(self._clips)}

    def drawn(self, pictures: Sequence[np.ndarray]) -> list[tuple[str, np.ndarray]]:
        """At most six given clips for the sheet, each above its result, by every second frame."""
        pairs = [*zip(self._given, pictures, strict=False)][:6]
        rows = [[beside(*clip_FHW3[::2]) for clip_FHW3 in pair] for pair in pairs]
        return [(EDITS[1], np.concatenate(pair)) for pair in rows]

    @staticmethod
    def said(report: Report, least: float | None) -> tuple[list[Table | str], Demands]:
        table = Table("given", "mirror image of the held-out clip")
        table.add_row("the clip", f"{report['right']:.1%} of {report['clips']}")
        table.add_row("another clip", f"{report['other_reference']:.1%}")
        distance = f"{report['distance']:.2f} of {LEVELS} levels"
        lines = [f"distance to what was asked for: {distance}"]
        lines += [f"clips that stay as they are: {report['unedited']:.1%} right"]
        if least is not None:
            return [table, *lines], {"": (report["right"], least)}
        others = 1 - report["other_reference"]
        demands = {"": (report["right"], 0.9), "with another clip, other results": (others, OTHERS)}
        return [table, *lines], demands


def asked_edits(digits: int, *, seed: int) -> list[Edit]:
    """At most GIVEN edits of `digits` held-out digits, drawn by `seed`, to ask for."""
    every = [Edit(digit, number) for digit in range(digits) for number in range(len(EDITS))]
    return random.Random(seed).sample(every, min(GIVEN, len(every)))


def _as_picture(levels_HW: np.ndarray) -> np.ndarray:
    grey_HW = np.round(levels_HW * (255 / LEVELS)).astype(np.uint8)
    return grey_HW[..., None].repeat(3, axis=-1)


def _written(pictures: Sequence[np.ndarray], folder: Path) -> list[str]:
    files = [str(folder / f"{number:05d}.png") for number in range(len(pictures))]
    for picture_HW3, file in zip(pictures, files, strict=True):
        Image.fromarray(picture_HW3).save(file)
    return files


def written_clips(clips: Sequence[np.ndarray], folder: Path) -> list[str]:
    """Writes uint8 clips [F, H, W, 3] as lossless videos into `folder`; returns their paths."""
    import av

    files = [str(folder / f"{number:05d}.mkv") for number in range(len(clips))]
    for clip_FHW3, file in zip(clips, files, strict=True):
        with av.open(f"file:{file}", "w") as container:
            stream = container.add_stream("ffv1", rate=8, options={"level": "3"})
            stream.height, stream.width = clip_FHW3.shape[1:3]
            stream.pix_fmt = "bgr0"
            for picture_HW3 in clip_FHW3:
                frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture_HW3), "rgb24")
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
    return files
