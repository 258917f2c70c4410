"""Measures how many generated handwritten digits show what was asked for; see --help."""

from __future__ import annotations

import sys

from dit.distributed.entry import run
from dit.sampling.commands.digit_accuracy import main

if __name__ == "__main__":
    sys.exit(run(main))
