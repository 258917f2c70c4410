"""Decodes saved latents into pictures and videos; see --help."""

from __future__ import annotations

import sys

from dit.distributed.entry import run
from dit.sampling.commands.decode_latents import main

if __name__ == "__main__":
    sys.exit(run(main))
