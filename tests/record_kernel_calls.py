"""Records the parameters of the functions that packages of attention kernels have.

    pip download --no-deps --pre flash-attn-4==4.0.0b36 transformer-engine==2.20.2
    pip download --no-deps nvidia-cudnn-frontend==1.28.0
    pip download --no-deps nvidia-cudnn-frontend==1.32.0
    python tests/record_kernel_calls.py *.whl

It is run by hand, when a package has a new version. Wheels are read, not imported, so that no GPU
is needed; cuDNN's frontend is compiled, so it is imported, which needs none either.
`tests/unit/models/test_kernel_calls.py` compares our calls with what it writes:
`tests/golden/kernel_calls.json`.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from inspect import Parameter, Signature
from pathlib import Path
from tempfile import TemporaryDirectory
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
IMPORTED = {
    "nvidia_cudnn_frontend": (
        *("pygraph.__init__", "pygraph.tensor", "pygraph.build", "pygraph.execute"),
        *("_compiled_module.backend_graph.sdpa", "_compiled_module.backend_graph.sdpa_backward"),
    )
}
"""Name in the file name of a wheel -> functions of its compiled module `cudnn`."""
_SIGNATURES = """
import inspect, json, sys
from operator import attrgetter
sys.path.insert(0, sys.argv[1])
import cudnn
found = []
for name in sys.argv[2:]:
    function = attrgetter(name)(cudnn)
    try:
        found.append(str(inspect.signature(function)))
    except ValueError:  # compiled: the first line of its text tells
        found.append(function.__doc__.splitlines()[0])
print(json.dumps(found))
"""


def imported_parameters(wheel: Path, names: Sequence[str]) -> dict[str, list[str]]:
    """Of functions of a module that is compiled, as `parameters` of others."""
    with TemporaryDirectory() as folder:
        ZipFile(wheel).extractall(folder)
        words = [sys.executable, "-c", _SIGNATURES, folder, *names]
        texts = json.loads(subprocess.run(words, capture_output=True, check=True, text=True).stdout)
    found = {}
    for name, text in zip(names, texts, strict=True):
        inner, bracket = re.sub(r"\) ->.*|\)$", "", text.partition("(")[2]), 1
        while bracket:  # commas of types
            inner, bracket = re.subn(r"\[[^\[\]]*\]", "", inner)
        parts = [one for one in inner.split(", ") if not one.startswith("**")]
        short = name.removeprefix("_compiled_module.backend_graph.")
        found[short] = [one.partition(":")[0] + "=" * ("=" in one) for one in parts]
    return found


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
    about = {"package": package, "version": version}
    if names := IMPORTED.get(package):
        return {**about, "functions": imported_parameters(wheel, names)}
    file, wanted = FUNCTIONS[package]
    with ZipFile(wheel) as archive:
        found = dict(functions(archive.read(file).decode()))
    return {
        **about,
        "file": file,
        "functions": {name: parameters(found[name]) for name in wanted},
    }


def signatures(name: str) -> dict[str, Signature]:
    """Of the recorded functions of a package, named with its version."""
    (functions,) = (
        one["functions"]
        for one in json.loads(RECORD.read_text())
        if f"{one['package']} {one['version']}" == name
    )
    return {function: _signature(given) for function, given in functions.items()}


def _signature(given: Sequence[str]) -> Signature:
    kind, found = Parameter.POSITIONAL_OR_KEYWORD, []
    for one in given:
        if one == "*":
            kind = Parameter.KEYWORD_ONLY
        else:
            default = None if one.endswith("=") else Parameter.empty
            found.append(Parameter(one.rstrip("="), kind, default=default))
    return Signature(found)


if __name__ == "__main__":
    wheels = sorted(map(Path, sys.argv[1:]), key=lambda wheel: wheel.name)
    RECORD.write_text(json.dumps([recorded(wheel) for wheel in wheels], indent=1) + "\n")
