"""Writes train.yaml next to shards: a run that fits them, the time and the machine; see --help."""

from __future__ import annotations

import sys

from dit.distributed.entry import run
from dit.fitting.program import main

if __name__ == "__main__":
    sys.exit(run(main))
