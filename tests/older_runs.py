"""What an earlier version left in tests/golden/before_moves: commit 22c3f0d, before modules moved.

data.tar.xz     60 digits: `python -m data_prep digits --num_samples 60 --text_width 8`
tp2.tar.xz      checkpoint after 3 steps of conf/dit_digits.yaml on them, made smaller: 2 tensor
                ranks, and all that Cosmos's model has more; its config.yaml says the rest
dp2.tar.xz      likewise: 2 data ranks with 2 workers each, flow matching
balanced.pt     loader state of packs in an order of even cost, 2 workers
mock.pt         loader state of synthetic samples, no workers
left.pt         loader state of 1 worker that took over from 2, and had not begun
mock_left.pt    likewise, of synthetic samples
recorded.json   what that commit itself gave after it went on from each

They are never made again: that older files load is what they are for.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

BEFORE = Path(__file__).parent / "golden/before_moves"
RECORDED: dict[str, Any] = json.loads((BEFORE / "recorded.json").read_text())


def unpack(name: str, folder: Path) -> Path:
    """Extracts one of the archives into `folder`."""
    with tarfile.open(BEFORE / f"{name}.tar.xz") as tar:
        tar.extractall(folder, filter="data")
    return folder
