"""The start of the processes, and the groups of a layout, which functions take as arguments."""

from __future__ import annotations

import math
import os
import secrets
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from dit.config import ModelConfig
from dit.distributed.cpu_backend import run_megatron_on_cpu

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection


_POLL_S = 0.1
_store: Any = None


def device() -> torch.device:
    """The accelerator of this process, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def world_size() -> int:
    """Processes that the launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Number of this process among them; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def start_processes(*, seed: int, model: ModelConfig, limit_s: float = 600.0) -> None:
    """Joins the process group of the launcher (or one of its own) and prepares Megatron-Core.

    The back end is NCCL where there is CUDA, and gloo elsewhere. A program may open one checkpoint
    after another: a second call makes the groups of the new layout.

    Raises:
        TimeoutError: names the ranks that did not come.
    """
    run_megatron_on_cpu()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    target = device()
    if target.type == "cuda":
        torch.cuda.set_device(target)
    # Longer than the watchdog's, which names the process that keeps the others waiting.
    timeout = timedelta(seconds=limit_s + 60)
    if not dist.is_initialized():
        launched = "RANK" in os.environ
        dist.init_process_group(
            "nccl" if target.type == "cuda" else "gloo",
            store=rendezvous_store(timeout) if launched else None,
            init_method=None if launched else "tcp://127.0.0.1:0",
            rank=rank(),
            world_size=world_size(),
            timeout=timeout,
            device_id=target if target.type == "cuda" else None,
        )
    parallel_state.destroy_model_parallel()
    virtual = model.virtual_stages
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=model.tensor_model_parallel_size,
        pipeline_model_parallel_size=model.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        context_parallel_size=model.context_parallel_size,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=math.ceil(timeout.total_seconds() / 60),
    )
    model_parallel_cuda_manual_seed(seed)


def process_groups() -> ProcessGroupCollection:
    """All groups of this layout, in the form that Megatron-Core takes."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    return ProcessGroupCollection.use_mpu_process_groups()


def rendezvous_store(timeout: timedelta) -> Store:
    """The store of this start of the run, which holds nothing of an earlier start.

    torch.distributed.run keeps one store through its restarts (pytorch issue 135712): a process
    that is faster than the others would find the addresses of their dead predecessors there. Nor
    does counting restarts tell starts apart, for each node's launcher counts its own. So the first
    rank publishes a new random name together with the list of the ranks that have registered under
    it; a rank that has read the name of an earlier start is not on that list, and reads again.

    Raises:
        TimeoutError: names the ranks that did not come.
    """
    global _store
    store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
    name = _open(store, size, timeout) if rank == 0 else _join(store, rank, timeout)
    _store = PrefixStore(name, store)
    return _store


def store_connection() -> PrefixStore:
    """The store of this start over a new connection, for a thread that must not wait for others."""
    assert _store is not None, "call `rendezvous_store` first"
    return _store.clone()


def _open(store: Store, size: int, timeout: timedelta) -> str:
    name = secrets.token_hex(8)
    store.set("rendezvous", name)
    keys = [f"{name}/{rank}" for rank in range(1, size)]
    try:
        store.wait(keys, timeout)
    except DistStoreError as error:
        late = [str(rank) for rank, key in enumerate(keys, 1) if not store.check([key])]
        raise _missing(f"rank {', '.join(late)}", timeout) from error
    store.set(f"{name}/members", b" ".join(store.multi_get(keys)).decode())
    return name


def _join(store: Store, rank: int, timeout: timedelta) -> str:
    me, deadline = secrets.token_hex(8), time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        if store.check(["rendezvous"]):
            name = store.get("rendezvous").decode()
            store.set(f"{name}/{rank}", me)
            members = f"{name}/members"
            if store.check([members]) and me in store.get(members).decode().split():
                return name
        time.sleep(_POLL_S)
    raise _missing("rank 0", timeout)


def _missing(who: str, timeout: timedelta) -> TimeoutError:
    return TimeoutError(
        f"{who} did not come within {timeout.total_seconds():.0f} s"
        " (dist.distributed_timeout_minutes and one more); look at the log of its node, and whether"
        " each node was started with the same --nnodes, --nproc-per-node and --rdzv-endpoint"
    )
