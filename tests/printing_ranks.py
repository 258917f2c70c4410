"""Launched processes that print to both streams for a while, and write a file at the end.

`printing_ranks.py FOLDER`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from dit.streams import with_streams

LINES = 30


def main() -> int:
    for number in range(LINES):
        for stream in (sys.stdout, sys.stderr):
            print(f"rank {os.environ['RANK']} line {number}", file=stream, flush=True)
        time.sleep(0.02)
    Path(sys.argv[1], os.environ["RANK"]).touch()
    return 0


if __name__ == "__main__":
    sys.exit(with_streams(main))
