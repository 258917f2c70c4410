"""The import of Megatron-Core without two packages that it imports and no run needs.

1. W&B, if installed: the inference engine logs with it.
2. The compiler of torch: Megatron-Core wraps some fifty functions in `torch.compile`, which imports
   the compiler. Our networks do not call them, so they are compiled at their first call instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial, wraps
from inspect import isfunction
from typing import Any

_WANDB = "wandb"


def import_megatron() -> None:
    """Imports Megatron-Core in about two thirds of the time, unless it is imported already."""
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
    """A form of `compiler` (`torch.compile`) that compiles each function at its first call."""

    def compile_later(model: Any = None, **options: Any) -> Any:
        if model is None:
            return partial(compile_later, **options)
        if not isfunction(model):
            return compiler(model, **options)
        compiled = cache(partial(compiler, model, **options))
        return wraps(model)(lambda *values, **named: compiled()(*values, **named))

    return compile_later
