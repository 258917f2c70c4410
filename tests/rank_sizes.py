"""Program of a test: builds a run as configured and prints what each rank holds, as JSON."""

from __future__ import annotations

import json
import sys

import torch.distributed as dist

from dit.config_loading.cli import parse_arguments
from dit.distributed.process_groups import process_groups, start_processes
from recipes.runs import RECIPES


def main() -> None:
    config = parse_arguments(sys.argv[1:], recipes=RECIPES).config
    start_processes(seed=1, model=config.model, limit_s=60)
    from dit.train.model_and_optimizer import build_model_and_optimizer

    model = build_model_and_optimizer(config, process_groups())
    states = [
        tensor
        for inner in model.optimizer.chained_optimizers
        for state in inner.optimizer.state.values()
        for tensor in state.values()
        if hasattr(tensor, "numel") and tensor.numel() > 1
    ]
    here = {
        "parameters": sum(p.numel() for chunk in model.chunks for p in chunk.parameters()),
        "moments": sum(tensor.numel() * tensor.element_size() for tensor in states),
    }
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, here)
    if dist.get_rank() == 0:
        print(json.dumps(found))  # noqa: T201
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
