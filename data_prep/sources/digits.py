"""The 1,797 handwritten digits of scikit-learn: a source without files."""

# H rows, W columns

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from data_prep.media.clips import Clip, Entry
from data_prep.refusals import PrepError

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LEVELS = 16  # largest pixel value; the smallest is 0
SIDE = 8  # pixels


def caption_of(digit: int) -> str:
    """The caption of a digit, which is also the prompt to generate one."""
    return f"a handwritten {NAMES[digit]}"


class Digits:
    """8 x 8 grey pictures of `sklearn.datasets.load_digits`; values 0 to 16 become [-1, 1]."""

    def __init__(self, *, num_samples: int | None = None):
        from sklearn.datasets import load_digits

        digits: Any = load_digits()
        if num_samples is not None and not 1 <= num_samples <= len(digits.target):
            raise PrepError(f"--num_samples {num_samples} must lie in 1 to {len(digits.target)}")
        self.name = "sklearn.datasets.load_digits"
        self.ignored: Mapping[str, int] = {}
        self._images_NHW = digits.images[:num_samples]
        self._labels = digits.target[:num_samples].tolist()
        self.entries = tuple(
            Entry(
                key=f"digits-{index:04d}",
                source=f"load_digits/{index}",
                width=SIDE,
                height=SIDE,
                size=(SIDE, SIDE),
                caption=caption_of(self._labels[index]),
                caption_from="the label",
            )
            for index in range(len(self._labels))
        )

    def picture(self, index: int) -> Tensor:
        """The picture [8, 8] of that number, float32 in [-1, 1]."""
        return torch.from_numpy(self._images_NHW[index]).float() / (LEVELS / 2) - 1

    def read(self, entry: Entry) -> Clip:
        index = int(entry.key.rpartition("-")[2])
        return Clip(
            video_CFHW=self.picture(index)[None, None],
            caption=caption_of(self._labels[index]),
            original_height=SIDE,
            original_width=SIDE,
            notes=("caption from the label",),
        )
