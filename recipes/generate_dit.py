"""Generates pictures and videos from prompts and a checkpoint; see --help."""

from __future__ import annotations

import sys

from dit.distributed.entry import run
from dit.sampling.commands.generate_program import main

if __name__ == "__main__":
    sys.exit(run(main))
