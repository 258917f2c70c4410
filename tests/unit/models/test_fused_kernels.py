"""Fused kernels where there is no GPU: interpreted, compiled for one, and left alone."""

from __future__ import annotations

import os
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

from dit.config import ModelConfig
from dit.models.kernels import (
    across_heads,
    adapter_dropout,
    gated_norm,
    restored_rows,
    rotated_heads,
)
from dit.models.kernels.gated_norm import CHUNK, RowChunks, slots_of
from dit.models.layers import per_sample
from dit.models.layers.per_sample import PerSample
from dit.models.registry import families, named_model
from tests.fused_kernels import CALLS, LEVEL_ROWS, ROWS, AcrossCall, AdaLNCall, HeadsCall
from tests.launching import ROOT, run_cold

INTERPRETED = Path(__file__).with_name("interpreted_kernels.py")
ACROSS_HEADS = ("wan", "ltx")
"""Families whose norms of queries and keys are across heads, and whose modulations are tables."""
SHAPES = {"dit_xl": (1152, 16), "cosmos_7b": (4096, 32)}  # width and heads
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
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

    def binaries(self, capability: int = 90) -> list[tuple[str, Any]]:
        """Name and what Triton compiles of each kernel, as the launch would specialise it."""
        found: dict[str, tuple[str, Any]] = {}
        for kernel, args, kwargs in self.made:
            options = {name: kwargs[name] for name in OPTIONS if name in kwargs}
            constants = {name: kwargs[name] for name in kwargs if name not in OPTIONS}
            given = dict(zip(kernel.arg_names, args, strict=False)) | constants
            key = f"{kernel.__name__} {[_kind(x) for x in args]} {constants} {options}"
            if key not in found:
                made = _compiled(kernel, given, set(constants), options, capability)
                found[key] = kernel.__name__, made
        return list(found.values())


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def _compiled(
    kernel: Any,
    given: dict[str, Any],
    constants: set[str],
    options: dict[str, int],
    capability: int,
) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants |= {name for name, value in given.items() if value is None}
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        value = given[name]
        kind = _kind(value)
        signature[name] = "constexpr" if name in constants else kind
        if name in constants:
            continue
        if isinstance(value, Tensor) or (kind == "i32" and value and value % 16 == 0):
            attributes[place,] = [["tt.divisibility", 16]]
    values = {name: given[name] for name in constants}
    source = ASTSource(kernel, signature, values, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@pytest.fixture
def launches(monkeypatch, tmp_path) -> Launches:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    every = Launches(None)
    for operators in (gated_norm, rotated_heads, across_heads, adapter_dropout, restored_rows):
        kernels = Launches(operators._kernels())
        kernels.made = every.made
        monkeypatch.setattr(operators, "_kernels", lambda kernels=kernels: kernels)
    return every


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_kernel_compiles_for_hopper(launches, shape):
    """Those that a layer and a head launch, down to PTX, which needs no GPU."""
    width, heads = shape
    bf16 = torch.bfloat16
    for name in CALLS:
        AdaLNCall.of(name, [0, 0, 1], width, tokens=bf16, levels=bf16).results(fused=True)
    after = {"tokens": bf16, "levels": bf16, "rms": True}
    AdaLNCall.of("add_and_branch", [0, 0, 1], width, **after).results(fused=True)
    head_width = width // heads
    HeadsCall.of((2, heads, head_width), others=(head_width,), dtype=bf16).results(fused=True)
    for lengths in ((2,), (2, 3)):
        AcrossCall.of(lengths, (heads, head_width), dtype=bf16).results(fused=True)
    x_TI = torch.zeros(2, width, dtype=bf16)
    adapter_dropout.adapter_dropout(x_TI, torch.arange(2), 0.1, 2**61 + 1, 0)
    adapter_dropout.adapter_dropout_add(x_TI, x_TI, torch.arange(2), 0.1, 2**61 + 1, 0)
    rows = torch.zeros(2, width + 16, dtype=torch.uint8)
    restored_rows.restored_rows(rows[:, :width], rows[:, width], bf16)
    found = launches.binaries()
    names = [name for name, _ in found]
    # Of adaLN with and without gate and norm, with no gradient from beside the norm, and after
    # RMSNorm.
    assert Counter(names) == {
        "gated_norm_forward": 4,
        "gated_norm_backward": 5,
        "gated_norm_add_row_parts": 1,
        "rotated_heads_forward": 1,
        "rotated_heads_backward": 1,
        # Of squares and of products; with rotation and without.
        "across_heads_sums": 2,
        "across_heads_forward": 2,
        "across_heads_backward": 2,
        "adapter_dropout_masked": 2,
        "restored_rows": 1,
    }
    for name, made in found:
        ptx = made.asm["ptx"]
        assert f".visible .entry {name}(" in ptx and ".target sm_90" in ptx
        # Sums in an order of chance would not resume bit for bit.
        assert not re.search(r"\b(atom|red)\.", ptx), name
        # Two numbers at once, though the strides of gradients are not known.
        assert name != "rotated_heads_backward" or "ld.global.b16" not in ptx
        # The next tokens are loaded while some are computed, where registers suffice.
        pipelined = name == "gated_norm_forward" or (name == "gated_norm_backward" and width < 2049)
        assert ("cp.async" in ptx) == pipelined, name


MOST_SPILLED = 24  # bytes of a thread; 16 but for Triton 3.7 on sm_100
LEAST_THREADS = 768  # of a multiprocessor at once, which has room for 65536 registers
ARCHITECTURES = tuple(map(int, os.environ.get("ARCHITECTURES", "90").split()))
"""Those of A100 and B200, 80 and 100, are compiled by hand: ARCHITECTURES="80 90 100"."""


def heads_of(model: ModelConfig) -> tuple[int, int]:
    """Their number and width."""
    return model.num_attention_heads, model.hidden_size // model.num_attention_heads


def _launch_named_sizes() -> None:
    """What a layer of each named size launches with most tensors, in the types it has there."""
    bf16 = torch.bfloat16
    named = [named_model(name) for family in families() for name in family.sizes]
    for width, exact in sorted({(m.hidden_size, m.family in ACROSS_HEADS) for m in named}):
        levels = torch.float32 if exact else bf16
        call = AdaLNCall.of("add_and_branch", [0, 1], width, tokens=bf16, levels=levels)
        call.results(fused=True)
    # More heads are more programs of the same kernel.
    most = rotated_heads.HEADS
    heads = set(map(heads_of, named))
    for number, width in sorted({(min(number, most), width) for number, width in heads}):
        HeadsCall.of((2, number, width), others=(width,), dtype=bf16).results(fused=True)
    for number, width in sorted({heads_of(m) for m in named if m.family in ACROSS_HEADS}):
        for lengths, angles in (((2,), ""), ((2,), "of heads, twisted"), ((2, 3), "")):
            call = AcrossCall.of(lengths, (number, width), dtype=bf16, angles=angles)
            call.results(fused=True)


def _holds_sums_or_is_wide(launch: tuple[Any, tuple[Any, ...], dict[str, Any]]) -> bool:
    """Backward kernels, and forward ones of the widest tokens: others need fewer registers."""
    kernel, _, sizes = launch
    if kernel.__name__.endswith("_forward"):
        return sizes.get("D") == 5120 or 128 in (sizes.get("X", 0) // 3, 2 * sizes.get("HALF", 0))
    return kernel.__name__.endswith("_backward")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_no_kernel_spills_much_at_a_named_size(launches, capability, tmp_path):
    """Registers that do not suffice cost more than the kernel's own traffic; few threads, too."""
    _launch_named_sizes()
    launches.made[:] = filter(_holds_sums_or_is_wide, launches.made)
    spilled, worst, threads = {}, 0, {}
    for number, (name, made) in enumerate(launches.binaries(capability)):
        registers, spill = _registers(made.asm["cubin"], tmp_path / "kernel.cubin")
        warps = made.metadata.num_warps
        key, worst = f"{name} {number}", max(worst, spill)
        threads[key] = 65536 // (32 * warps * -(-registers // 8) * 8) * 32 * warps
        if spill > MOST_SPILLED:
            spilled[key] = spill
    figure = f"Triton {triton.__version__}, sm_{capability}: at most {worst} bytes spilled a thread"
    print(figure)  # noqa: T201
    assert not spilled
    assert min(threads.values()) >= LEAST_THREADS, threads


def _registers(cubin: bytes, path: Path) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack, where those lie that do not fit."""
    path.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    said = subprocess.check_output([tool, "--dump-resource-usage", path], text=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found, said
    return int(found[1]), int(found[2])


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
    on_meta_T = torch.zeros(3, dtype=torch.int64, device="meta")
    assert PerSample.of(on_meta_T, fused_kernels=True).fused
    level_row_T = torch.zeros(3, dtype=torch.int64)
    assert not PerSample.of(level_row_T, fused_kernels=True).fused
    monkeypatch.setattr(per_sample, "kernels_run_on", lambda device: True)
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
