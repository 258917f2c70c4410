"""Measures the highest rates of this device: products, copies, attention and fused kernels."""

# T tokens, N level rows, H heads, K head width, D model width

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dit.distributed.process_groups import device
from dit.models.attention.choice import AttentionCall
from dit.models.attention.fit import AttentionCase, fitting
from dit.models.attention.kernels import ATTEND
from dit.models.attention.spans import Spans
from dit.models.kernels import across_heads, gated_norm, rotated_heads
from dit.models.kernels.adapter_dropout import adapter_dropout
from dit.models.kernels.gated_norm import RowChunks
from dit.models.kernels.traffic import OPERATOR_BYTES
from measuring.memory_traffic import OperationCounter
from measuring.steps import call_seconds

_SETS = 2  # of operands, in turns, so that no call finds its own in a cache
_LEVELS = 32
_SIZES: dict[str, dict[str, Any]] = {
    "full": {
        **{"tokens": 32768, "square": 8192, "copied": 4 << 30, "heads": 16},
        "products": {"xl": 1152, "7b": 4096},
        "lengths": (1024, 4096, 32768),
        "fused": ((1152, 72), (4096, 128), (5120, 128)),  # width of a model and of a head
    },
    "tiny": {
        **{"tokens": 256, "square": 256, "copied": 1 << 22, "heads": 2},
        "products": {"xl": 48},
        "lengths": (64, 256),
        "fused": ((144, 72),),
    },
}
_HEAD_WIDTHS = (72, 128)  # of DiT-XL, and of most others
Call = Callable[[], object]
Bound = tuple[str, str, float, Callable[[], Call]]
"""(name, unit, work of a call, function that prepares a call on new operands). The rate in `unit`
is the work over the seconds of a call."""


def bounds(
    table: str, *, size: str, report: Callable[[dict[str, float | str]], None]
) -> dict[str, float | str]:
    """Measures each bound in `table`, a key of TABLES; returns rates by "name, unit".

    If a bound cannot be measured, its value is the text of the error. `size` is a key of `_SIZES`.
    `report` is called with a dict of one such line as soon as it is measured.
    """
    found: dict[str, float | str] = {}
    for name, unit, work, make in TABLES[table](**_SIZES[size]):
        try:
            rate = work / call_seconds([make() for _ in range(_SETS)], device())
        except Exception as error:  # noqa: BLE001  # the other lines are worth having
            rate = f"{type(error).__name__}: {error}"
        report(line := {f"{name}, {unit}": rate})
        found |= line
    return found


def _ceilings(
    *, tokens: int, square: int, copied: int, products: dict[str, int], **_: Any
) -> Iterator[Bound]:
    yield "copy, read and written", "TB/s", 2 * copied / 1e12, partial(_copy, copied)
    shapes = {"square": (square, square, square)}
    for name, width in products.items():
        for outputs in (3 * width, 4 * width):
            shapes[f"{name}: {tokens} x {width} x {outputs}"] = (tokens, width, outputs)
    for name, (T, n, m) in shapes.items():
        yield f"product, {name}", "TFLOP/s", 2 * T * n * m / 1e12, partial(_product, T, n, m)


def _copy(size: int) -> Call:
    source = torch.ones(size, dtype=torch.uint8, device=device())
    return partial(torch.empty_like(source).copy_, source)


def _product(rows: int, inputs: int, outputs: int) -> Call:
    return partial(torch.nn.functional.linear, _random(rows, inputs), _random(outputs, inputs))


def _attention(*, tokens: int, heads: int, lengths: Sequence[int], **_: Any) -> Iterator[Bound]:
    """Yields the bounds of attention kernels by head width and sample length, forward and backward.

    FLOPs are counted as for MFU: backward has twice those of forward.
    """
    half = device().type == "cuda"
    capability = torch.cuda.get_device_capability() if half else None
    for width in _HEAD_WIDTHS:
        for length in lengths:
            case = AttentionCase(capability=capability, head_width=width, half=half)
            rows = [(start, length) for start in range(0, tokens, length)]
            spans = Spans.of(rows, rows, total=tokens, device=device())
            call = AttentionCall(spans=spans, heads=heads, width=width, layers=1)
            work = 4 * tokens * length * heads * width / 1e12
            for backend in fitting(case):
                name = f"{backend}: heads of {width}, samples of {length:,}"
                make = partial(_attention_passes, backend, call)
                yield from _both(name, "TFLOP/s", (work, 2 * work), make)


def _attention_passes(backend: Any, call: AttentionCall) -> _Passes:
    return _Passes(lambda q, k, v: (ATTEND[backend](q, k, v, call.spans),), call.inputs()[:3])


def _fused(*, tokens: int, fused: Sequence[tuple[int, int]], **_: Any) -> Iterator[Bound]:
    kinds = {
        "gated norm": _gated_norm,
        "norm and rotation of heads": partial(_heads, _rotated),
        "norm across heads and rotation": partial(_heads, _across),
    }
    for width, head in fused:
        for name, kind in kinds.items():
            moved = kind(tokens, width, head, torch.device("meta")).moved()
            make = partial(kind, tokens, width, head, device())
            yield from _both(f"{name}, width {width}", "GB/s", [n / 1e9 for n in moved], make)
        drop = partial(_dropout, tokens, width)
        work = OPERATOR_BYTES["dit::adapter_dropout"](*drop(torch.device("meta")).args) / 1e9
        yield f"dropout of adapters, width {width}", "GB/s", work, drop


def _dropout(tokens: int, width: int, where: torch.device | None = None) -> partial[Tensor]:
    place_T = torch.arange(tokens, device=where or device())
    return partial(adapter_dropout, _random(tokens, width, where=where), place_T, 0.1, 1, 0)


def _gated_norm(tokens: int, width: int, _head: int, where: torch.device) -> _Passes:
    """The fused residual, gate, norm, scale and shift between two branches of a layer.

    Its inputs are two tensors [T, D] and three tensors [N, D], for T tokens and N noise levels.
    """
    level_row_T = torch.arange(_LEVELS, device=where).repeat_interleave(tokens // _LEVELS)
    chunks = RowChunks.of(level_row_T, rows=_LEVELS)

    def function(h: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor) -> Any:
        levels: Any = {"gate_ND": gate, "scale_ND": scale, "shift_ND": shift}
        return gated_norm.add_and_modulate(h, y, **levels, chunks=chunks)

    shapes = [(tokens, width)] * 2 + [(_LEVELS, width)] * 3
    return _Passes(function, [_random(*shape, where=where) for shape in shapes])


def _heads(kind: Any, tokens: int, width: int, head: int, where: torch.device) -> _Passes:
    """Normalisation and rotation of the queries and keys in a tensor [T, H, 3 * K].

    `kind` (`_rotated` or `_across`) returns the function that computes them and the size of its
    weight.
    """
    angles = _random(tokens, head, where=where), _random(tokens, head, where=where)
    function, weight = kind(width, head, angles)
    shapes = (tokens, width // head, 3 * head), (weight,), (weight,)
    return _Passes(function, [_random(*shape, where=where) for shape in shapes])


def _rotated(_width: int, head: int, angles: Any) -> tuple[Any, int]:
    """Returns (function, K): it normalises each head of K numbers by itself and rotates it.

    K is also the size of the function's weight.
    """
    return lambda x, *weights: rotated_heads.queries_and_keys(
        x, weights, angles, eps=1e-6, others=(head,)
    ), head


def _across(width: int, head: int, angles: Any) -> tuple[Any, int]:
    """Returns (function, D): it normalises all heads of a token together and rotates them.

    D is the width of the network, and the size of the function's weight.
    """
    how = across_heads.Across(eps=1e-6, numbers=width, summed=lambda sums: sums)

    def function(x: Tensor, *weights: Tensor) -> Any:
        row = across_heads.NormedRow(x_THX=x, parts=2, widths=(head,))
        return across_heads.normalised([row], weights, angles, how)

    return function, width


class _Passes:
    """A function and its gradient, with fixed operands."""

    def __init__(self, function: Any, inputs: Sequence[Tensor]):
        self.function, self.leaves = function, [x.requires_grad_() for x in inputs]

    def ready(self) -> _Passes:
        self.forward()
        self.gradients = [torch.ones_like(one) for one in self.outputs]
        return self

    def forward(self) -> None:
        self.outputs: tuple[Tensor, ...] = self.function(*self.leaves)

    def backward(self) -> None:
        torch.autograd.grad(self.outputs, self.leaves, self.gradients, retain_graph=True)

    def moved(self) -> list[int]:
        """Bytes of memory traffic, counted without values, as [forward pass, backward pass]."""
        self.ready()
        counters = [OperationCounter(OPERATOR_BYTES) for _ in range(2)]
        for counter, one_pass in zip(counters, (self.forward, self.backward), strict=True):
            with counter:
                one_pass()
        return [counter.bytes.total() for counter in counters]


def _both(
    name: str, unit: str, work: Sequence[float], make: Callable[[], _Passes]
) -> Iterator[Bound]:
    for title, amount in zip(("forward", "backward"), work, strict=True):
        yield f"{name}, {title}", unit, amount, lambda title=title: getattr(make().ready(), title)


def _random(*shape: int, where: torch.device | None = None) -> Tensor:
    dtype = torch.bfloat16 if device().type == "cuda" else torch.float32
    return torch.randn(*shape, device=where or device()).to(dtype)


TABLES = {"ceilings": _ceilings, "attention": _attention, "fused": _fused}
