"""Accuracy of generated moving digits: the program of evaluate_digits.py --moving.

1. real_clips   clips of the data that the run was trained on, by split
2. ClipJudge    classifiers of whole clips: trained on one split, tested on the held-out one
3. wanted       what is asked for: every caption, or held-out clips with their first frames
4. score        the part that shows the digit asked for, that moves as told, and that does both

A run whose network reads a first frame is given those of held-out clips; other runs are given
captions alone.
"""

# N clips; F H W 3 frames, rows, columns, colours of one clip; P = 2304 pixels of a clip

from __future__ import annotations

import argparse
import json
import random
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image
from rich.table import Table

from dit.console import Console
from dit.sampling.commands.digit_accuracy import (
    CAPTIONS,
    NAMES,
    generation_options,
    report_folder,
)
from dit.sampling.grid import beside, draw_grid
from dit.sampling.prompts import Prompt

if TYPE_CHECKING:
    from dit.codecs.vae import Codec

DIRECTIONS = ("left", "right", "up", "down")
GIVEN_CLIPS = 200  # clips of a run that is given first frames
HELD_OUT = 0.97  # part of the held-out real clips that the judge must read right
LEAST = {False: {"both": 0.90}, True: {"digit": 0.95, "direction": 0.90}}
"""Parts that must be right, by whether the first frame is given."""
_COMPONENTS = 100  # of a clip's pixels, which the classifiers see
_SHOWN = 6  # clips in the picture


class Motion(NamedTuple):
    """What a clip shows."""

    digit: int
    direction: int

    @property
    def caption(self) -> str:
        return f"{CAPTIONS[self.digit]} moves {DIRECTIONS[self.direction]}"


MOTIONS = tuple(Motion(digit, d) for digit in range(len(NAMES)) for d in range(len(DIRECTIONS)))
_BY_CAPTION = {motion.caption: motion for motion in MOTIONS}


@dataclass(frozen=True, kw_only=True)
class RealClip:
    """A clip of the dataset."""

    frames_FHW3: np.ndarray  # uint8
    motion: Motion


def real_clips(folder: Path, split: str, decoder: Codec) -> list[RealClip]:
    """All clips of a split that data_prep has packed.

    Raises:
        ValueError: there are none, or a caption is not that of a moving digit.
    """
    found = []
    for tar in sorted((folder / split).glob("*.tar")):
        for latent_CFHW, caption in samples_of(tar):
            if caption not in _BY_CAPTION:
                raise ValueError(
                    f"{tar} has the caption {caption!r}, not one such as {MOTIONS[0].caption!r};"
                    " --dataset_path must be data of `python -m data_prep digits --moving`"
                )
            motion = _BY_CAPTION[caption]
            found.append(RealClip(frames_FHW3=decoder.decode(latent_CFHW).numpy(), motion=motion))
    if not found:
        raise ValueError(
            f"{folder / split} has no shards; give the folder of the moving digits that the run was"
            " trained on as --dataset_path"
        )
    return found


def samples_of(tar: Path) -> Iterator[tuple[Any, str]]:
    """Latent and caption of each sample; the files of a sample follow each other."""
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


@dataclass(frozen=True, kw_only=True)
class ClipJudge:
    """Reads digit and direction of whole clips: all pixels of all frames.

    A digit that changes on its way may still be read right, so the last frame is read alone, too.
    """

    digit: Any  # pipelines of scikit-learn
    direction: Any
    last_digit: Any  # of the last frame

    @classmethod
    def trained_on(cls, clips: Sequence[RealClip]) -> ClipJudge:
        from sklearn.decomposition import PCA
        from sklearn.pipeline import make_pipeline
        from sklearn.svm import SVC

        pixels_NP = _pixels([clip.frames_FHW3 for clip in clips])
        labels = np.array([clip.motion for clip in clips])
        components = min(_COMPONENTS, *pixels_NP.shape)

        def fitted(pixels_NP: np.ndarray, labels_N: np.ndarray) -> Any:
            return make_pipeline(PCA(components, random_state=0), SVC()).fit(pixels_NP, labels_N)

        return cls(
            digit=fitted(pixels_NP, labels[:, 0]),
            direction=fitted(pixels_NP, labels[:, 1]),
            last_digit=fitted(_pixels([clip.frames_FHW3[-1] for clip in clips]), labels[:, 0]),
        )

    def read(self, clips: Sequence[np.ndarray]) -> list[Motion]:
        """What each uint8 [F, H, W, 3] clip shows."""
        pixels_NP = _pixels(clips)
        each = zip(self.digit.predict(pixels_NP), self.direction.predict(pixels_NP), strict=True)
        return [Motion(int(digit), int(direction)) for digit, direction in each]

    def score(self, asked: Sequence[Motion], clips: Sequence[np.ndarray]) -> dict[str, float]:
        """As the function `score`, and the part whose last frame shows the digit asked for."""
        last_N = self.last_digit.predict(_pixels([clip[-1] for clip in clips]))
        right = np.mean(last_N == [motion.digit for motion in asked])
        return {**score(asked, self.read(clips)), "last_digit": float(right)}


def _pixels(clips: Sequence[np.ndarray]) -> np.ndarray:
    """Grey values in [0, 1], one row for each clip or frame."""
    return np.stack([clip[..., 0].ravel() for clip in clips]) / 255


def score(asked: Sequence[Motion], read: Sequence[Motion]) -> dict[str, float]:
    """Parts of the clips whose digit, whose direction, and whose digit and direction are right."""
    same_N2 = np.array(asked) == np.array(read)
    digit, direction = same_N2.mean(0)
    return {
        "digit": float(digit),
        "direction": float(direction),
        "both": float(same_N2.all(1).mean()),
    }


def prompts_of(clips: Sequence[RealClip], folder: Path) -> list[Prompt]:
    """Captions of the clips with their first frames, which are written into `folder`."""
    prompts = []
    for number, clip in enumerate(clips):
        path = folder / f"{number:05d}.png"
        Image.fromarray(clip.frames_FHW3[0]).save(path)
        prompts.append(Prompt(text=clip.motion.caption, image=str(path)))
    return prompts


def wanted(
    args: argparse.Namespace, held_out: Sequence[RealClip], folder: Path | None
) -> tuple[list[Motion], list[Prompt]]:
    """What is asked for; with a `folder`, held-out clips with their first frames, drawn by seed."""
    if folder is None:
        motions = [motion for motion in MOTIONS for _ in range(args.per_prompt)]
        return motions, [Prompt(text=motion.caption) for motion in motions]
    drawn = random.Random(args.seed).sample(held_out, min(GIVEN_CLIPS, len(held_out)))
    return [clip.motion for clip in drawn], prompts_of(drawn, folder)


def evaluate(args: argparse.Namespace) -> int:
    """Exit code 0, or 1 where less than is demanded is right."""
    from dit.models.registry import family_of
    from dit.sampling.commands.generate_media import generate_opened, shown_progress
    from dit.sampling.open_checkpoint import LoadOptions, open_checkpoint

    loading = LoadOptions(lora=args.lora)
    opened = open_checkpoint(args.checkpoint_path, weights=args.weights, options=loading)
    assert opened.decoder is not None
    data = args.dataset_path or Path(opened.config.dataset.path or "")
    train, held_out = (real_clips(data, split, opened.decoder) for split in ("train", "val"))
    judge = ClipJudge.trained_on(train)
    trusted = judge.score([c.motion for c in held_out], [c.frames_FHW3 for c in held_out])
    model = opened.config.model
    given = any(one.pictures for one in family_of(model).inputs(model))
    with tempfile.TemporaryDirectory() as folder:
        asked, prompts = wanted(args, held_out, Path(folder) if given else None)
        options = generation_options(args)
        track = shown_progress()
        made = generate_opened(opened, prompts, seed=args.seed, options=options, track=track)
    clips = [picture.frames_FHW3 for picture in made]
    read = judge.read(clips)
    report = {**judge.score(asked, clips), "clips": len(clips), "first_frame_given": given}
    report |= {"held_out": trusted, "held_out_clips": len(held_out)}
    report["wrong"] = [
        f"{a.caption}: {r.caption}" for a, r in zip(asked, read, strict=True) if a != r
    ]
    return conclude(report, [(m.caption, clip) for m, clip in zip(asked, clips, strict=True)], args)


def conclude(
    report: dict[str, Any], clips: Sequence[tuple[str, np.ndarray]], args: argparse.Namespace
) -> int:
    """Prints the result, writes evaluation.json and a picture, and returns the exit code."""
    console = Console()
    folder = report_folder(args)
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    text = json.dumps(report | {"settings": settings}, indent=2)
    (folder / "evaluation.json").write_text(text + "\n")
    shown = clips[:: max(1, len(clips) // _SHOWN)][:_SHOWN]
    # Every second frame, side by side.
    strips = [beside(*clip_FHW3[::2]) for _, clip_FHW3 in shown]
    draw_grid(strips, [caption for caption, _ in shown], folder / "clips.png")
    keys = ("digit", "direction", "both", "last_digit")
    table = Table("read by the classifier", "digit", "direction", "both", "digit of the last frame")
    named = {f"{report['clips']} generated clips": report}
    named[f"{report['held_out_clips']} held-out real clips"] = report["held_out"]
    for name, parts in named.items():
        table.add_row(name, *(f"{parts[key]:.1%}" for key in keys))
    console.print(table)
    console.print(f"written: {folder / 'evaluation.json'} and clips.png")
    failed = shortfalls(report, args.min_accuracy)
    for sentence in failed:
        console.print(sentence, style="red")
    return 1 if failed else 0


def shortfalls(report: dict[str, Any], least: float | None) -> list[str]:
    """A sentence for each part that is below what is demanded; `least` replaces all demands."""
    parts = {key: report[key] for key in LEAST[report["first_frame_given"]]}
    demands = dict(LEAST[report["first_frame_given"]])
    if least is not None:
        demands = dict.fromkeys(demands, least)
    else:
        parts["held_out"], demands["held_out"] = report["held_out"]["both"], HELD_OUT
    return [
        f"{name}: {parts[name]:.1%} is below {demands[name]:.1%}"
        for name in demands
        if parts[name] < demands[name]
    ]
