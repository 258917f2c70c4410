"""Writes the folder of Wan's pipeline with tiny random encoders; see --help."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from dit.codecs.rehearsal import write_wan
from dit.distributed.entry import Parser, run, say_notice


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0."""
    folder = _parser().parse_args(argv).folder
    try:
        write_wan(folder)
    except FileExistsError:
        raise ValueError(f"{folder} exists; give the name of a new folder") from None
    except ImportError as error:
        raise ValueError(
            f"{error.name} is not installed; install it with pip install 'megatron-dit[prep]'"
        ) from None
    say_notice(f"{folder}: random encoders for --processor wan; what they make is noise")
    return 0


def _parser() -> Parser:
    parser = Parser(
        description="Tiny random VAE and text encoder with the output sizes of Wan 2.1, to try"
        " packing, training, generation and export without a download."
    )
    parser.add_argument("folder", type=Path, help="such as models/Wan2.1-T2V-1.3B-Diffusers")
    return parser


if __name__ == "__main__":
    sys.exit(run(main))
