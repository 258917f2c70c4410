"""Measures how close generated pictures are to those of their captions (evaluate_pictures.py).

1. draw_samples  some training pictures; their captions are the prompts
2. generate      a picture of the same size for each, as generate_dit.py makes it
3. rank          number of training pictures of other captions that are closer than the right one
4. evenness      remaining noise where the right picture has one colour

The right picture is the closest of the training pictures with the caption. Only pictures of the
same size are compared: the fewer there are, the more results are right by chance, which is printed
with the result. A pixel of the right picture is even if the 5 x 5 pixels around it, within the
picture, have one colour (to 2 of 255 levels). The deviation is the root of the mean of (generated -
right)², on the scale of 0 to 1, over the three colours of all even pixels.
"""

# N generated pictures; M training pictures; H W 3 rows, columns, colours; pixels are uint8
# P pixels around one; E even pixels of all pictures

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from dit.command_line import OptionParser
from dit.config import Sampler
from dit.console import Console
from dit.local_path import checkpoint_place, is_address, local_text
from dit.progress import counted
from dit.sampling.commands.evaluation import generation_options, report_folder
from dit.sampling.commands.generate_program import shown_progress
from dit.sampling.commands.load_options import LoadOptions
from dit.sampling.commands.options import MOST_SAMPLES, check_count, check_seed
from dit.sampling.prompts import Prompt

if TYPE_CHECKING:
    from dit.codecs.vae import Codec

TEN = 10  # nearest pictures among which the right one should be
REACH = 2  # pixels on each side that must have the colour of an even pixel: a square of 5 x 5
EVEN = 2  # levels, of 255, by which these pixels may differ
_SHOWN, _ROW = 80, 20  # pairs in pairs.png, and in each of its rows
_CELL = 96  # smallest side of the pictures in pairs.png, in pixels


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """The pictures of a training split, decoded, with their captions."""

    pixels: Sequence[np.ndarray]  # [H, W, 3] of each
    captions: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class PictureScore:
    """How well generated pictures match the training pictures of their captions."""

    samples: int
    first: float  # fraction of samples whose nearest training picture is the right one
    ten: float  # fraction of samples with the right one among the ten nearest
    median_rank: float  # of the right one; 1 is the nearest
    first_by_chance: float  # `first`, if training pictures of the same size were in random order
    ten_by_chance: float  # `ten`, in the same way
    training_pictures: int
    # On even pixels, root mean squares on a scale of 0 to 1; None if there are no such pixels
    deviation: float | None  # generated minus right picture
    white: float | None  # the same, on even pixels that are white
    noise: float | None  # generated picture minus the mean of the 3 x 3 pixels around
    even: float  # fraction of the pixels that are even


def training_pictures(folder: Path, decoder: Codec) -> Pictures:
    """All single pictures in the training split of the dataset in `folder`, decoded.

    Raises:
        ValueError: the split has no pictures.
    """
    from dit.data.export import ShardSamples

    samples = ShardSamples(folder, split="train")
    pixels, captions = list[np.ndarray](), list[str]()
    for number in range(len(samples)):
        sample = samples[number]
        if sample["latent"].shape[1] == 1:
            pixels.append(decoder.decode(sample["latent"])[0].numpy())
            captions.append(sample["caption"])
    if not pixels:
        raise ValueError(
            f"{folder} has no pictures in its training split, and videos are not judged; give"
            " --dataset_path with pictures"
        )
    return Pictures(pixels=pixels, captions=captions)


def draw_samples(pictures: Pictures, *, count: int, seed: int) -> list[int]:
    """Indices of `count` training pictures, drawn at random by `seed`.

    If there are fewer pictures, all are returned. The drawn captions differ if there are enough
    distinct captions.
    """
    numbers = random.Random(seed).sample(range(len(pictures.captions)), len(pictures.captions))
    seen = set[str]()
    again = [bool(pictures.captions[n] in seen or seen.add(pictures.captions[n])) for n in numbers]
    return [n for n, _ in sorted(zip(numbers, again, strict=True), key=lambda one: one[1])][:count]


def distances(made_HW3: np.ndarray, pictures: Pictures) -> np.ndarray:
    """The squared distance of `made_HW3` to each training picture, [M].

    It is infinite for pictures of another size.
    """
    made = made_HW3.astype(np.float64)
    return np.array(
        [
            np.square(made - one).sum() if one.shape == made.shape else np.inf
            for one in pictures.pixels
        ]
    )


def right_one(made_HW3: np.ndarray, caption: str, pictures: Pictures) -> tuple[int, int]:
    """(index of the right training picture, its rank) for a generated picture.

    The right picture is the closest with this caption. Its rank is the number of pictures with
    other captions that are closer; 0 is the best.
    """
    distance_M = distances(made_HW3, pictures)
    own_M = np.array([one == caption for one in pictures.captions])
    right = int(np.where(own_M, distance_M, np.inf).argmin())
    return right, int((distance_M[~own_M] < distance_M[right]).sum())


def by_chance(right: int, caption: str, pictures: Pictures, *, nearest: int) -> float:
    """The probability that `nearest` random pictures include one with the right `caption`.

    They are drawn without repetition from the pictures that have the size of picture number
    `right`.
    """
    shape = pictures.pixels[right].shape
    alike = [n for n, one in enumerate(pictures.pixels) if one.shape == shape]
    wrong, drawn = sum(pictures.captions[n] != caption for n in alike), min(nearest, len(alike))
    return 1 - math.comb(wrong, drawn) / math.comb(len(alike), drawn)


def even_pixels(picture_HW3: np.ndarray) -> np.ndarray:
    """A mask [H, W] of the pixels whose 5 x 5 surroundings have one colour, to 2 of 255 levels.

    At the edge of the picture the surroundings are smaller.
    """
    windows_HWP3 = _around(picture_HW3.astype(np.int64), REACH)
    return (windows_HWP3.max(2) - windows_HWP3.min(2) <= EVEN).all(-1)


def _around(picture_HW3: np.ndarray, reach: int) -> np.ndarray:
    """The pixels around each pixel, [H, W, (2 reach + 1)², 3]; pixels at edges are repeated."""
    padded_HW3 = np.pad(picture_HW3, ((reach, reach), (reach, reach), (0, 0)), "edge")
    side = (2 * reach + 1,) * 2
    windows = np.lib.stride_tricks.sliding_window_view(padded_HW3, side, axis=(0, 1))
    return windows.reshape(*picture_HW3.shape, -1).swapaxes(2, 3)


def errors_on(even_HW: np.ndarray, made_HW3: np.ndarray, right_HW3: np.ndarray) -> np.ndarray:
    """(squared deviation, squared noise) [3 E, 2], for each of the three colours of E even pixels.

    On a scale of 0 to 1, the deviation is generated - right. The noise is the difference between a
    generated pixel and the mean of the 3 x 3 pixels around it, scaled so that white noise keeps its
    variance.
    """
    made, right = made_HW3 / 255, right_HW3 / 255
    # White noise of variance 1 keeps 8/9 of it when the mean of nine pixels is taken away.
    noise_HW3 = (made - _around(made, 1).mean(2)) * (9 / 8) ** 0.5
    errors = np.stack([made - right, noise_HW3], axis=-1)
    return np.square(errors[even_HW]).reshape(-1, 2)


def score(made: Sequence[np.ndarray], captions: Sequence[str], pictures: Pictures) -> PictureScore:
    """The score of the pictures [H, W, 3] in `made`, which were generated for `captions`."""
    ranks, errors, on_white = list[int](), list[np.ndarray](), list[np.ndarray]()
    even, chances = list[float](), list[list[float]]()
    for made_HW3, caption in zip(made, captions, strict=True):
        number, rank = right_one(made_HW3, caption, pictures)
        right_HW3 = pictures.pixels[number]
        even_HW = even_pixels(right_HW3)
        white_HW = even_HW & (right_HW3 >= 255 - EVEN).all(-1)
        ranks.append(rank)
        chances.append([by_chance(number, caption, pictures, nearest=n) for n in (1, TEN)])
        errors.append(errors_on(even_HW, made_HW3, right_HW3))
        on_white.append(errors_on(white_HW, made_HW3, right_HW3))
        even.append(float(even_HW.mean()))
    deviation, noise = _root_mean(errors)
    white, _ = _root_mean(on_white)
    ranks_N, (first_by_chance, ten_by_chance) = np.array(ranks), np.mean(chances, axis=0).tolist()
    return PictureScore(
        samples=len(ranks),
        first=float((ranks_N == 0).mean()),
        ten=float((ranks_N < TEN).mean()),
        median_rank=float(np.median(ranks_N)) + 1,
        first_by_chance=first_by_chance,
        ten_by_chance=ten_by_chance,
        training_pictures=len(pictures.captions),
        deviation=deviation,
        white=white,
        noise=noise,
        even=float(np.mean(even)),
    )


def _root_mean(errors: Sequence[np.ndarray]) -> tuple[float | None, float | None]:
    squares_E2 = np.concatenate(errors)
    if not len(squares_E2):
        return None, None
    deviation, noise = np.sqrt(squares_E2.mean(0)).tolist()
    return deviation, noise


def draw_pairs(pairs: Sequence[tuple[np.ndarray, np.ndarray]], path: Path) -> None:
    """Writes a sheet of pictures to `path`: the first of each pair above the second one."""
    shape = np.max([one.shape[:2] for pair in pairs for one in pair], axis=0)
    times = max(1, -(-_CELL // int(shape.max())))
    height, width = (int(side) * times + 2 for side in shape)
    columns, rows = min(_ROW, len(pairs)), -(-len(pairs) // _ROW)
    sheet = Image.new("RGB", (columns * width, rows * (2 * height + 6)), "#7a8087")
    for number, pair in enumerate(pairs):
        row, column = divmod(number, _ROW)
        for line, pixels in enumerate(pair):
            drawn = Image.fromarray(pixels)
            size = (drawn.width * times, drawn.height * times)
            place = (column * width, row * (2 * height + 6) + line * height)
            sheet.paste(drawn.resize(size, Image.Resampling.NEAREST), place)
    sheet.save(path)


def parser() -> argparse.ArgumentParser:
    found = OptionParser(
        description="Generates pictures for captions of the training data, and says how often the"
        " right picture is the nearest one of all, and how clean the pictures are: the root mean"
        " square of the difference, of 1, where the right picture has 5 x 5 pixels of one colour."
    )
    found.first = ("checkpoint_path", "count", "seed", "num_steps", "guidance", "sampler")
    found.first += ("weights", "lora", "output_dir")
    add = found.add_argument
    add("--checkpoint_path", type=checkpoint_place, required=True, help="run folder or checkpoint")
    add("--dataset_path", type=Path, help="the data that it was trained on (default: the run's)")
    add("--count", type=int, default=100, help="pictures to generate (%(default)s)")
    add("--seed", type=int, default=0, help="of the choice, and of the noise of the first picture")
    add("--num_steps", type=int, help="steps of the sampler, as for generate_dit.py")
    add("--guidance", type=float, help="as for generate_dit.py, and with the same default")
    add("--sampler", choices=[str(one) for one in Sampler], help="as for generate_dit.py")
    add("--weights", choices=("ema", "model"), default="ema")
    add(
        "--lora",
        type=local_text,
        action="append",
        default=[],
        metavar="FILE[:SCALE]",
        help="adapters",
    )
    add("--output_dir", type=Path, help="folder for evaluation.json, pairs.png (default: the run)")
    add("--min_first", type=float, default=0.0, help="exit 1 if fewer are nearest (%(default)s)")
    add("--min_ten", type=float, default=0.0, help="the same for the ten nearest (%(default)s)")
    add("--max_deviation", type=float, default=1.0, help="exit 1 if it is larger (%(default)s)")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Generates pictures for captions of the training data and prints their score.

    Returns exit code 1 if fewer pictures are right than options demand, or if the deviation is
    larger than they allow; else 0.
    """
    args = parser().parse_args(argv)
    check_count("count", args.count, most=MOST_SAMPLES)
    check_seed(args.seed, count=args.count)
    if is_address(args.checkpoint_path) and args.output_dir is None:
        raise ValueError(
            f"--checkpoint_path {args.checkpoint_path} is not on this machine, so results cannot be"
            " written into it; give --output_dir, too"
        )
    options = generation_options(args)
    # Imported late: --help and a wrong option answer at once.
    from dit.sampling.commands.generate_media import generate_opened
    from dit.sampling.open_checkpoint import open_checkpoint

    loading = LoadOptions(lora=args.lora)
    opened = open_checkpoint(args.checkpoint_path, weights=args.weights, options=loading)
    assert opened.decoder is not None
    data = args.dataset_path or Path(opened.config.dataset.path or "")
    pictures = training_pictures(data, opened.decoder)
    numbers = draw_samples(pictures, count=args.count, seed=args.seed)
    captions = [pictures.captions[number] for number in numbers]
    sizes = [pictures.pixels[number].shape for number in numbers]
    prompts = [
        Prompt(text=caption, height=height, width=width, num_video_frames=1)
        for caption, (height, width, _) in zip(captions, sizes, strict=True)
    ]
    found = generate_opened(
        opened, prompts, seed=args.seed, options=options, track=shown_progress()
    )
    made = [picture.frames_FHW3[0] for picture in found]
    guidance = found[0].settings["guidance"]
    return conclude(made, captions, pictures, args, guidance=guidance)


def conclude(
    made: Sequence[np.ndarray],
    captions: Sequence[str],
    pictures: Pictures,
    args: argparse.Namespace,
    *,
    guidance: float,
) -> int:
    """Prints the score of the pictures in `made`, writes evaluation.json and a sheet of pairs.

    Returns exit code 1 if fewer pictures are right than `args` demand, or if the deviation is
    larger than they allow; else 0.
    """
    console, folder = Console(), report_folder(args)
    result = score(made, captions, pictures)
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    rights = [right_one(m, c, pictures) for m, c in zip(made, captions, strict=True)]
    each = [{"caption": c, "rank": rank + 1} for c, (_, rank) in zip(captions, rights, strict=True)]
    settings |= {"guidance": guidance}
    report = asdict(result) | {"settings": settings, "pictures": each}
    (folder / "evaluation.json").write_text(json.dumps(report, indent=2) + "\n")
    pairs = [(pictures.pixels[n], one) for (n, _), one in zip(rights, made, strict=True)]
    draw_pairs(pairs[:_SHOWN], folder / "pairs.png")
    for line in lines(result, guidance=guidance):
        console.print(line)
    console.print(f"written: {folder / 'evaluation.json'}")
    console.print(f"the right pictures above the generated ones: {folder / 'pairs.png'}")
    return int(
        result.first < args.min_first
        or result.ten < args.min_ten
        or (result.deviation or 0) > args.max_deviation
    )


def lines(result: PictureScore, *, guidance: float) -> list[str]:
    """Lines of text that state the score for the user."""
    among = f"among training pictures of its size ({result.training_pictures:,} of all sizes)"
    said = [
        f"{counted(result.samples, 'caption')} of training pictures, guidance {guidance:g}",
        f"right picture nearest {among}: {result.first:.0%}"
        f" ({result.first_by_chance:.0%} by chance)",
        f"right picture among the ten nearest: {result.ten:.0%} ({result.ten_by_chance:.0%} by"
        " chance)",
        f"median rank of the right picture: {result.median_rank:g}",
    ]
    if result.deviation is None:
        return [*said, "no right picture has a square of 5 x 5 pixels of one colour"]
    return [
        *said,
        f"where the right picture has one colour ({result.even:.0%} of the pixels): deviation"
        f" from it {result.deviation:.3f} of 1, noise of single pixels {result.noise:.3f}"
        + ("" if result.white is None else f"; deviation on white {result.white:.3f}"),
    ]
