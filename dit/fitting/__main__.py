"""`python -m dit.fitting`, which packing starts."""

import sys

from dit.distributed.entry import run
from dit.fitting.program import main

sys.exit(run(main))
