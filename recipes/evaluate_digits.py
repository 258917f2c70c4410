"""Measures how many generated handwritten digits show the digit of their prompt; see --help.

It runs only in a checkout: the wheel has neither this file nor examples/.
"""

from __future__ import annotations

import sys
from pathlib import Path

from dit.distributed.entry import run

sys.path.append(str(Path(__file__).resolve().parents[1]))  # examples/ is not installed

from examples.digits.accuracy import main

if __name__ == "__main__":
    sys.exit(run(main))
