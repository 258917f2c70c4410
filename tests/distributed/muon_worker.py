"""Several processes train a tiny model with Muon, and save it; `test_muon.py` starts them.

Three data ranks come first, and two tensor ranks, or two data ranks, load what they have saved.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from dit.config import DdpConfig, OptimizerConfig, OptimizerKind, RunConfig, Sharding
from dit.distributed.process_groups import start_processes
from dit.train.checkpoint.state_dict import load_checkpoint
from tests.distributed.shares_worker import TENSOR, built, different, furthest, saved
from tests.learning import tiny_run, train


def config(sharding: str, **model: object) -> RunConfig:
    """A run whose second and fifth updates are by rows, and all others by matrices."""
    muon = OptimizerConfig(kind=OptimizerKind.MUON, muon_period=3)
    run = replace(tiny_run(**model), optimizer=muon)
    return replace(run, ddp=DdpConfig(sharding=Sharding(sharding)))


def save(folder: Path) -> dict[str, list[float]]:
    """Losses and norms of steps 4 to 6, after a save at step 3."""
    rest = {}
    for sharding in Sharding:
        model = built(config(sharding))
        train(model, config(sharding), 1, 3)
        saved(folder, sharding, model, config(sharding))
        rest[sharding.value] = train(model, config(sharding), 4, 6)
    return rest


def load(folder: Path, **model: object) -> dict[str, object]:
    """What a load and a save change, and how far the next steps are from those that saved it."""
    rest = json.loads((folder / "save.json").read_text())
    found: dict[str, object] = {}
    for sharding in Sharding:
        (place,) = (folder / sharding / "checkpoints").glob("step_*")
        here = config(sharding, **model)
        again = built(here)
        load_checkpoint(place, again, config=here)
        second = saved(folder, f"{sharding}-again-{len(model)}", again, here)
        found[sharding.value] = {
            "different": different(place, second),
            "furthest": furthest(train(again, here, 4, 6), rest[sharding.value]),
        }
    return found


def main(folder: Path, name: str) -> None:
    model = TENSOR if name == "load_tensor" else {}
    start_processes(seed=1, model=tiny_run(**model).model)
    result = save(folder) if name == "save" else load(folder, **model)
    if dist.get_rank() == 0:
        (folder / f"{name}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
