"""Two processes import, compute on layouts and export again; `test_convert.py` starts them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dit.batch import Problem
from dit.checkpoint_paths import saved_config
from dit.config import ContextComm, ModelConfig
from dit.convert.cli import main
from dit.distributed.model_parallel import split_tokens
from dit.distributed.process_groups import process_groups, start_processes
from dit.models.dit.model import DiT
from dit.train.checkpoint.state_dict import load_weights

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2+sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "cp2": {"context_parallel_size": 2},
    "cp2+ag": {"context_parallel_size": 2, "cp_comm_type": ContextComm.ALL_GATHER},
    "pp2": {"pipeline_model_parallel_size": 2},
}


def worst_difference(checkpoint: Path, model: ModelConfig, case: dict[str, Any]) -> float:
    """Largest difference to what Diffusers computed, on all ranks."""
    start_processes(seed=1, model=model)
    groups = process_groups()
    network = DiT(model, groups).eval()
    load_weights(checkpoint, [network], groups, averaged=False)
    given = case["batch"]
    problem = Problem(
        input_TC=given.latent_TC,
        level_M=case["levels"],
        target_TC=case["expected_TC"],
        weight_N=torch.ones(given.num_samples),
        noise_N=case["levels"],
    )
    share, multiple = network.context.share, model.tensor_model_parallel_size
    batch, mine = split_tokens(given, problem, share=share, multiple=multiple)
    with torch.no_grad():
        if not network.pre_process:
            network.set_input_tensor([_receive()])
        made = network(mine.input_TC, mine.level_M, batch)
        if not network.post_process:
            dist.send(torch.tensor(made.shape), dst=1)
            dist.send(made.contiguous(), dst=1)
            return 0.0
    return float((made - mine.target_TC)[batch.is_real_T].abs().max())


def _receive() -> torch.Tensor:
    shape = torch.empty(3, dtype=torch.int64)
    dist.recv(shape, src=0)
    rows = torch.empty(shape.tolist())
    dist.recv(rows, src=0)
    return rows


def work(folder: Path) -> None:
    found = {}
    for case_file in sorted(folder.glob("*.pt")):
        case, name = torch.load(case_file, weights_only=False), case_file.stem
        checkpoint, hf = folder / f"{name}.ours", folder / f"{name}.hf"
        words = ["--megatron-path", str(checkpoint), "--hf-path"]
        padding = ["--text-pad-to", str(case["text_pad_to"] or "none")]
        assert main(["import", *words, str(hf), *padding]) == 0
        size = ["--max_shard_size", "40kB"]
        assert main(["export", *words, str(folder / f"{name}.back"), *size]) == 0
        base = saved_config(checkpoint).model
        for layout, changes in LAYOUTS.items():
            gap = torch.tensor(worst_difference(checkpoint, replace(base, **changes), case))
            dist.all_reduce(gap, op=dist.ReduceOp.MAX)
            found[f"{name} {layout}"] = gap.item()
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    work(Path(sys.argv[1]))
    dist.destroy_process_group()
