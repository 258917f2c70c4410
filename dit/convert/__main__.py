"""Runs the command line: `python -m dit.convert`."""

import sys

from dit.convert.cli import main
from dit.distributed.entry import run

if __name__ == "__main__":
    sys.exit(run(main))
