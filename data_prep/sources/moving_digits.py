"""The digits of scikit-learn in motion: clips in which one moves from the centre to an edge."""

# F frames, H rows, W columns

from __future__ import annotations

import torch

from data_prep.media.clips import Clip, Entry
from data_prep.sources.digits import SIDE, Digits, caption_of

DIRECTIONS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
"""Row and column that a digit goes on by in one move."""
CANVAS = 16  # pixels along a side
FRAMES = 9
FRAMES_A_MOVE = 2  # it moves by one pixel in every second frame: 4 in all, from centre to edge
FPS = 8.0


def moving_caption_of(digit: int, direction: str) -> str:
    """The caption of a clip, which is also the prompt to generate one."""
    return f"{caption_of(digit)} moves {direction}"


class MovingDigits(Digits):
    """Each digit once in every direction: [1, 9, 16, 16] in [-1, 1].

    The first frame is the same for all directions, so that only the caption tells them apart. All
    clips of one digit are in the same split.
    """

    def __init__(self, *, num_samples: int | None = None):
        super().__init__(num_samples=num_samples)
        self.entries = tuple(
            Entry(
                key=f"{still.key}-{direction}",
                file_key=still.key,
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
        video_FHW = torch.full((FRAMES, CANVAS, CANVAS), -1.0)
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
