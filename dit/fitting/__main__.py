"""Runs the command as `python -m dit.fitting`, which packing starts."""

import sys

from dit.distributed.entry import run
from dit.fitting.program import main

if __name__ == "__main__":
    sys.exit(run(main))
