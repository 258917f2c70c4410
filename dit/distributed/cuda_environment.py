"""Environment variables that CUDA and torch's allocator read once, before CUDA starts.

    PYTORCH_CUDA_ALLOC_CONF       expandable_segments:True; packs differ in length, and segments of
                                  fixed sizes leave gaps between them
    CUDA_DEVICE_MAX_CONNECTIONS   1, in training with tensor parallelism: Megatron-Core starts a
                                  collective and then the product that hides it, and one queue keeps
                                  this order. From sm_100 on this is not needed. It is not set if
                                  copies or gathers should overlap kernels, which one queue prevents

Values that the user has set are kept.
"""

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import byref, c_int, c_void_p

from dit.config import RunConfig, Sharding

_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Two names of the variable of torch's allocator; newer releases prefer the second."""
_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
_NEEDS_NO_ORDER = 10  # major compute capability from which on one queue is not needed
_made: dict[str, str] = {}


def set_cuda_environment(trained: RunConfig | None = None) -> None:
    """Sets the variables for this process and its children, before CUDA starts.

    It does nothing without a GPU, or if CUDA has started. `trained` is the configuration of a
    training run; None for other programs, or if an earlier call had it.
    """
    capability = _major_capability()
    if capability is None or _cuda_has_started():
        return
    if not any(name in os.environ for name in _ALLOCATOR):
        _made[_ALLOCATOR[0]] = "expandable_segments:True"
    ordered = trained is not None and _hides_collectives(trained) and capability < _NEEDS_NO_ORDER
    if ordered and _QUEUES not in os.environ:
        _made[_QUEUES] = "1"
    os.environ |= _made


def _hides_collectives(config: RunConfig) -> bool:
    """Whether the run has tensor parallelism, and no copies or gathers to overlap with kernels."""
    model = config.model
    others = (
        config.ddp.sharding is Sharding.WEIGHTS
        or model.blocks_to_swap
        or model.cpu_offloading_num_layers
        or config.optimizer.optimizer_cpu_offload
    )
    return model.tensor_model_parallel_size > 1 and not others


def settings_made() -> list[str]:
    """Environment variables that `set_cuda_environment` has set, each as NAME=VALUE."""
    return [f"{name}={value}" for name, value in _made.items()]


def _cuda_has_started() -> bool:
    # Looked up, not imported: scripts answer --help without waiting for torch.
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def _major_capability() -> int | None:
    """Major compute capability of the first GPU, or None without a driver.

    It asks the driver, since torch would start CUDA.
    """
    try:
        driver = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle, major, minor = c_void_p(), c_int(), c_int()
    failed = (
        driver.nvmlInit_v2()
        or driver.nvmlDeviceGetHandleByIndex_v2(0, byref(handle))
        or driver.nvmlDeviceGetCudaComputeCapability(handle, byref(major), byref(minor))
    )
    return None if failed else major.value
