"""Conversion needs memory for some tensors, or for one file, whatever the size of the model."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.families.dit import publish, random_model

SCRIPT = """
import json, resource, sys
from pathlib import Path
import torch.distributed as dist
from dit.convert.export import ExportOptions, export_weights
from dit.convert.import_ import import_weights

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

folder, found = Path(sys.argv[1]), {}
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
for name, size in (("small", 10**9), ("large", 20_000_000)):
    import_weights(folder / name, folder / f"{name}.ours")
    found[f"import {name}"] = peak()
    options = ExportOptions(max_shard_size=size)
    export_weights(folder / f"{name}.ours", folder / f"{name}.back", options)
    found[f"export {name}"] = peak()
print(json.dumps(found))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(tmp_path):
    sizes = {"num_attention_heads": 8, "attention_head_dim": 96, "adaln_lora_dim": 64}
    publish(tmp_path / "small", random_model(num_layers=1))
    publish(tmp_path / "large", random_model(num_layers=8, **sizes), max_shard_size="100MB")
    whole = sum(file.stat().st_size for file in (tmp_path / "large").glob("*.safetensors"))
    assert whole > 250_000_000
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["export large"] - found["export small"] < whole / 3, found
