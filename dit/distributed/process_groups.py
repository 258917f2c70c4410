"""Process groups: made once from the configured sizes, then handed to whoever needs them."""

from __future__ import annotations

import math
import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dit.config import ModelConfig
from dit.distributed.cpu_backend import run_megatron_on_cpu
from dit.distributed.rendezvous import rendezvous_store

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection


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

    NCCL where there is CUDA, gloo elsewhere. Called again, it makes the
    groups of the new layout: a program may open one checkpoint after another.

    Raises:
        TimeoutError: names the ranks that did not come.
    """
    run_megatron_on_cpu()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    target = device()
    if target.type == "cuda":
        torch.cuda.set_device(target)
    # Later than `watching`, which names the process that keeps the others waiting.
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
    """Every group of this layout, as Megatron-Core's parts take them."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    return ProcessGroupCollection.use_mpu_process_groups()
