"""Hashes the first packs of training loaders; `parity.py` runs it with a tree's modules.

    python -P tools/parity_packs.py RUN=DATA_RANKS ...

The working directory has the run folders; RUN.packs gets the hashes, or the error. A renamed field
counts as missing until `FIELDS` and the recording agree.
"""

from __future__ import annotations

import importlib
import itertools
import json
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent))  # behind the tree's own modules

from parity_results import fingerprint

PLACES = {
    "read_config": ("dit.config_loading", "dit.config.loading", "dit.configuring"),
    "build_train_loader": ("dit.data", "dit.data.loader"),
}
"""Modules in which trees have or had a function, the newest first, by the function's name."""
FIELDS = (
    *("latent_TC", "position_TA", "segment_T", "is_real_T", "text_LE", "fps_N"),
    *("grids", "starts", "text_starts", "keys", "captions", "pack_id"),
)
FORMER = {"position_TA": "position_T3"}
"""Former names of fields, by their present names."""
PACKS = 50


def main(runs: Sequence[str]) -> None:
    for name, _, ranks in (run.partition("=") for run in runs):
        try:
            config = min(Path(name).glob("checkpoints/*/config.yaml"))
            found = hashes(config, ranks=int(ranks))
        except Exception as error:  # noqa: BLE001 - of one run; the others follow
            traceback.print_exc()
            found = {"error": repr(error)}
        Path(f"{name}.packs").write_text(json.dumps(found))


def hashes(config_file: Path, *, ranks: int) -> dict[str, Any]:
    config = of_tree("read_config")(config_file)
    found = {}
    for rank in range(ranks):
        loader = of_tree("build_train_loader")(config, rank=rank, world_size=ranks)
        for number, pack in enumerate(itertools.islice(loader, PACKS)):
            for field in FIELDS:
                former = FORMER.get(field, field)
                value = getattr(pack, field, getattr(pack, former, "missing"))
                found[f"rank {rank} pack {number} {former}"] = fingerprint(value)
        loader.close()
    return found


def of_tree(name: str) -> Callable[..., Any]:
    for module in PLACES[name]:
        try:
            return getattr(importlib.import_module(module), name)
        except (ModuleNotFoundError, AttributeError):
            continue
    raise SystemExit(f"no module of {PLACES[name]} has {name}: add its place to PLACES")


if __name__ == "__main__":
    main(sys.argv[1:])
