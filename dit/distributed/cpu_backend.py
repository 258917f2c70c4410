"""Megatron-Core on a machine without CUDA. Where CUDA is present, nothing here has an effect.

1. `torch.cuda` calls that Megatron-Core makes unconditionally answer for the CPU.
2. A TorchFunctionMode rewrites `device="cuda"`, `.cuda()` and `tensor.type()`.
3. The random-number tracker keeps torch's CPU generator.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_CUDA_NAMES = {"cuda", "cuda:0"}


class _OnCpu(TorchFunctionMode):
    """Rewrites every request for CUDA to the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if str(kwargs.get("device")) in _CUDA_NAMES:
            kwargs = {**kwargs, "device": _CPU}
        result = func(*args, **kwargs)
        # Megatron-Core sorts parameters by this name and does not know "torch.FloatTensor".
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def _get_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_state(new_state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(new_state)


@cache
def run_megatron_on_cpu() -> None:
    """Makes Megatron-Core usable in this process without CUDA; does nothing where CUDA is."""
    if torch.cuda.is_available():
        return
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_stream = lambda *_: None  # type: ignore[assignment, return-value]
    torch.cuda.get_rng_state = _get_state
    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    _OnCpu().__enter__()

    import megatron.core.tensor_parallel.random as random

    random._get_cuda_rng_state = _get_state
    random._set_cuda_rng_state = _set_state
