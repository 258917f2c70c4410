"""A training run that notes where its decoder goes: `watched_decoder.py NOTES ARGUMENT ...`.

NOTES gets a JSON value a line: a device that the decoder was moved to, "decode", or the bytes of
device memory in use where a round of samples begins and where it ends. Without a GPU the decoder is
sent to one all the same, and stays where it is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL

from dit.distributed.entry import run
from dit.sampling.validation import samples
from dit.train import validation
from recipes import pretrain_dit


def main(notes: Path, argv: Sequence[str]) -> int:
    gpu, to, decode, draw = torch.cuda.is_available(), *_originals()

    def note(what: Any) -> None:
        with notes.open("a") as file:
            file.write(json.dumps(what) + "\n")

    def watched_to(self: Any, *places: Any, **options: Any) -> Any:
        kinds = [torch.device(p).type for p in places if isinstance(p, str | torch.device)]
        for kind in kinds:
            note(kind)
        return self if "cuda" in kinds and not gpu else to(self, *places, **options)

    def watched_decode(self: Any, *args: Any, **options: Any) -> Any:
        note("decode")
        return decode(self, *args, **options)

    def watched_draw(of: Any) -> Any:
        note(torch.cuda.memory_allocated() if gpu else 0)
        drawn = draw(of)
        note(torch.cuda.memory_allocated() if gpu else 0)
        return drawn

    AutoencoderKL.to, AutoencoderKL.decode = watched_to, watched_decode
    validation.draw_samples = watched_draw
    if not gpu:
        samples.device = lambda: torch.device("cuda")
    return pretrain_dit.main(argv)


def _originals() -> tuple[Any, Any, Any]:
    return AutoencoderKL.to, AutoencoderKL.decode, validation.draw_samples


if __name__ == "__main__":
    sys.exit(run(lambda: main(Path(sys.argv[1]), sys.argv[2:])))
