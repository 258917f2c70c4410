"""Makes pairs of a digit and its inversion, to learn a preference, and judges samples.

1. draw   FOLDER/mixed: each digit once as it is and once inverted, under one caption, for the base;
          FOLDER/preferred and FOLDER/rejected: the pairs, under one name
2. judge  a folder of generate_dit -> how many samples are as preferred, how many are read as asked

    python examples/digits/preferred_digits.py draw runs/preferences/digits
    python examples/digits/preferred_digits.py judge runs/preferences/samples

docs/preferences.md has the commands between the two, and their results.
"""

# N pictures; F H W 3 frames, rows, columns, colours of one

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from dit.command_line import OptionParser
from dit.console import Console

sys.path.append(str(Path(__file__).resolve().parents[2]))  # examples/ is not installed

from examples.digits.judges import CAPTIONS, MIDDLE, DigitJudge, grey_levels


def draw(folder: Path, *, digits: int | None, prompts: int) -> None:
    """Writes the pictures of `digits` digits (None: all) with captions, as this file describes.

    It also writes `prompts` prompts, which repeat the captions of all digits.
    """
    from data_prep.sources.digits import Digits  # late: --help answers without torch

    source = Digits(num_samples=digits)
    rows: dict[str, list[dict[str, str]]] = {"mixed": [], "preferred": [], "rejected": []}
    for name in rows:
        (folder / name).mkdir(parents=True)
    for index, entry in enumerate(source.entries):
        grey_HW = np.asarray((source.picture(index) + 1) * 127.5).round().astype(np.uint8)
        usual, inverted = Image.fromarray(grey_HW), Image.fromarray(255 - grey_HW)
        for place, name, picture in (
            ("mixed", f"{index:04d}.png", usual),
            ("mixed", f"{index:04d}-inverted.png", inverted),
            ("preferred", f"{index:04d}.png", usual),
            ("rejected", f"{index:04d}.png", inverted),
        ):
            picture.save(folder / place / name)
            rows[place].append({"file_name": name, "caption": entry.caption})
    for place, entries in rows.items():
        if place != "rejected":  # they have the captions of the preferred ones
            _write(folder / place / "captions.jsonl", entries)
    asked = [{"caption": CAPTIONS[number % len(CAPTIONS)]} for number in range(prompts)]
    _write(folder / "prompts.jsonl", asked)


def _write(file: Path, rows: Sequence[dict[str, str]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def is_inverted(picture_FHW3: np.ndarray) -> bool:
    """Whether the mean of a picture is lighter than mid grey.

    That holds for every inverted digit and for no other.
    """
    return bool(grey_levels(picture_FHW3).mean() > MIDDLE)


def judge(folder: Path) -> tuple[float, float]:
    """Judges the samples in `folder`; prints and returns two fractions.

    The first is the fraction that is not inverted, the second the fraction that is read right.
    Inverted samples are inverted back before they are read, so that the fractions are independent.
    """
    samples = json.loads((folder / "samples.json").read_text())
    pictures = [
        np.asarray(Image.open(folder / one["file"]).convert("RGB"))[None] for one in samples
    ]
    inverted = [is_inverted(picture) for picture in pictures]
    upright = [255 - p if back else p for p, back in zip(pictures, inverted, strict=True)]
    read = DigitJudge.trained().read(upright).tolist()
    pairs = zip(samples, read, strict=True)
    right = [CAPTIONS[digit] == one["prompt"] for one, digit in pairs]
    parts = {"preferred": 1 - float(np.mean(inverted)), "read as asked": float(np.mean(right))}
    for name, part in parts.items():
        Console().print(f"{name:<14}{part * len(samples):.0f} of {len(samples)} = {part:.1%}")
    return parts["preferred"], parts["read as asked"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = OptionParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("action", choices=("draw", "judge"))
    parser.add_argument("folder", type=Path, help="to draw into; of samples to judge")
    parser.add_argument("--digits", type=int, help="to draw (all)")
    parser.add_argument("--prompts", type=int, default=500, help="to write (%(default)s)")
    args = parser.parse_args(argv)
    if args.action == "draw":
        if args.folder.exists():
            parser.error(f"{args.folder} is there already; name a new folder, or remove it")
        draw(args.folder, digits=args.digits, prompts=args.prompts)
    else:
        judge(args.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
