"""Options, and the report's folder, of programs that judge what a checkpoint generates."""

from __future__ import annotations

import argparse
from pathlib import Path

from dit.sampling.commands.options import GenerationOptions


def generation_options(args: argparse.Namespace) -> GenerationOptions:
    """Options of generation with `num_steps`, `guidance`, `sampler` and `weights` of `args`.

    Options that are None in `args` keep their defaults.
    """
    names = ("num_steps", "guidance", "sampler", "weights")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return GenerationOptions(**given)


def report_folder(args: argparse.Namespace) -> Path:
    """The folder of the report, which is created if it does not exist.

    It is --output_dir or, without this option, the folder --checkpoint_path; if --checkpoint_path
    is a file, it is the folder of the file.
    """
    checkpoint = Path(args.checkpoint_path)
    folder = args.output_dir or (checkpoint if checkpoint.is_dir() else checkpoint.parent)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
