"""Imports Megatron-Core without two packages that no run needs.

1. W&B, if installed: Megatron-Core's inference engine logs with it.
2. torch's compiler: Megatron-Core wraps some fifty functions in `torch.compile`, which imports it.
   Each is compiled at its first call instead, and this project's networks call none of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial, wraps
from inspect import isfunction
from typing import Any

_WANDB = "wandb"


def import_megatron() -> None:
    """Imports Megatron-Core in about two thirds of the usual time, unless already imported."""
    if "megatron.core" in sys.modules:
        return
    import torch  # late, as Megatron-Core: scripts answer --help without them

    compiler, wandb = torch.compile, sys.modules.get(_WANDB)
    torch.compile = compiled_when_called(compiler)
    if wandb is None:
        sys.modules[_WANDB] = None  # pyright: ignore[reportArgumentType] - importing it now fails
    try:
        import megatron.core  # noqa: F401
    finally:
        torch.compile = compiler
        if wandb is None:
            del sys.modules[_WANDB]


def compiled_when_called(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `compiler` (`torch.compile`) so that it compiles each function at its first call."""

    def compile_later(model: Any = None, **options: Any) -> Any:
        if model is None:
            return partial(compile_later, **options)
        if not isfunction(model):
            return compiler(model, **options)
        compiled = cache(partial(compiler, model, **options))
        return wraps(model)(lambda *values, **named: compiled()(*values, **named))

    return compile_later
