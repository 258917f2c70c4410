"""Records the parameters of the functions that packages of attention kernels have.

    pip download --no-deps --pre flash-attn-4==4.0.0b36 transformer-engine==2.20.2
    python tests/record_kernel_calls.py *.whl

It is run by hand, when a package has a new version. Wheels are read, not imported, so that no GPU
is needed. `tests/unit/models/test_kernel_calls.py` compares our calls with what it writes:
`tests/golden/kernel_calls.json`.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

RECORD = Path(__file__).parent / "golden" / "kernel_calls.json"
_ENGINE = "transformer_engine/pytorch/attention/dot_product_attention/dot_product_attention.py"
FUNCTIONS = {
    "flash_attn_4": ("flash_attn/cute/interface.py", ("flash_attn_varlen_func",)),
    "transformer_engine": (
        _ENGINE,
        ("DotProductAttention.__init__", "DotProductAttention.forward"),
    ),
}
"""Name in the file name of a wheel -> a file in it, and functions there."""


def parameters(function: ast.FunctionDef) -> list[str]:
    """Names in their order; those with a default end in `=`, and `*` stands before keywords."""
    given = function.args
    assert not (given.vararg or given.kwarg), f"{function.name} takes anything"
    named = [*given.posonlyargs, *given.args]
    required = len(named) - len(given.defaults)
    found = [one.arg + "=" * (i >= required) for i, one in enumerate(named)]
    keywords = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    return [
        *found,
        *["*"] * bool(given.kwonlyargs),
        *(a.arg + "=" * (d is not None) for a, d in keywords),
    ]


def functions(source: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """(name, definition) of functions and methods."""
    for outer in ast.parse(source).body:
        if isinstance(outer, ast.FunctionDef):
            yield outer.name, outer
        elif isinstance(outer, ast.ClassDef):
            for inner in outer.body:
                if isinstance(inner, ast.FunctionDef):
                    yield f"{outer.name}.{inner.name}", inner


def recorded(wheel: Path) -> dict[str, object]:
    """What `tests/golden/kernel_calls.json` has of a wheel."""
    package, version, *_ = wheel.name.split("-")
    file, wanted = FUNCTIONS[package]
    with ZipFile(wheel) as archive:
        found = dict(functions(archive.read(file).decode()))
    return {
        "package": package,
        "version": version,
        "file": file,
        "functions": {name: parameters(found[name]) for name in wanted},
    }


if __name__ == "__main__":
    wheels = sorted(map(Path, sys.argv[1:]), key=lambda wheel: wheel.name)
    RECORD.write_text(json.dumps([recorded(wheel) for wheel in wheels], indent=1) + "\n")
