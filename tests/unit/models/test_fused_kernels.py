"""Fused kernels where there is no GPU: interpreted, compiled for one, and left alone."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from dit.models.kernels import choice, gated_norm, rotated_heads
from dit.models.kernels.row_chunks import CHUNK, RowChunks, slots_of
from dit.models.layers.per_sample import PerSample
from tests.fused_kernels import CALLS, LEVEL_ROWS, ROWS, AdaLNCall, HeadsCall
from tests.launching import ROOT, run_cold

INTERPRETED = Path(__file__).with_name("interpreted_kernels.py")
SHAPES = {"dit_xl": (1152, 16), "cosmos_7b": (4096, 32)}  # width and heads
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
}
OPTIONS = ("num_warps", "maxnreg")


@pytest.mark.slow  # a minute on busy cores, most of it imports
@pytest.mark.timeout(600)
def test_interpreted_kernels_give_the_numbers_of_torch():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(INTERPRETED)]
    done = run_cold(command, env={"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


class Launches:
    """Stands for a module of kernels, and keeps what they would be launched with."""

    def __init__(self, kernels: Any):
        self.kernels = kernels
        self.made: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> dict[Any, Callable[..., None]]:
        kernel, made = getattr(self.kernels, name), self.made

        class _Grids(dict):
            def __missing__(self, grid: Any) -> Callable[..., None]:
                return lambda *args, **kwargs: made.append((kernel, args, kwargs))

        return _Grids()

    def binaries(self) -> list[tuple[str, str]]:
        """Name and PTX of each kernel, as the launch would specialise it."""
        found: dict[str, tuple[str, str]] = {}
        for kernel, args, kwargs in self.made:
            options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
            given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
            key = f"{kernel.__name__} {[_kind(x) for x in args]} {kwargs} {options}"
            if key not in found:
                found[key] = kernel.__name__, _ptx(kernel, given, set(kwargs), options)
        return list(found.values())


def _kind(value: Any) -> str:
    return POINTERS[value.dtype] if isinstance(value, Tensor) else type(value).__name__


def _ptx(kernel: Any, given: dict[str, Any], constants: set[str], options: dict[str, int]) -> str:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants |= {name for name, value in given.items() if value is None}
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        value = given[name]
        kind = POINTERS[value.dtype] if isinstance(value, Tensor) else "i32"
        signature[name] = "constexpr" if name in constants else kind
        if isinstance(value, Tensor):
            attributes[place,] = [["tt.divisibility", 16]]
    values = {name: given[name] for name in constants}
    source = ASTSource(kernel, signature, values, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return made.asm["ptx"]


@pytest.fixture
def launches(monkeypatch, tmp_path) -> Launches:
    from dit.models.kernels import gated_norm_triton, rotated_heads_triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    both = Launches(gated_norm_triton), Launches(rotated_heads_triton)
    both[1].made = both[0].made
    monkeypatch.setattr(gated_norm, "_kernels", lambda: both[0])
    monkeypatch.setattr(rotated_heads, "_kernels", lambda: both[1])
    return both[0]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_kernel_compiles_for_hopper(launches, shape):
    """Those that a layer and a head launch, down to PTX, which needs no GPU."""
    width, heads = shape
    bf16 = torch.bfloat16
    for name in CALLS:
        AdaLNCall.of(name, [0, 0, 1], width, tokens=bf16, levels=bf16).results(fused=True)
    head_width = width // heads
    HeadsCall.of((2, heads, head_width), others=(head_width,), dtype=bf16).results(fused=True)
    found = launches.binaries()
    names = [name for name, _ in found]
    # Of adaLN with and without gate and norm, and with no gradient from beside the norm.
    assert Counter(names) == {
        "gated_norm_forward": 3,
        "gated_norm_backward": 4,
        "gated_norm_add_row_parts": 1,
        "rotated_heads_forward": 1,
        "rotated_heads_backward": 1,
    }
    for name, ptx in found:
        assert f".visible .entry {name}(" in ptx and ".target sm_90" in ptx
        # Sums in an order of chance would not resume bit for bit.
        assert not re.search(r"\b(atom|red)\.", ptx), name


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_chunks_hold_each_token_once_beside_those_of_its_row(rows):
    level_row_T = torch.tensor(rows).long()
    chunks = RowChunks.of(level_row_T, LEVEL_ROWS)
    assert len(chunks.slots_S3) == slots_of(len(rows), LEVEL_ROWS)
    order, seen = chunks.order_T.tolist(), []
    held: dict[int, list[int]] = {row: [] for row in range(LEVEL_ROWS)}
    for slot, (row, begin, end) in enumerate(chunks.slots_S3.tolist()):
        tokens = order[begin:end]
        assert len(tokens) <= CHUNK and all(rows[token] == row for token in tokens)
        seen += tokens
        if tokens:
            held[row].append(slot)
    assert sorted(seen) == list(range(len(rows)))
    for row, (first, count) in enumerate(chunks.rows_N2.tolist()):
        assert held[row] == list(range(first, first + count)) if count else not held[row]


def test_tokens_in_the_order_of_their_rows_stay_in_place():
    level_row_T = torch.arange(5).repeat_interleave(50)
    assert RowChunks.of(level_row_T, 5).order_T.tolist() == list(range(250))


def test_other_devices_take_the_plain_form(monkeypatch):
    for device in ("cpu", "meta"):
        level_row_T = torch.zeros(3, dtype=torch.int64, device=device)
        assert not PerSample.of(level_row_T, fused_kernels=True).fused
    monkeypatch.setattr(choice, "kernels_run_on", lambda device: True)
    assert PerSample.of(level_row_T, fused_kernels=True).fused
    assert not PerSample.of(level_row_T, fused_kernels=False).fused
    assert not PerSample.of(level_row_T, fused_kernels=True, compiled=True).fused


def test_a_machine_without_triton_imports_everything():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import dit.models.layers.per_sample, dit.models.kernels.traffic\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
