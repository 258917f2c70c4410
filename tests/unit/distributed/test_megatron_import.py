"""Megatron-Core is imported without its warnings, W&B and torch's compiler, and works as ever."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from dit.distributed.megatron_import import compiled_when_called

LEFT_OUT = ("wandb", "torch._dynamo", "torch._inductor.compile_fx")
PROGRAM = f"""
import sys
from dit.console import hide_library_warnings
from dit.distributed.megatron_import import import_megatron
hide_library_warnings()
import torch
compiler = torch.compile
import_megatron()
import dit.train.opening.checks
import megatron.core
print([name for name in {LEFT_OUT!r} if name in sys.modules], torch.compile is compiler)
"""


@pytest.mark.slow
def test_a_start_imports_neither_the_compiler_nor_wandb() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["[] True"], done.stderr
    assert done.stderr == ""


def test_a_function_is_compiled_once_and_at_its_first_call() -> None:
    asked = []

    def compiler(model: Any, **options: Any) -> Any:
        asked.append((model, options))
        return lambda *values: model(*values) + 1

    later = compiled_when_called(compiler)

    @later(dynamic=True)
    def twice(value: int) -> int:
        """Twice the value."""
        return 2 * value

    assert asked == [] and twice.__doc__ == "Twice the value."
    assert (twice(3), twice(4)) == (7, 9) and len(asked) == 1
    assert asked[0][1] == {"dynamic": True}
    assert later(abs)(-3) == 4 and asked[1] == (abs, {}) and len(asked) == 2
