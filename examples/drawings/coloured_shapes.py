"""Draws coloured shapes of two sizes on white, to train on, and judges samples of them.

1. draw   FOLDER/pictures with captions.jsonl for data_prep, FOLDER/prompts.jsonl for generate_dit
2. read   a folder of generate_dit -> how many samples show the size, colour and shape asked for

    python examples/drawings/coloured_shapes.py draw runs/shapes
    python examples/drawings/coloured_shapes.py read runs/shapes/samples

All is drawn from a fixed seed. The 60 captions are of the form `a large red ring`.
"""

# H W rows, columns; 3 colours of a pixel

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image, ImageDraw

from dit.command_line import OptionParser
from dit.console import Console

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 160, 60),
    "blue": (30, 60, 220),
    "yellow": (240, 200, 0),
    "purple": (150, 40, 180),
    "black": (20, 20, 20),
}
# Outlines in a square of side 1; a ring has none, and its band is a quarter of the side wide.
SHAPES = {
    "square": [(0, 0), (1, 0), (1, 1), (0, 1)],
    "triangle": [(0.5, 0), (1, 1), (0, 1)],
    "diamond": [(0.5, 0), (1, 0.5), (0.5, 1), (0, 0.5)],
    "ring": [],
    "cross": [(x / 3, y / 3) for x, y in ((1, 0), (2, 0), (2, 1), (3, 1), (3, 2), (2, 2))]
    + [(x / 3, y / 3) for x, y in ((2, 3), (1, 3), (1, 2), (0, 2), (0, 1), (1, 1))],
}
SIDES = {"small": (7, 8, 9), "large": (13, 14, 15)}  # pixels
BETWEEN = 11  # pixels; larger shapes are read as large
CAPTIONS = tuple(f"a {' '.join(words)}" for words in product(SIDES, COLOURS, SHAPES))
PICTURES = ((16, 16), (24, 16), (16, 24), (24, 24))  # width, height in pixels
FINE = 8  # points drawn along a pixel, for smooth edges
TEMPLATE = 16  # pixels along a side of what is compared


def coverage(shape: str, side: int) -> Image.Image:
    """How much of each pixel a shape of `side` x `side` pixels covers, 0 to 255."""
    fine = side * FINE
    image = Image.new("L", (fine, fine))
    pen = ImageDraw.Draw(image)
    if shape == "ring":
        pen.ellipse((0, 0, fine - 1, fine - 1), fill=255)
        pen.ellipse((fine / 4, fine / 4, fine * 3 / 4 - 1, fine * 3 / 4 - 1), fill=0)
    else:
        pen.polygon([(x * (fine - 1), y * (fine - 1)) for x, y in SHAPES[shape]], fill=255)
    return image.resize((side, side), Image.Resampling.BOX)


@cache
def template(shape: str) -> np.ndarray:
    """The fraction that a shape covers of each cell of a fixed grid over its box, float [H, W]."""
    return np.asarray(coverage(shape, TEMPLATE)) / 255


def picture_of(caption: str, random: Random, *, anywhere: bool = False) -> Image.Image:
    """A picture of the shape in `caption`; the size in pixels is drawn by `random`.

    The shape is in the middle, or at a random place if `anywhere` is set.
    """
    _, size, colour, shape = caption.split()
    width, height = random.choice(PICTURES)
    side = random.choice(SIDES[size])
    corner = (width - side) // 2, (height - side) // 2
    if anywhere:
        corner = random.randint(0, width - side), random.randint(0, height - side)
    picture = Image.new("RGB", (width, height), "white")
    picture.paste(COLOURS[colour], corner, coverage(shape, side))
    return picture


def caption_of(picture: Image.Image) -> str:
    """The caption that fits `picture` best, by the part of it that is not white.

    It has the size of that part, the nearest colour and the most similar shape. A white picture has
    the caption "a white picture".
    """
    picture_HW3 = np.asarray(picture.convert("RGB"), dtype=float)
    distance_HW = np.linalg.norm(255 - picture_HW3, axis=-1)
    ink_HW = distance_HW >= max(distance_HW.max() / 2, 1)
    if not ink_HW.any():
        return "a white picture"
    colour_3 = picture_HW3[ink_HW].mean(0)
    colour = min(COLOURS, key=lambda name: np.linalg.norm(colour_3 - COLOURS[name]))
    # The less of a pixel is covered, the nearer it is to white.
    covered_HW = np.clip(distance_HW / np.linalg.norm(255 - np.array(COLOURS[colour])), 0, 1)
    rows, columns = (np.flatnonzero(ink_HW.any(axis)) for axis in (1, 0))
    box = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
    found = Image.fromarray(np.uint8(255 * covered_HW)).resize((TEMPLATE, TEMPLATE), box=box)
    found_HW = np.asarray(found) / 255
    shape = min(SHAPES, key=lambda name: np.square(found_HW - template(name)).sum())
    side = max(box[2] - box[0], box[3] - box[1])
    return f"a {'large' if side > BETWEEN else 'small'} {colour} {shape}"


def draw(folder: Path, *, pictures: int, prompts: int, anywhere: bool = False) -> None:
    """Writes `pictures` random pictures with captions, and a file of `prompts` prompts.

    The prompts go through all captions in turn.
    """
    random, media = Random(0), folder / "pictures"
    media.mkdir(parents=True, exist_ok=True)
    rows, asked = [], []
    for number in range(pictures):
        caption, name = random.choice(CAPTIONS), f"{number:05d}.png"
        picture_of(caption, random, anywhere=anywhere).save(media / name)
        rows.append({"file_name": name, "caption": caption})
    for number in range(prompts):
        around, kind = divmod(number, len(CAPTIONS))
        width, height = PICTURES[around % len(PICTURES)]
        asked.append({"caption": CAPTIONS[kind], "width": width, "height": height})
    for file, entries in ((media / "captions.jsonl", rows), (folder / "prompts.jsonl", asked)):
        file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


def read(folder: Path) -> float:
    """The fraction of the samples in `folder` that show their prompt.

    It also prints the fractions for size, colour and shape.
    """
    samples = json.loads((folder / "samples.json").read_text())
    pairs = [(one["prompt"], caption_of(Image.open(folder / one["file"]))) for one in samples]
    found = {"as asked": [asked == seen for asked, seen in pairs]}
    for place, name in enumerate(("size", "colour", "shape"), start=1):
        found[name] = [asked.split()[place] == seen.split()[place] for asked, seen in pairs]
    for name, right in found.items():
        Console().print(f"{name:<10}{sum(right)} of {len(right)} = {np.mean(right):.1%}")
    return float(np.mean(found["as asked"]))


def main(argv: Sequence[str] | None = None) -> int:
    """Draws pictures, or judges samples, as the command line `argv` asks for.

    Returns exit code 0, or 1 if a smaller fraction than --min_accuracy shows its prompt.
    """
    parser = OptionParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("action", choices=("draw", "read"))
    parser.add_argument("folder", type=Path, help="to draw into; of samples to read")
    parser.add_argument("--pictures", type=int, default=6000, help="to draw (%(default)s)")
    parser.add_argument("--prompts", type=int, default=300, help="to write (%(default)s)")
    parser.add_argument(
        "--anywhere", action="store_true", help="draw shapes at any place, not in the middle"
    )
    parser.add_argument(
        "--min_accuracy", type=float, default=0.95, help="part of the samples (%(default)s)"
    )
    args = parser.parse_args(argv)
    if args.action == "draw":
        if args.folder.exists():
            parser.error(f"{args.folder} is there already; name a new folder, or remove it")
        numbers = {"pictures": args.pictures, "prompts": args.prompts}
        draw(args.folder, **numbers, anywhere=args.anywhere)
        return 0
    return int(read(args.folder) < args.min_accuracy)


if __name__ == "__main__":
    sys.exit(main())
