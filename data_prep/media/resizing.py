"""Rules that decide the encoded size of a picture from its own size.

A picture is scaled, both sides alike, so that it covers the new size, then cropped around its
centre. `Buckets` whose `center_crop` is false stretch it instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from PIL import Image

from data_prep.refusals import PrepError, Reason, RefusedError
from dit.codecs.rgb import Placement, cover

PRESETS = {"256p": 256**2, "512p": 512**2, "768p": 768**2, "1024p": 1024**2, "1536p": 1536**2}
# Width to height of landscape buckets; each has a portrait bucket of the same sides.
WIDE = ((1, 1), (5, 4), (4, 3), (3, 2), (16, 10), (5, 3), (16, 9), (2, 1), (21, 9))


_ALIKE = 0.01  # crops whose lost fractions of the area differ by less count as equal


class ResizeMode(StrEnum):
    """Interpolation of pixels; all modes but `nearest` antialias when they scale down."""

    LANCZOS = "lanczos"
    BICUBIC = "bicubic"
    BILINEAR = "bilinear"
    AREA = "area"
    NEAREST = "nearest"

    @property
    def filter(self) -> Image.Resampling:
        return Image.Resampling["BOX" if self is ResizeMode.AREA else self.name]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """A rule that keeps the size of a picture, cropped to whole patches, within a pixel budget.

    A larger picture is scaled to a size near the budget whose whole patches lose little of its
    area.
    """

    size_multiple: int
    """Multiple, in pixels, to which each side is cropped."""
    max_pixels: int | None
    """Pixel budget to which larger pictures are scaled down; None: no limit."""

    def __post_init__(self) -> None:
        if self.size_multiple < 1:
            raise PrepError(f"--size_multiple {self.size_multiple} must be at least 1 pixel")
        if self.max_pixels is not None and self.max_pixels < self.size_multiple**2:
            raise PrepError(
                f"--max_pixels {self.max_pixels} is less than one patch of"
                f" {self.size_multiple} x {self.size_multiple} pixels; raise it"
            )

    def scaled(self, width: int, height: int) -> tuple[int, int]:
        """`width` and `height`, scaled down to `max_pixels` pixels if they have more."""
        if self.max_pixels is None or width * height <= self.max_pixels:
            return width, height
        # floor(sqrt(P w / h)) in integers: floats may give a whole root as one less.
        budget = self.max_pixels
        return math.isqrt(budget * width // height), math.isqrt(budget * height // width)

    def place(self, width: int, height: int) -> Placement:
        """How a picture of `width` x `height` pixels is scaled and then cropped to whole patches.

        Raises:
            RefusedError: a side is shorter than `size_multiple`.
        """
        size = self.scaled(width, height)
        if min(size) < self.size_multiple:
            found = f"{size[0]} x {size[1]} pixels, and each side needs {self.size_multiple}"
            if min(width, height) < self.size_multiple:
                raise RefusedError(Reason.TOO_SMALL, found)
            raise RefusedError(
                Reason.SCALED_AWAY,
                f"{width} x {height} becomes {found}: allow more than {self.max_pixels} pixels"
                " (--max_pixels, --resolution_preset), or remove the file",
            )
        wide, high = (side - side % self.size_multiple for side in size)
        at_budget = Placement(size, (wide, high))
        return at_budget if size == (width, height) else self._better(width, height, at_budget)

    def _better(self, width: int, height: int, at_budget: Placement) -> Placement:
        """The best placement, near the pixel budget, of a picture that has to be scaled down.

        `at_budget` is the placement that is used if no other is better. The best one has the most
        pixels among those whose crop loses the least area, or at most `_ALIKE` more.
        """
        places = [at_budget]
        for size in self._near(width, height, at_budget.size):
            if 0 < math.prod(size) <= (self.max_pixels or 0):
                place = Placement(cover(width, height, size), size)
                enlarges = place.resized[0] > width or place.resized[1] > height
                if place.lost <= at_budget.lost and not enlarges:
                    places.append(place)
        least = min(_unlike(place.size, width, height) for place in places)
        alike = [p for p in places if _unlike(p.size, width, height) <= least + _ALIKE]
        return max(alike, key=lambda place: (math.prod(place.size), -place.lost, place.size))

    def _near(self, width: int, height: int, below: tuple[int, int]) -> set[tuple[int, int]]:
        """Candidate sizes for `_better`: whole numbers of patches, near the scaled size `below`.

        Their aspect ratios are close to that of `width` x `height`.
        """
        (wide, high), step, found = below, self.size_multiple, {below}
        for side in (wide, wide + step):
            other = side * height // width // step * step
            found |= {(side, other), (side, other + step)}
        for side in (high, high + step):
            other = side * width // height // step * step
            found |= {(other, side), (other + step, side)}
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Buckets:
    """A rule that scales a picture to that size of `sizes` whose log aspect ratio is nearest."""

    sizes: tuple[tuple[int, int], ...]  # width, height
    center_crop: bool = True
    """Whether a picture covers the bucket and is cropped; else it is stretched to the bucket."""

    def place(self, width: int, height: int) -> Placement:
        def distance(size: tuple[int, int]) -> float:
            return abs(math.log(size[0] * height / (size[1] * width)))

        size = min(self.sizes, key=lambda size: (distance(size), -size[0] * size[1], size))
        return Placement(cover(width, height, size) if self.center_crop else size, size)


Sizing = Fit | Buckets
"""A rule that decides the encoded size of a picture, by its method `place`."""


def _unlike(size: tuple[int, int], width: int, height: int) -> float:
    """The fraction of a `width` x `height` picture that a crop to the aspect of `size` loses."""
    one, other = size[0] * height, size[1] * width
    return 1 - min(one, other) / max(one, other)


def aspect_buckets(
    *, budget: int, multiple: int, ratios: tuple[float, ...] | None = None
) -> tuple[tuple[int, int], ...]:
    """Sizes (width, height) of buckets: for each aspect ratio the best within `budget` pixels.

    Sides are multiples of `multiple` pixels. The sizes are sorted by aspect ratio. If `ratios` is
    None, the ratios in `WIDE` and their inverses are used.

    Raises:
        PrepError: not even one patch fits.
    """
    if budget < multiple**2:
        raise PrepError(
            f"--max_pixels {budget} is less than one patch of {multiple} x {multiple} pixels;"
            " raise it"
        )
    if ratios is not None:
        found = {_bucket(ratio, budget, multiple) for ratio in ratios}
    else:
        wide = {_bucket(w / h, budget, multiple) for w, h in WIDE}
        found = wide | {(h, w) for w, h in wide}
    return tuple(sorted(found, key=lambda size: (size[0] / size[1], size)))


def _bucket(ratio: float, budget: int, multiple: int) -> tuple[int, int]:
    """The bucket (width, height) within `budget` pixels that fits the aspect `ratio` best.

    It minimises a sum of the logarithmic errors of the aspect and of the number of pixels.
    """

    def loss(size: tuple[int, int]) -> float:
        wide, high = size
        return abs(math.log(wide / high / ratio)) + 0.5 * math.log(budget / (wide * high))

    if ratio < 1:
        wide, high = _bucket(1 / ratio, budget, multiple)
        return high, wide
    exact = math.sqrt(budget / ratio) / multiple
    sizes = []
    for rows in {max(1, math.floor(exact)), math.ceil(exact)}:
        most = budget // (rows * multiple * multiple)
        for columns in {math.floor(rows * ratio), math.ceil(rows * ratio)}:
            sizes += [(min(max(columns, 1), most) * multiple, rows * multiple)] if most else []
    return min(sizes, key=lambda size: (loss(size), size))


def spaced_ratios(*, least: float, most: float, count: int) -> tuple[float, ...]:
    """`count` aspect ratios from `least` to `most`, evenly spaced by logarithm.

    Raises:
        PrepError: the range is empty.
    """
    if not 0 < least <= most or count < 1:
        raise PrepError(
            f"min_ar {least}, max_ar {most}, num_ar_buckets {count}: give min_ar above 0, max_ar no"
            " less than min_ar, and num_ar_buckets of at least 1"
        )
    if count == 1:
        return (math.sqrt(least * most),)
    step = (math.log(most) - math.log(least)) / (count - 1)
    return tuple(math.exp(math.log(least) + index * step) for index in range(count))
