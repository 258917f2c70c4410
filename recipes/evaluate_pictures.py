"""Measures how close pictures are to those of their captions, and how clean; see --help."""

from __future__ import annotations

import sys

from dit.distributed.entry import run
from dit.sampling.commands.picture_accuracy import main

if __name__ == "__main__":
    sys.exit(run(main))
