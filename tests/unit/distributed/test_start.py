"""How processes start: their groups at any number of ranks, back ends, and CUDA's environment."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dit.config import DatasetConfig, DdpConfig, LoraConfig, OptimizerConfig, RunConfig, Sharding
from dit.distributed import cuda_environment, process_groups
from dit.launched import FIVE
from tests.launching import ROOT, run
from tests.learning import tiny_run
from tests.packs import tiny_model

GROUPS = """
import json
from datetime import timedelta
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from dit.distributed.process_groups import make_groups, run_megatron_on_cpu
from dit.launched import FIVE
from dit.models.dit.family import DitConfig

run_megatron_on_cpu()
layouts = {
    "data": {},
    "tensor 8": {"tensor_model_parallel_size": 8},
    "tensor, context, pipeline 2": {
        f"{kind}_parallel_size": 2 for kind in ("tensor_model", "context", "pipeline_model")
    },
}
original, found = dist.new_group, {}
for world in (8, 64, 1024):
    for name, sizes in layouts.items():
        made = []

        def counted(ranks, **options):
            made.append(ranks)
            return original(ranks, **options)

        dist.init_process_group("fake", rank=0, world_size=world)
        dist.new_group = counted
        make_groups(DitConfig(**sizes), timeout=timedelta(seconds=60))
        dist.new_group = original
        dist.destroy_process_group()
        own = [ranks for ranks in made if 0 in ranks]
        found[f"{world} {name}"] = [len(made), len(own), sum(map(len, own))]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_calls_and_members_of_groups_at_any_number_of_ranks():
    """[calls of new_group, groups of rank 0, their members]; the first were 1,023 more at 1,024."""
    done = run([sys.executable, "-c", GROUPS], env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    mixed = "tensor, context, pipeline 2"
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "8 data": [3, 3, 17],
        "8 tensor 8": [4, 4, 25],
        f"8 {mixed}": [22, 8, 25],
        "64 data": [3, 3, 129],
        "64 tensor 8": [26, 5, 89],
        f"64 {mixed}": [148, 11, 151],
        "1024 data": [3, 3, 2049],
        "1024 tensor 8": [266, 5, 1169],
        f"1024 {mixed}": [2068, 11, 2191],
    }


def test_nccl_makes_communicators_when_they_are_used(monkeypatch):
    """With a device it makes one for each group at once, and one for the ranks outside of it."""
    asked = []
    monkeypatch.setattr(
        dist, "init_process_group", lambda *a, **options: asked.append((a, options))
    )
    monkeypatch.setattr(process_groups, "meet", lambda _: "store")
    for name, value in zip(FIVE, ("3", "8", "3", "localhost", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    process_groups._join_group(torch.device("cuda", 3), minute := timedelta(seconds=60), minute)
    (((back_end,), options),) = asked
    assert back_end == "nccl" and "device_id" not in options
    assert (options["rank"], options["world_size"], options["store"]) == (3, 8, "store")


ALONE = """
from datetime import timedelta
import torch
import torch.distributed as dist
from dit.distributed.process_groups import _join_group

original, asked = dist.init_process_group, []

def without_nccl(back_end, *, device_id=None, **options):
    asked.append((back_end, device_id))
    if back_end == "nccl":
        raise dist.DistBackendError("NCCL error: no socket interface found")
    original(back_end, **options)

dist.init_process_group = without_nccl
cuda = torch.device("cuda", 0)
_join_group(cuda, timedelta(seconds=60), timedelta(seconds=60))
assert asked == [("nccl", cuda), ("cpu:gloo,cuda:gloo", None)], asked
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == dist.get_world_size() == 1
"""


def test_one_process_does_without_nccl_where_it_does_not_start():
    done = run([sys.executable, "-c", ALONE], env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    notice = "NCCL does not start (DistBackendError: NCCL error: no socket interface found)"
    assert [line for line in done.stderr.splitlines() if "NCCL" in line] == [
        f"{notice}; this single process uses gloo instead"
    ]


@pytest.fixture
def environment(monkeypatch):
    """Without what the machine has set; nothing that a test sets stays."""
    for name in (*cuda_environment._ALLOCATOR, cuda_environment._QUEUES):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(cuda_environment, "_made", {})
    return monkeypatch


def _run(model: dict | None = None, **groups) -> RunConfig:
    network = tiny_model(tensor_model_parallel_size=2, **(model or {}))
    return RunConfig(model=network, dataset=DatasetConfig(mock=True), **groups)


TENSOR = _run()
SWAPPED = _run({"blocks_to_swap": 1}, lora=LoraConfig(rank=2))
EXPANDABLE, ONE_QUEUE = (
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    "CUDA_DEVICE_MAX_CONNECTIONS=1",
)


@pytest.mark.parametrize(
    ("capability", "config", "own", "made"),
    [
        (9, tiny_run(), {}, [EXPANDABLE]),
        (9, TENSOR, {}, [EXPANDABLE, ONE_QUEUE]),
        (8, TENSOR, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, [EXPANDABLE]),
        (10, TENSOR, {}, [EXPANDABLE]),  # Blackwell needs no order
        (9, TENSOR, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, [ONE_QUEUE]),
        (9, tiny_run(), {"PYTORCH_CUDA_ALLOC_CONF": ""}, []),
        (None, TENSOR, {}, []),
        # Gathers and copies would wait for kernels in the one queue.
        (9, _run(ddp=DdpConfig(sharding=Sharding.WEIGHTS)), {}, [EXPANDABLE]),
        (9, _run({"cpu_offloading_num_layers": 1}), {}, [EXPANDABLE]),
        (9, _run(optimizer=OptimizerConfig(optimizer_cpu_offload=True)), {}, [EXPANDABLE]),
        (9, SWAPPED, {}, [EXPANDABLE]),
        (9, SWAPPED, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, [EXPANDABLE]),
    ],
)
def test_cuda_starts_with_what_the_run_needs_and_the_user_has_not_set(
    environment, capability, config, own, made
):
    environment.setattr(cuda_environment, "_major_capability", lambda: capability)
    for name, value in own.items():
        environment.setenv(name, value)
    before = dict(os.environ)
    for trained in (config, None):  # the recipe calls it, then `start_processes`
        cuda_environment.set_cuda_environment(trained)
        assert cuda_environment.settings_made() == made
    assert os.environ == before | dict(line.split("=") for line in made)


def test_what_would_come_too_late_is_not_set(environment):
    environment.setattr(cuda_environment, "_major_capability", lambda: 9)
    environment.setattr(torch.cuda, "is_initialized", lambda: True)
    cuda_environment.set_cuda_environment(TENSOR)
    assert cuda_environment.settings_made() == []


def _driver(failing: int) -> SimpleNamespace:
    """NVML of a machine with an H100."""

    def find(_index, handle):
        handle._obj.value = 77
        return 0

    def tell(handle, major, minor):
        assert handle.value == 77
        major._obj.value, minor._obj.value = 9, 0
        return 0

    return SimpleNamespace(
        nvmlInit_v2=lambda: failing,
        nvmlDeviceGetHandleByIndex_v2=find,
        nvmlDeviceGetCudaComputeCapability=tell,
    )


@pytest.mark.parametrize(("failing", "found"), [(0, 9), (999, None)])
def test_the_driver_tells_the_capability_without_cuda(monkeypatch, failing, found):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: _driver(failing))
    assert cuda_environment._major_capability() == found
    monkeypatch.setattr(ctypes, "CDLL", _no_library)
    assert cuda_environment._major_capability() is None


def _no_library(name: str) -> None:
    raise OSError(f"{name}: cannot open shared object file")
