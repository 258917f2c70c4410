"""Sample lengths of realistic data, in tokens of 16 x 16 pixels and four frames.

Pictures have one of seven aspect ratios. Videos have 4 n + 1 frames, as a VAE that halves time
twice makes n + 1 latent frames of them, or any number where it pads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

_ASPECTS = np.array([1, 4 / 3, 3 / 4, 3 / 2, 2 / 3, 16 / 9, 9 / 16])
_PICTURES = (256, 384, 512, 768, 1024)
_480P = 30 * 52  # tokens of a frame of 480 x 832 pixels
_AT_ONCE = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """A distribution of sample lengths, and the capacity of their packs."""

    name: str
    capacity: int
    """Tokens of a pack."""
    pictures: float
    """Fraction of pictures among the samples; the others are videos."""
    videos: Callable[[np.random.Generator, int], np.ndarray]

    def lengths(self, *, seed: int) -> Iterator[int]:
        """Sample lengths, endlessly; samples longer than a pack are left out."""
        rng = np.random.default_rng(seed)
        while True:
            still = rng.random(_AT_ONCE) < self.pictures
            pictures = _frames(rng, _PICTURES, _AT_ONCE)
            chosen = np.where(still, pictures, self.videos(rng, _AT_ONCE))
            yield from chosen[chosen <= self.capacity].tolist()


def _frames(rng: np.random.Generator, sides: Sequence[int], number: int) -> np.ndarray:
    """Tokens of one frame: the area of a square with one of these sides, at a random aspect."""
    side, aspect = rng.choice(sides, number), rng.choice(_ASPECTS, number)
    rows, columns = side / np.sqrt(aspect) / 16, side * np.sqrt(aspect) / 16
    return np.round(rows).astype(int) * np.round(columns).astype(int)


def _short(rng: np.random.Generator, number: int) -> np.ndarray:
    return _frames(rng, (256, 320, 384), number) * rng.integers(5, 32, number)


def _standard(rng: np.random.Generator, number: int) -> np.ndarray:
    return _480P * rng.integers(5, 22, number)


def _any_length(rng: np.random.Generator, number: int) -> np.ndarray:
    latent_frames = (rng.integers(16, 122, number) - 1) // 4 + 1
    return _frames(rng, (256, 320, 384, 480), number) * latent_frames


MIXTURES = (
    # 70% pictures of 256 to 1024 pixels a side, and video of 17 to 121 frames at 256 to 384
    Mixture(name="A/16k", capacity=16384, pictures=0.7, videos=_short),
    Mixture(name="A/32k", capacity=32768, pictures=0.7, videos=_short),
    # 50% pictures, and video of 17 to 81 frames at 480 x 832; the longest fills a pack
    Mixture(name="B/32k", capacity=32768, pictures=0.5, videos=_standard),
    # pictures only
    Mixture(name="C/8k", capacity=8192, pictures=1.0, videos=_short),
    # 50% pictures, and video of any 16 to 121 frames at 256 to 480
    Mixture(name="D/32k", capacity=32768, pictures=0.5, videos=_any_length),
)
