"""Writes the folder of a pipeline with tiny random encoders; see --help."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from dit.codecs.rehearsal import WRITERS
from dit.distributed.entry import Parser, run, say_notice


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the folder that the command line `argv` names; returns exit code 0.

    Raises:
        ValueError: the folder exists, or a package is not installed.
    """
    args = _parser().parse_args(argv)
    folder = args.folder
    try:
        if folder.exists():
            raise FileExistsError(folder)
        WRITERS[args.processor](folder)
    except FileExistsError:
        raise ValueError(f"{folder} exists; give the name of a new folder") from None
    except ImportError as error:
        raise ValueError(
            f"{error.name} is not installed; install it with pip install 'megatron-dit[prep]'"
        ) from None
    say_notice(f"{folder}: random encoders for --processor {args.processor}; they make noise")
    return 0


def _parser() -> Parser:
    parser = Parser(
        description="Tiny random VAE and text encoder with the output sizes of published ones (Wan"
        " 2.1, FLUX.2 dev, FLUX.2 klein 4B), to try packing, training, generation and export"
        " without a download."
    )
    parser.add_argument("folder", type=Path, help="such as models/Wan2.1-T2V-1.3B-Diffusers")
    parser.add_argument(
        "--processor", choices=WRITERS, default="wan", help="of data_prep (default: wan)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(run(main))
