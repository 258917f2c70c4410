"""Measures the accuracy of generated handwritten digits: the program of evaluate_digits.py.

1. read      a `Kind` reads the data that it needs, and trains a classifier on real digits
2. generate  samples for the prompts of that kind
3. judge     the fraction that is as prompted: judges.py; spread and distance: likeness.py
4. conclude  writes evaluation.json and a picture, prints tables and fractions that are too small
"""

# H W 3 rows, columns, colours of a picture

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path

import numpy as np

from dit.command_line import OptionParser
from dit.config import Sampler
from dit.console import Console
from dit.local_path import checkpoint_place, is_address, local_text
from dit.safe_writing import write_atomically
from dit.sampling.commands.evaluation import generation_options, report_folder
from dit.sampling.commands.generate_program import shown_progress
from dit.sampling.commands.load_options import LoadOptions
from dit.sampling.commands.options import MOST_SAMPLES, check_count, check_seed
from dit.sampling.grid import draw_grid
from dit.sampling.prompts import Prompt
from examples.digits.judges import MOTIONS, NAMES
from examples.digits.kinds import (
    EditedKind,
    Kind,
    MirroredKind,
    MovingKind,
    Report,
    StillKind,
)

KINDS: Mapping[tuple[bool, bool], type[Kind]] = {
    (False, False): StillKind,
    (True, False): MovingKind,
    (False, True): EditedKind,
    (True, True): MirroredKind,
}
"""Classes of the kinds of digits, by the options (--moving, --edits)."""


OF_TEACHER = ("teacher_guidance", "teacher_per_prompt")
"""Options that have an effect only with --teacher."""
_OTHER_NOISE = (1_000_000_000, 2_000_000_000)
"""First seeds of the two sets of samples of a teacher."""


def digits_parser() -> argparse.ArgumentParser:
    parser = OptionParser(description="Generates digits; counts those that are read as asked.")
    parser.first = ("checkpoint_path", "moving", "edits", "inverted", "lora", "per_prompt")
    parser.first += ("num_steps", "guidance", "sampler", "output_dir")
    add = parser.add_argument
    add("--checkpoint_path", type=checkpoint_place, required=True, help="run folder or checkpoint")
    moving = "clips of moving digits; for a run on `python -m data_prep digits --moving`"
    add("--moving", action="store_true", help=moving)
    edits = "200 given digits that get a frame or are mirrored, with --moving the mirror images of"
    edits += " 200 given clips; for a run on"
    add("--edits", action="store_true", help=f"{edits} `python -m data_prep digits --edits`")
    add(
        "--inverted",
        action="store_true",
        help="dark ink on white; for a run on `python -m data_prep digits --invert`: pictures are"
        " inverted back and read, and the same part must be lighter than mid grey",
    )
    add(
        "--lora",
        type=local_text,
        action="append",
        default=[],
        metavar="FILE[:SCALE]",
        help="adapters for the checkpoint, as for generate_dit.py",
    )
    each = "pictures of each digit (default: 50); clips of each caption (default: 5)"
    add("--per_prompt", type=int, default=50, help=each)
    add("--seed", type=int, default=0, help="of the first picture; the i-th takes seed + i")
    add("--num_steps", type=int, help="steps of the sampler, as for generate_dit.py")
    add("--guidance", type=float, help="classifier-free guidance scale; 1 means none")
    add("--sampler", choices=[str(one) for one in Sampler], help="as for generate_dit.py")
    add("--weights", choices=("ema", "model"), default="ema")
    add("--output_dir", type=Path, help="folder for evaluation.json (default: the run)")
    add(
        "--min_accuracy",
        type=float,
        default=0.95,
        help="below this the exit code is 1 (default: 0.95; for edits and clips 0.9; for clips from"
        " a first frame 0.95 for digits and 0.9 for directions)",
    )
    data = "data for --moving and --edits (default: the run's)"
    add("--dataset_path", type=Path, help=data)
    add(
        "--teacher",
        type=checkpoint_place,
        metavar="RUN",
        help="compare with two sets of pictures of this run or checkpoint, in 35 steps of heun;"
        " its run folder keeps them",
    )
    of_teacher = "guidance of --teacher (default: that of the distillation, else the network's own)"
    add("--teacher_guidance", type=float, help=of_teacher)
    many = (
        "pictures of each digit in such a set (default: 200); clips of each caption (default: 50)"
    )
    add("--teacher_per_prompt", type=int, metavar="N", help=many)
    return parser


def check_arguments(args: argparse.Namespace) -> None:
    """Checks the options, before anything is trained or sampled.

    Raises:
        ValueError: an option is out of range; the message names it.
    """
    prompts = len(MOTIONS if args.moving else NAMES)
    check_count("per_prompt", args.per_prompt, most=MOST_SAMPLES // prompts)
    if (each := args.teacher_per_prompt) is not None:
        check_count("teacher_per_prompt", each, most=MOST_SAMPLES // prompts)
    alone = [f"--{name}" for name in OF_TEACHER if getattr(args, name) is not None]
    if alone and args.teacher is None:
        raise ValueError(f"{alone[0]} is an option of --teacher; give --teacher, or leave it out")
    check_seed(args.seed, count=args.per_prompt * prompts)
    if args.min_accuracy is not None and not 0 <= args.min_accuracy <= 1:
        raise ValueError(f"--min_accuracy {args.min_accuracy} must lie in [0, 1]")
    if args.inverted and (args.moving or args.edits):
        other = "--moving" if args.moving else "--edits"
        raise ValueError(f"{other} and --inverted exclude each other; leave one out")
    if is_address(args.checkpoint_path) and args.output_dir is None:
        raise ValueError(
            f"--checkpoint_path {args.checkpoint_path} is not a folder of this machine, so that"
            " the results have no place there; give --output_dir, too"
        )
    generation_options(args)


def main(argv: Sequence[str] | None = None) -> int:
    """Generates and judges digits as the command line `argv` asks for.

    Returns exit code 0, or 1 if a smaller fraction is right than is demanded.
    """
    parser = digits_parser()
    args = parser.parse_args(argv)
    kind = KINDS[args.moving, args.edits]
    parser.set_defaults(**kind.defaults)
    args = parser.parse_args(argv)
    check_arguments(args)
    # Imported late: --help and a wrong option answer at once.
    from dit.sampling.commands.generate_media import generate_opened
    from dit.sampling.open_checkpoint import open_checkpoint

    loading, options = LoadOptions(lora=args.lora), generation_options(args)
    opened = open_checkpoint(args.checkpoint_path, weights=args.weights, options=loading)
    data = args.dataset_path or Path(opened.config.dataset.path or "")
    with tempfile.TemporaryDirectory() as folder:
        asked = kind(args, opened, data, Path(folder))
        prompts = asked.teacher_prompts(args.teacher_per_prompt) if args.teacher else []
        made = generate_opened(
            opened, asked.prompts, seed=args.seed, options=options, track=shown_progress()
        )
    pictures = [picture.frames_FHW3 for picture in made]
    guidance = options.guidance if options.guidance is not None else opened.config.guidance
    if opened.config.distill.method is not None:
        guidance = opened.config.teacher_guidance
    guidance = guidance if args.teacher_guidance is None else args.teacher_guidance
    sets = teacher_sets(args, prompts, guidance=guidance) if args.teacher else ()
    report = asked.judged(pictures) | asked.likeness(pictures, sets)
    return conclude(kind, report, asked.drawn(pictures), args)


def teacher_sets(
    args: argparse.Namespace, prompts: Sequence[Prompt], *, guidance: float
) -> Sequence[Sequence[np.ndarray]]:
    """Two sets of pictures [F, H, W, 3] that --teacher makes for `prompts` from different noise.

    If the teacher is a local run, they are stored in its folder, and read from there the next time.
    """
    from dit.sampling.commands.generate_media import generate_opened
    from dit.sampling.commands.options import GenerationOptions
    from dit.sampling.open_checkpoint import open_checkpoint

    opened = open_checkpoint(args.teacher, weights=args.weights)
    name = f"{opened.path.name}_{args.weights}_guidance_{guidance:g}_{len(prompts)}.npz"
    folder = Path(args.teacher)
    if opened.path.parent.name == "checkpoints":
        folder = opened.path.parents[1]  # of the run, which is no part of a checkpoint
    kept = folder / name if folder.is_dir() else None
    if kept is not None and kept.is_file():
        with np.load(kept) as found:
            return [*found["one"]], [*found["other"]]
    options = GenerationOptions(
        num_steps=35, sampler=Sampler.HEUN, guidance=guidance, weights=args.weights
    )
    sets = []
    for seed in _OTHER_NOISE:
        made = generate_opened(opened, prompts, seed=seed, options=options, track=shown_progress())
        sets.append([picture.frames_FHW3 for picture in made])
    if kept is not None:
        content = BytesIO()
        np.savez_compressed(content, one=np.stack(sets[0]), other=np.stack(sets[1]))
        write_atomically(kept, content.getvalue())
    return sets


def conclude(
    kind: type[Kind],
    report: Report,
    drawn: Sequence[tuple[str, np.ndarray]],
    args: argparse.Namespace,
) -> int:
    """Writes evaluation.json and a sheet of the samples `drawn`, and prints the result.

    Returns the exit code: 1 if a fraction is smaller than demanded, else 0.
    """
    console, folder = Console(), report_folder(args)
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    text = json.dumps(report | {"settings": settings}, indent=2)
    (folder / "evaluation.json").write_text(text + "\n")
    if drawn:
        captions, pictures = zip(*drawn, strict=True)
        draw_grid(pictures, captions, folder / kind.sheet)
    lines, demands = kind.said(report, args.min_accuracy)
    for line in lines:
        console.print(line)
    console.print(
        f"written: {folder / 'evaluation.json'}" + (f" and {kind.sheet}" if drawn else "")
    )
    missed = {name: each for name, each in demands.items() if each[0] < each[1]}
    for name, (part, least) in missed.items():
        said = f"{part:.1%} is below {least:.1%}"
        console.print(f"{name}: {said}" if name else said, style="red")
    return int(bool(missed))
