"""Accuracy of edited digits: the program of evaluate_digits.py --edits.

1. held_out_digits  digits of the dataset that the run was not trained on
2. wanted           some of them, each with an edit: the reference picture and the prompt
3. find_nearest     of all held-out digits, unedited and after every edit, the one that is most like
                    what was made; it must be the digit that was given, after the edit that was told

A digit that stays as it was, that has the other edit, or that becomes another digit is wrong.
"""

# N pictures; K digits; E states of a digit; H W rows, columns; P = 64 pixels of a digit

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image
from rich.table import Table
from rich.text import Text

from dit.console import Console
from dit.sampling.commands.digit_accuracy import (
    LEVELS,
    SIDE,
    generation_options,
    grey_levels,
    report_folder,
)
from dit.sampling.commands.moving_digit_accuracy import samples_of
from dit.sampling.grid import draw_grid
from dit.sampling.prompts import Prompt

if TYPE_CHECKING:
    from dit.codecs.vae import Codec

# These facts equal those of data_prep/sources/digits.py, which dit/ must not import; a test
# compares them.
EDITS = ("with a frame", "mirrored")
STATES = ("unedited", *EDITS)
PAIRS = 200  # digits that are edited
LEAST = 0.9  # part of them that must be right
_SHOWN = 12  # pairs in the picture


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is asked for: the number of a held-out digit, and that of an edit."""

    digit: int
    edit: int

    @property
    def caption(self) -> str:
        return EDITS[self.edit]


@dataclass(frozen=True, kw_only=True)
class Nearest:
    """The picture that is most like one that was made."""

    digit: int
    state: int  # of `STATES`
    distance: float  # root of the mean squared difference to what was asked for, of 16 levels


def after_edits(digits_KHW: np.ndarray) -> np.ndarray:
    """Grey levels of digits [K, 8, 8] -> those of every state [K, E, 8, 8]."""
    framed_KHW = np.full_like(digits_KHW, LEVELS)
    framed_KHW[:, 1:-1, 1:-1] = digits_KHW[:, 1:-1, 1:-1]
    return np.stack([digits_KHW, framed_KHW, digits_KHW[:, :, ::-1]], axis=1)


def held_out_digits(folder: Path, decoder: Codec) -> np.ndarray:
    """Grey levels [K, 8, 8], 0 to 16, of the digits in the validation split.

    Raises:
        ValueError: there are none, or they are no pairs of a digit and its edit.
    """
    found = []
    for tar in sorted((folder / "val").glob("*.tar")):
        for latent_CFHW, caption in samples_of(tar):
            if caption not in EDITS:
                raise ValueError(
                    f"{tar} has the caption {caption!r}, not one such as {EDITS[0]!r};"
                    " --dataset_path must be data of `python -m data_prep digits --edits`"
                )
            if caption == "mirrored":
                levels_P = grey_levels(decoder.decode(latent_CFHW).numpy())
                found.append(levels_P.reshape(SIDE, SIDE)[:, ::-1])
    if not found:
        raise ValueError(
            f"{folder / 'val'} has no mirrored digits; give the folder of the pairs that the run"
            " was trained on as --dataset_path"
        )
    return np.stack(found)


def wanted(digits_KHW: np.ndarray, *, seed: int) -> list[Asked]:
    """Digits and edits, drawn by seed."""
    every = [Asked(digit=k, edit=e) for k in range(len(digits_KHW)) for e in range(len(EDITS))]
    return random.Random(seed).sample(every, min(PAIRS, len(every)))


def prompts_of(asked: Sequence[Asked], digits_KHW: np.ndarray, folder: Path) -> list[Prompt]:
    """What is told, beside the digits, which are written into `folder`."""
    prompts = []
    for number, one in enumerate(asked):
        path = folder / f"{number:05d}.png"
        Image.fromarray(_shown(digits_KHW[one.digit])).save(path)
        prompts.append(Prompt(text=one.caption, references=(str(path),)))
    return prompts


def find_nearest(
    pictures: Sequence[np.ndarray], asked: Sequence[Asked], digits_KHW: np.ndarray
) -> list[Nearest]:
    """What each uint8 [F, H, W, 3] picture shows."""
    states_KEHW = after_edits(digits_KHW)
    states_KEP = states_KEHW.reshape(*states_KEHW.shape[:2], -1)
    found = []
    for picture, one in zip(pictures, asked, strict=True):
        error_KE = np.square(states_KEP - grey_levels(picture)).mean(-1) ** 0.5
        digit, state = np.unravel_index(error_KE.argmin(), error_KE.shape)
        distance = float(error_KE[one.digit, one.edit + 1])
        found.append(Nearest(digit=int(digit), state=int(state), distance=distance))
    return found


def is_right(asked: Asked, found: Nearest) -> bool:
    return (asked.digit, asked.edit + 1) == (found.digit, found.state)


def score(asked: Sequence[Asked], found: Sequence[Nearest]) -> dict[str, Any]:
    """Parts that are right, in all and of each edit; the distance; counts of [edit][state]."""
    right_N = np.array([is_right(*each) for each in zip(asked, found, strict=True)])
    edit_N = np.array([one.edit for one in asked])
    counts = np.zeros((len(EDITS), len(STATES)), dtype=int)
    np.add.at(counts, (edit_N, np.array([one.state for one in found])), 1)
    return {
        "right": float(right_N.mean()),
        "edits": {e: float(right_N[edit_N == i].mean()) for i, e in enumerate(EDITS)},
        "distance": float(np.mean([one.distance for one in found])),
        "found": counts.tolist(),
        "pairs": len(asked),
    }


def evaluate(args: argparse.Namespace) -> int:
    """Exit code 0, or 1 where less than is demanded is right."""
    from dit.sampling.commands.generate_media import generate_opened
    from dit.sampling.open_checkpoint import LoadOptions, open_checkpoint

    loading = LoadOptions(lora=args.lora)
    opened = open_checkpoint(args.checkpoint_path, weights=args.weights, options=loading)
    assert opened.decoder is not None
    data = args.dataset_path or Path(opened.config.dataset.path or "")
    digits_KHW = held_out_digits(data, opened.decoder)
    asked = wanted(digits_KHW, seed=args.seed)
    with tempfile.TemporaryDirectory() as folder:
        prompts = prompts_of(asked, digits_KHW, Path(folder))
        options = generation_options(args)
        made = generate_opened(opened, prompts, seed=args.seed, options=options)
    pictures = [picture.frames_FHW3 for picture in made]
    report = score(asked, find_nearest(pictures, asked, digits_KHW))
    # What the judge says of digits that stay as they are: none may be right.
    same = [_shown(digits_KHW[one.digit])[None] for one in asked]
    report["unedited"] = score(asked, find_nearest(same, asked, digits_KHW))["right"]
    pairs = [
        (one.caption, np.concatenate((_shown(digits_KHW[one.digit]), picture[0]), axis=1))
        for one, picture in zip(asked, pictures, strict=True)
    ]
    return conclude(report, pairs, args)


def conclude(
    report: dict[str, Any], pairs: Sequence[tuple[str, np.ndarray]], args: argparse.Namespace
) -> int:
    """Prints the result, writes evaluation.json and a picture, and returns the exit code."""
    console, folder = Console(), report_folder(args)
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    text = json.dumps(report | {"settings": settings}, indent=2)
    (folder / "evaluation.json").write_text(text + "\n")
    shown = pairs[:_SHOWN]
    draw_grid([pair for _, pair in shown], [caption for caption, _ in shown], folder / "pairs.png")
    table = Table("told", "given digit after this edit", *(f"like {state}" for state in STATES))
    for edit, counts in zip(EDITS, report["found"], strict=True):
        table.add_row(edit, f"{report['edits'][edit]:.1%}", *map(str, counts))
    table.add_section()
    table.add_row("all", Text(f"{report['right']:.1%} of {report['pairs']}", style="bold"))
    console.print(table)
    console.print(f"distance to what was asked for: {report['distance']:.2f} of {LEVELS} levels")
    console.print(f"digits that stay as they are: {report['unedited']:.1%} right")
    console.print(f"written: {folder / 'evaluation.json'} and pairs.png")
    least = LEAST if args.min_accuracy is None else args.min_accuracy
    if report["right"] < least:
        console.print(f"{report['right']:.1%} is below {least:.1%}", style="red")
        return 1
    return 0


def _shown(levels_HW: np.ndarray) -> np.ndarray:
    """Grey levels of 16 as a uint8 picture [H, W, 3]."""
    grey_HW = np.round(levels_HW * (255 / LEVELS)).astype(np.uint8)
    return grey_HW[..., None].repeat(3, axis=-1)
