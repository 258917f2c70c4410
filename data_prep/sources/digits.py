"""Makes samples of the 1,797 handwritten digits of scikit-learn: still, moving or edited."""

# F frames, H rows, W columns

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from data_prep.media.clips import Clip, Entry, PlannedReference
from data_prep.refusals import PrepError

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LEVELS = 16  # largest pixel value; the smallest is 0
SIDE = 8  # pixels

DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
"""Direction of motion -> rows and columns by which a digit moves from frame to frame."""
CANVAS = 16  # pixels along a side
FRAMES = 9
FRAMES_A_MOVE = 2  # frames for each move by a pixel; 4 moves lead from the centre to the edge
FPS = 8.0


def caption_of(digit: int) -> str:
    """The caption of pictures of `digit`, and the prompt to generate one."""
    return f"a handwritten {NAMES[digit]}"


class Digits:
    """The 8 x 8 grey pictures of `sklearn.datasets.load_digits`; values 0 to 16 become [-1, 1].

    Inverted copies are dark on white, with the same captions and in the same split. With a larger
    `side`, in pixels, digits are scaled up.
    """

    def __init__(self, *, num_samples: int | None = None, inverted: bool = False, side: int = SIDE):
        from sklearn.datasets import load_digits

        digits: Any = load_digits()
        if num_samples is not None and not 1 <= num_samples <= len(digits.target):
            raise PrepError(f"--num_samples {num_samples} must lie in 1 to {len(digits.target)}")
        self.name = f"sklearn.datasets.load_digits{', inverted' if inverted else ''}"
        self._ink, self._side = -1.0 if inverted else 1.0, side
        self.ignored: Mapping[str, int] = {}
        self._images_NHW = digits.images[:num_samples]
        self._labels = digits.target[:num_samples].tolist()
        self.entries = tuple(
            Entry(
                key=f"{'inverted_' if inverted else ''}digits-{index:04d}",
                file_key=f"digits-{index:04d}" if inverted else "",
                source=f"load_digits/{index}",
                width=side,
                height=side,
                size=(side, side),
                caption=caption_of(self._labels[index]),
                caption_from="the label",
            )
            for index in range(len(self._labels))
        )

    def picture(self, index: int) -> Tensor:
        """The picture of the digit number `index`, [side, side], float32 in [-1, 1]."""
        small_HW = torch.from_numpy(self._images_NHW[index]).float() / (LEVELS / 2) - 1
        if self._side == SIDE:
            return self._ink * small_HW
        size = (self._side, self._side)
        large_HW = functional.interpolate(small_HW[None, None], size, mode="bicubic")[0, 0]
        return self._ink * large_HW.clamp(-1, 1)

    def file_of(self, entry: Entry) -> Path | None:  # noqa: ARG002  # as every source
        return None

    def read(self, entry: Entry) -> Clip:
        index = int(entry.key.rpartition("-")[2])
        return Clip(
            video_CFHW=self.picture(index)[None, None],
            caption=caption_of(self._labels[index]),
            original_height=self._side,
            original_width=self._side,
            notes=("caption from the label",),
        )


EDITS = ("with a frame", "mirrored")
"""Captions of edited digits, each of which names the edit."""


def edited(picture_HW: Tensor, edit: str, *, ink: float = 1.0) -> Tensor:
    """`picture_HW` after the edit `edit`: mirrored, or with a border of value `ink`."""
    if edit == "mirrored":
        return picture_HW.flip(1)
    framed_HW = torch.full_like(picture_HW, ink)
    framed_HW[1:-1, 1:-1] = picture_HW[1:-1, 1:-1]
    return framed_HW


def _reference(source: str, side: int) -> PlannedReference:
    size = (side, side)
    return PlannedReference(name=source, folder=0, where=source, stamp="", resized=size, size=size)


class EditedDigits(Digits):
    """A sample for each digit and edit, with the unedited digit as its reference picture.

    All edits of one digit are in the same split.
    """

    def __init__(self, *, num_samples: int | None = None, inverted: bool = False):
        super().__init__(num_samples=num_samples, inverted=inverted)
        self.entries = tuple(
            replace(
                still,
                key=f"{number}-{still.key}",
                file_key=still.group,
                source=f"{still.source}/{edit}",
                caption=edit,
                references=(_reference(still.source, SIDE),),
            )
            for still in self.entries
            for number, edit in enumerate(EDITS)
        )

    def read(self, entry: Entry) -> Clip:
        still, picture_HW = super().read(entry), self.picture(int(entry.key.rpartition("-")[2]))
        return replace(
            still,
            video_CFHW=edited(picture_HW, entry.caption, ink=self._ink)[None, None],
            caption=entry.caption,
            references=(picture_HW[None, None],),
        )


def moving_caption_of(digit: int, direction: str) -> str:
    """The caption of clips in which `digit` moves, and the prompt to generate one."""
    return f"{caption_of(digit)} moves {direction}"


class MovingDigits(Digits):
    """A clip [1, 9, 16, 16] in [-1, 1] for each digit and direction of motion.

    The first frame is the same for all directions, so that only the caption tells them apart. All
    clips of one digit are in the same split.
    """

    def __init__(self, *, num_samples: int | None = None, inverted: bool = False):
        super().__init__(num_samples=num_samples, inverted=inverted)
        self.entries = tuple(
            Entry(
                key=f"{still.key}-{direction}",
                file_key=still.group,
                source=f"{still.source}/{direction}",
                kind="video",
                width=CANVAS,
                height=CANVAS,
                frames=FRAMES,
                fps=FPS,
                size=(CANVAS, CANVAS),
                kept_fps=FPS,
                caption=moving_caption_of(self._labels[index], direction),
                caption_from="the label",
            )
            for index, still in enumerate(self.entries)
            for direction in DIRECTIONS
        )

    def read(self, entry: Entry) -> Clip:
        _, index, direction = entry.key.split("-")
        row, column = DIRECTIONS[direction]
        picture_HW = self.picture(int(index))
        video_FHW = torch.full((FRAMES, CANVAS, CANVAS), -self._ink)
        for frame in range(FRAMES):
            moves = frame // FRAMES_A_MOVE
            top, left = ((CANVAS - SIDE) // 2 + moves * step for step in (row, column))
            video_FHW[frame, top : top + SIDE, left : left + SIDE] = picture_HW
        return Clip(
            video_CFHW=video_FHW[None],
            caption=moving_caption_of(self._labels[int(index)], direction),
            original_height=CANVAS,
            original_width=CANVAS,
            fps=FPS,
            notes=("caption from the label",),
        )


class MirroredClips(MovingDigits):
    """Pairs of clips: the clip of a moving digit is the reference, its mirror image the target.

    All captions are the same, so only the reference shows the digit and its direction. All pairs
    of one digit are in the same split.
    """

    def __init__(self, *, num_samples: int | None = None, inverted: bool = False):
        super().__init__(num_samples=num_samples, inverted=inverted)
        self.entries = tuple(
            replace(
                clip,
                caption="mirrored",
                references=(_reference(clip.source, CANVAS),),
            )
            for clip in self.entries
        )

    def read(self, entry: Entry) -> Clip:
        clip = super().read(entry)
        return replace(
            clip,
            video_CFHW=clip.video_CFHW.flip(-1),
            caption=entry.caption,
            references=(clip.video_CFHW,),
        )
