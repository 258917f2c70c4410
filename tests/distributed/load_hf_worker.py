"""Four processes fill networks from Diffusers folders; `test_load_hf.py` starts them.

On each layout the parameters of every rank are compared with those that it loads of an import.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dit.config import RunConfig
from dit.config_loading import load_config
from dit.convert.diffusers_checkpoint import DiffusersFolder
from dit.convert.import_ import import_weights
from dit.convert.load_hf.start import HfStart, hf_start
from dit.distributed.process_groups import process_groups, start_processes
from dit.models.registry import family_of
from dit.train.checkpoint.state_dict import load_weights
from recipes.runs import dit_debug, for_weights

LAYOUTS = {
    "tp2+sp, dp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2+vpp2, dp2": {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
    },
    "tp2+cp2": {"tensor_model_parallel_size": 2, "context_parallel_size": 2},
    "tp4": {"tensor_model_parallel_size": 4},
    "dp4": {},
}
IN_BF16 = ("tp2+cp2", "dp4")


def config_of(folder: Path, precision: str, layout: dict[str, Any]) -> RunConfig:
    words = [f"model.{key}={value}" for key, value in layout.items()]
    words += [f"model.precision={precision}", f"checkpoint.load_hf={folder}"]
    return load_config(dit_debug(), overrides=[*words, "checkpoint.save=null"], adapt=for_weights)


def different(config: RunConfig, checkpoint: Path) -> tuple[list[str], int]:
    """Parameters that differ on any rank, and how many numbers all ranks have read."""
    start_processes(seed=1, model=config.model)
    groups, virtual = process_groups(), config.model.virtual_stages
    network = family_of(config.model).network()
    stages = list(range(virtual)) if virtual > 1 else [None]
    filled, loaded = ([network(config.model, groups, s) for s in stages] for _ in range(2))
    start, read = hf_start(config), _Counted()
    assert isinstance(start, HfStart)
    for model in filled:
        start.fill(model)
    load_weights(checkpoint, loaded, groups, averaged=False)
    wrong = [
        name
        for ours, theirs in zip(filled, loaded, strict=True)
        for (name, value), (_, other) in zip(
            ours.named_parameters(), theirs.named_parameters(), strict=True
        )
        if not torch.equal(value, other)
    ]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (wrong, read.end()))
    return sorted({name for names, _ in found for name in names}), sum(n for _, n in found)


class _Counted:
    """Counts the numbers that this process reads from now on."""

    def __init__(self) -> None:
        self.count, self.own = 0, DiffusersFolder.read
        read = self.own

        def counting(folder, name, part=None):
            tensor = read(folder, name, part)
            self.count += tensor.numel()
            return tensor

        DiffusersFolder.read = counting

    def end(self) -> int:
        DiffusersFolder.read = self.own
        return self.count


def work(folder: Path) -> None:
    found: dict[str, Any] = {}
    for hf in sorted(folder.glob("*.hf")):
        checkpoint = folder / f"{hf.stem}.ours"
        import_weights(hf, checkpoint)
        for layout, changes in LAYOUTS.items():
            precision = "bf16" if layout in IN_BF16 else "fp32"
            config = config_of(hf, precision, changes)
            found[f"{hf.stem} {layout}"] = different(config, checkpoint)
        start = hf_start(config_of(hf, "fp32", {}))
        assert start is not None
        digests: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(digests, start.origin().to_json())
        assert len(set(digests)) == 1
        found[f"{hf.stem} origin"] = json.loads(digests[0])
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    work(Path(sys.argv[1]))
    dist.destroy_process_group()
