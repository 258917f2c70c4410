"""Judges generated digits by real ones.

1. DigitJudge   a classifier of still digits; `count_digits` compares
2. ClipJudge    classifiers of moving digits: digit and direction; `score_motions` compares
3. score_edits  whether a picture is most like the right digit after the right edit, among all
   held-out digits and edits; `score_mirrored` does the same for held-out clips and mirror images
"""

# N pictures or clips; F H W 3 frames, rows, columns, colours of one; K digits; E states of a digit;
# P pixels: 64 of a digit, 2304 of a clip; C latent channels

from __future__ import annotations

import tarfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from dit.codecs.vae import Codec

# These facts equal those of data_prep/sources/digits.py, which dit/ must not import; a test
# compares them.
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
CAPTIONS = tuple(f"a handwritten {name}" for name in NAMES)
DIRECTIONS = ("left", "right", "up", "down")
EDITS = ("with a frame", "mirrored")
LEVELS = 16  # the darkest pixel of a real digit; the lightest is 0
SIDE = 8  # pixels of a real digit
MIDDLE = 8  # mean grey below which every real digit lies, and above which every inverted one

STATES = ("unedited", *EDITS)
_COMPONENTS = 100  # of a clip's pixels, which the classifiers see


@dataclass(frozen=True, kw_only=True)
class DigitJudge:
    """A classifier of real digits, and its accuracy on held-out real digits."""

    classifier: Any  # sklearn.svm.SVC
    held_out_accuracy: float

    @classmethod
    def trained(cls, *, seed: int = 0) -> DigitJudge:
        """Trains a classifier on three quarters of scikit-learn's digits, and tests it on the rest.

        The digits are split by `seed`.
        """
        from sklearn import svm

        train_NP, test_NP, train_N, test_N = digits_of_judge(seed=seed)
        # pyright infers from the default "scale" that gamma must be a string; a number is valid.
        made = svm.SVC(gamma=0.001).fit(train_NP, train_N)  # type: ignore[reportArgumentType]
        return cls(classifier=made, held_out_accuracy=float(made.score(test_NP, test_N)))

    def read(self, pictures: Sequence[np.ndarray]) -> np.ndarray:
        """Reads the digit in the first frame of each uint8 picture [F, H, W, 3]; int64 [N]."""
        return self.classifier.predict(np.stack([grey_levels(p) for p in pictures]))


def digits_of_judge(*, seed: int = 0) -> Sequence[Any]:
    """scikit-learn's digits as (images [N, P], images [M, P], labels [N], labels [M]).

    The first images are three quarters of them, the second the others.
    """
    from sklearn import datasets, model_selection

    image_NP, digit_N = datasets.load_digits(return_X_y=True)
    return model_selection.train_test_split(
        image_NP, digit_N, test_size=0.25, stratify=digit_N, random_state=seed
    )


def grey_levels(picture_FHW3: np.ndarray) -> np.ndarray:
    """The first frame of a uint8 picture on the scale of the real digits: float [64], 0 to 16.

    Raises:
        ValueError: its height or width is not a multiple of 8.
    """
    _, height, width, _ = picture_FHW3.shape
    if height % SIDE or width % SIDE:
        raise ValueError(
            f"a picture has {height} x {width} pixels, and both numbers must be multiples of"
            f" {SIDE}; generate pictures of such a size"
        )
    grey_HW = picture_FHW3[0].astype(np.float64).mean(-1)
    blocks = grey_HW.reshape(SIDE, height // SIDE, SIDE, width // SIDE)
    return blocks.mean((1, 3)).ravel() * (LEVELS / 255)


def part_light(pictures: Sequence[np.ndarray]) -> float:
    """The fraction of the pictures whose mean grey level is above `MIDDLE`."""
    return float(np.mean([grey_levels(picture).mean() > MIDDLE for picture in pictures]))


def count_digits(*, asked: Sequence[int], read: Sequence[int]) -> dict[str, Any]:
    """Counts pictures by the digit that their prompt asked for and the digit that was read.

    Returns the pictures of each digit (`asked`), those that were read right (`right`), and the
    counts [asked][read] (`confused`).
    """
    confused = np.zeros((len(NAMES), len(NAMES)), dtype=int)
    np.add.at(confused, (np.asarray(asked), np.asarray(read)), 1)
    return {
        "asked": confused.sum(1).tolist(),
        "right": confused.diagonal().tolist(),
        "confused": confused.tolist(),
    }


class Motion(NamedTuple):
    """The digit of a clip and the direction in which it moves, by number."""

    digit: int
    direction: int

    @property
    def caption(self) -> str:
        return f"{CAPTIONS[self.digit]} moves {DIRECTIONS[self.direction]}"


MOTIONS = tuple(Motion(digit, d) for digit in range(len(NAMES)) for d in range(len(DIRECTIONS)))


class RealClip(NamedTuple):
    """A clip of the dataset and what it shows."""

    motion: Motion
    frames_FHW3: np.ndarray  # uint8


@dataclass(frozen=True, kw_only=True)
class ClipJudge:
    """Reads digit and direction of whole clips, from all pixels of all frames.

    A digit that changes within the clip may still be read right, so the last frame is also read
    alone.
    """

    digit: Any  # pipelines of scikit-learn
    direction: Any
    last_digit: Any  # of the last frame

    @classmethod
    def trained_on(cls, motions: Sequence[Motion], clips: Sequence[np.ndarray]) -> ClipJudge:
        from sklearn import decomposition, pipeline, svm

        pixels_NP, labels_N2 = pixels_of(clips), np.array(motions)
        components = min(_COMPONENTS, *pixels_NP.shape)

        def fitted(pixels_NP: np.ndarray, labels_N: np.ndarray) -> Any:
            reduced = decomposition.PCA(components, random_state=0)
            return pipeline.make_pipeline(reduced, svm.SVC()).fit(pixels_NP, labels_N)

        return cls(
            digit=fitted(pixels_NP, labels_N2[:, 0]),
            direction=fitted(pixels_NP, labels_N2[:, 1]),
            last_digit=fitted(pixels_of([clip[-1] for clip in clips]), labels_N2[:, 0]),
        )

    def read(self, clips: Sequence[np.ndarray]) -> list[Motion]:
        """The digit and direction of each uint8 clip [F, H, W, 3]."""
        pixels_NP = pixels_of(clips)
        each = zip(self.digit.predict(pixels_NP), self.direction.predict(pixels_NP), strict=True)
        return [Motion(int(digit), int(direction)) for digit, direction in each]

    def score(self, asked: Sequence[Motion], clips: Sequence[np.ndarray]) -> dict[str, float]:
        """The fractions of `score_motions`, and as `last_digit` that of right last frames."""
        last_N = self.last_digit.predict(pixels_of([clip[-1] for clip in clips]))
        right = np.mean(last_N == [motion.digit for motion in asked])
        return {**score_motions(asked, self.read(clips)), "last_digit": float(right)}


def pixels_of(clips: Sequence[np.ndarray]) -> np.ndarray:
    """The first channel of uint8 clips or frames [..., 3] as floats in [0, 1]; a row for each."""
    return np.stack([clip[..., 0].ravel() for clip in clips]) / 255


def score_motions(asked: Sequence[Motion], read: Sequence[Motion]) -> dict[str, float]:
    """Fractions of the clips that show the right digit, the right direction, and both, by name."""
    same_N2 = np.array(asked) == np.array(read)
    digit, direction = same_N2.mean(0).tolist()
    return {"digit": digit, "direction": direction, "both": float(same_N2.all(1).mean())}


class Edit(NamedTuple):
    """The edit of a digit that is asked for: the numbers of a held-out digit and of an edit."""

    digit: int
    edit: int

    @property
    def caption(self) -> str:
        return EDITS[self.edit]


def after_edits(digits_KHW: np.ndarray) -> np.ndarray:
    """Grey levels [K, E, 8, 8] of digits [K, 8, 8]: unedited, then after each edit."""
    framed_KHW = np.full_like(digits_KHW, LEVELS)
    framed_KHW[:, 1:-1, 1:-1] = digits_KHW[:, 1:-1, 1:-1]
    return np.stack([digits_KHW, framed_KHW, digits_KHW[:, :, ::-1]], axis=1)


def score_edits(
    pictures: Sequence[np.ndarray], asked: Sequence[Edit], digits_KHW: np.ndarray
) -> dict[str, Any]:
    """The fraction of uint8 pictures [F, H, W, 3] that are right, in all and for each edit.

    A picture is right if, of all digits (grey levels [K, 8, 8]) in all states, it is most like the
    given digit after the edit that was asked for. `found` counts pictures by [edit][state];
    `distance` is the mean of the root mean squared difference to what was asked for, on a scale of
    16 levels.
    """
    digit_N, edit_N = np.array(asked).T
    states_KEP = after_edits(digits_KHW).reshape(len(digits_KHW), len(STATES), -1)
    levels_NP = np.stack([grey_levels(picture) for picture in pictures])
    error_NKE = np.square(states_KEP - levels_NP[:, None, None]).mean(-1) ** 0.5
    nearest_N, state_N = np.divmod(error_NKE.reshape(len(asked), -1).argmin(1), len(STATES))
    right_N = (nearest_N == digit_N) & (state_N == edit_N + 1)
    counts = np.zeros((len(EDITS), len(STATES)), dtype=int)
    np.add.at(counts, (edit_N, state_N), 1)
    return {
        "right": float(right_N.mean()),
        "edits": {e: float(right_N[edit_N == i].mean()) for i, e in enumerate(EDITS)},
        "distance": float(error_NKE[np.arange(len(asked)), digit_N, edit_N + 1].mean()),
        "found": counts.tolist(),
        "pairs": len(asked),
    }


def score_mirrored(
    made: Sequence[np.ndarray], asked: Sequence[int], clips: Sequence[np.ndarray]
) -> dict[str, float]:
    """The fraction of uint8 clips [F, H, W, 3] that are right, and their mean distance.

    A clip is right if, of all `clips` and their mirror images, it is most like the clip whose
    number is in `asked`. The distance is the root mean squared difference to it, on a scale of 16
    levels.
    """
    every_KP = pixels_of([*clips, *(clip[:, :, ::-1] for clip in clips)])
    error_NK = np.stack([np.square(every_KP - one_P).mean(1) ** 0.5 for one_P in pixels_of(made)])
    own_N = error_NK[np.arange(len(asked)), asked]
    right = np.mean(error_NK.argmin(1) == asked)
    return {"right": float(right), "distance": float(own_N.mean() * LEVELS)}


def real_clips(folder: Path, split: str, decoder: Codec) -> list[RealClip]:
    """All clips in a split of moving digits that data_prep has packed to `folder`.

    Raises:
        ValueError: there are no clips, or a caption is not that of a moving digit.
    """
    known = {motion.caption: motion for motion in MOTIONS}
    samples = decoded(folder, split, known, option="--moving", decoder=decoder)
    found = [RealClip(known[caption], frames_FHW3) for frames_FHW3, caption in samples]
    if not found:
        raise ValueError(
            f"{folder / split} has no shards; give the folder of the moving digits that the run was"
            " trained on as --dataset_path"
        )
    return found


def held_out_digits(folder: Path, decoder: Codec) -> np.ndarray:
    """Grey levels [K, 8, 8], 0 to 16, of the unedited digits in the validation split.

    Raises:
        ValueError: there are no samples, or they are not pairs of a digit and its edit.
    """
    samples = decoded(folder, "val", EDITS, option="--edits", decoder=decoder)
    found = [
        grey_levels(picture_FHW3).reshape(SIDE, SIDE)[:, ::-1]
        for picture_FHW3, caption in samples
        if caption == "mirrored"
    ]
    if not found:
        raise ValueError(
            f"{folder / 'val'} has no mirrored digits; give the folder of the pairs that the run"
            " was trained on as --dataset_path"
        )
    return np.stack(found)


def mirrored_clips(folder: Path, decoder: Codec) -> list[np.ndarray]:
    """The uint8 target clips [F, H, W, 3] of the validation split, which mirror their references.

    Raises:
        ValueError: there are no samples, or they are not clips of moving digits.
    """
    kind = "--moving --edits"
    found = [clip for clip, _ in decoded(folder, "val", EDITS[1:], option=kind, decoder=decoder)]
    if not found or len(found[0]) == 1:
        raise ValueError(
            f"{folder / 'val'} has no mirrored clips; give the folder of the pairs that the run was"
            " trained on as --dataset_path"
        )
    return found


def decoded(
    folder: Path, split: str, captions: Collection[str], *, option: str, decoder: Codec
) -> Iterator[tuple[np.ndarray, str]]:
    """Yields the uint8 picture [F, H, W, 3] and the caption of each sample of a split.

    Raises:
        ValueError: a caption is not in `captions`, which are those of data packed with `option`.
    """
    for tar in sorted((folder / split).glob("*.tar")):
        for latent_CFHW, caption in _samples(tar):
            if caption not in captions:
                raise ValueError(
                    f"{tar} has the caption {caption!r}, not one such as {next(iter(captions))!r};"
                    f" --dataset_path must be data of `python -m data_prep digits {option}`"
                )
            yield decoder.decode(latent_CFHW).numpy(), caption


def _samples(tar: Path) -> Iterator[tuple[Any, str]]:
    """Yields the latent and the caption of each sample of a shard.

    The files of a sample follow each other in the tar.
    """
    from dit.data.records import read_record

    with tarfile.open(tar) as opened:
        parts: dict[str, bytes] = {}
        for member in opened:
            file = opened.extractfile(member)
            assert file is not None, member.name
            parts[member.name.rpartition(".")[2]] = file.read()
            if len(parts) == 2:
                record = read_record(parts)
                yield record.latent_CFHW, record.caption
                parts = {}
