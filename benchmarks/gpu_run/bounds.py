"""What this device reaches at most: products, copies, each kernel of attention, fused kernels."""

# T tokens, N level rows, H heads, K head width, D model width

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from measuring.memory_traffic import OperationCounter
from measuring.steps import call_seconds
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
from gpu_run.parts import Part
from gpu_run.schedule import Outcome

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


class MeasuredBound(NamedTuple):
    """A row of a table: the work of a call, in units times seconds, and a call on new operands."""

    name: str
    unit: str
    work: float
    make: Callable[[], Call]


def bounds(part: Part, *, size: str, **_: Any) -> Outcome:
    """Work a second by name; where it cannot be measured, the error."""
    rows = _TABLES[part.name](**_SIZES[size])
    return {"found": {f"{one.name}, {one.unit}": _rate(one) for one in rows}}


def _rate(bound: MeasuredBound) -> float | str:
    try:
        return bound.work / call_seconds([bound.make() for _ in range(_SETS)], device())
    except Exception as error:  # noqa: BLE001  # the other rows are worth having
        return f"{type(error).__name__}: {error}"


def _ceilings(
    *, tokens: int, square: int, copied: int, products: dict[str, int], **_: Any
) -> Iterator[MeasuredBound]:
    yield MeasuredBound("copy, read and written", "TB/s", 2 * copied / 1e12, partial(_copy, copied))
    shapes = {"square": (square, square, square)}
    for name, width in products.items():
        for outputs in (3 * width, 4 * width):
            shapes[f"{name}: {tokens} x {width} x {outputs}"] = (tokens, width, outputs)
    for name, (T, n, m) in shapes.items():
        yield MeasuredBound(
            f"product, {name}", "TFLOP/s", 2 * T * n * m / 1e12, partial(_product, T, n, m)
        )


def _copy(size: int) -> Call:
    source = torch.ones(size, dtype=torch.uint8, device=device())
    return partial(torch.empty_like(source).copy_, source)


def _product(rows: int, inputs: int, outputs: int) -> Call:
    """The forward pass of a linear layer."""
    return partial(torch.nn.functional.linear, _random(rows, inputs), _random(outputs, inputs))


def _attention(
    *, tokens: int, heads: int, lengths: Sequence[int], **_: Any
) -> Iterator[MeasuredBound]:
    """Both passes apart, counted as MFU counts them: backward twice forward."""
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
                make = partial(_Passes.of_attention, ATTEND[backend], call)
                yield from _both(name, "TFLOP/s", (work, 2 * work), make)


def _fused(*, tokens: int, fused: Sequence[tuple[int, int]], **_: Any) -> Iterator[MeasuredBound]:
    kinds = {
        "gated norm": _gated_norm,
        "norm and rotation of heads": _rotated_heads,
        "norm across heads and rotation": _across_heads,
    }
    for width, head in fused:
        for name, kind in kinds.items():
            moved = kind(tokens, width, head, torch.device("meta")).moved()
            make = partial(kind, tokens, width, head, device())
            yield from _both(f"{name}, width {width}", "GB/s", [n / 1e9 for n in moved], make)
        drop = partial(_dropout, tokens, width)
        work = OPERATOR_BYTES["dit::adapter_dropout"](*drop(torch.device("meta")).args) / 1e9
        yield MeasuredBound(f"dropout of adapters, width {width}", "GB/s", work, drop)


def _dropout(tokens: int, width: int, where: torch.device | None = None) -> partial[Tensor]:
    place_T = torch.arange(tokens, device=where or device())
    return partial(adapter_dropout, _random(tokens, width, where=where), place_T, 0.1, 1, 0)


def _gated_norm(tokens: int, width: int, _head: int, where: torch.device) -> _Passes:
    """Residual, gate, norm, scale and shift between two branches of a layer: [T, D] and [N, D]."""
    level_row_T = torch.arange(_LEVELS, device=where).repeat_interleave(tokens // _LEVELS)
    chunks = RowChunks.of(level_row_T, rows=_LEVELS)

    def function(h: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor) -> Any:
        return gated_norm.add_and_modulate(
            h, y, gate_ND=gate, scale_ND=scale, shift_ND=shift, chunks=chunks
        )

    shapes = [(tokens, width)] * 2 + [(_LEVELS, width)] * 3
    return _Passes(function, [_random(*shape, where=where) for shape in shapes])


def _rotated_heads(tokens: int, width: int, head: int, where: torch.device) -> _Passes:
    """Queries and keys of an attention that normalises each head: x [T, H, 3 * K], weights [K]."""
    cos_TK, sin_TK = (_random(tokens, head, where=where) for _ in range(2))

    def function(x: Tensor, *weights: Tensor) -> Any:
        angles = cos_TK, sin_TK
        return rotated_heads.queries_and_keys(x, weights, angles, eps=1e-6, others=(head,))  # type: ignore[arg-type]

    shapes = (tokens, width // head, 3 * head), (head,), (head,)
    return _Passes(function, [_random(*shape, where=where) for shape in shapes])


def _across_heads(tokens: int, width: int, head: int, where: torch.device) -> _Passes:
    """Those of an attention that normalises all heads together: x [T, H, 3 * K], weights [D]."""
    angles = _random(tokens, head, where=where), _random(tokens, head, where=where)
    how = across_heads.Across(eps=1e-6, numbers=width, summed=lambda sums: sums)

    def function(x: Tensor, *weights: Tensor) -> Any:
        row = across_heads.NormedRow(x_THX=x, parts=2, widths=(head,))
        return across_heads.normalised([row], weights, angles, how)

    shapes = (tokens, width // head, 3 * head), (width,), (width,)
    return _Passes(function, [_random(*shape, where=where) for shape in shapes])


class _Passes:
    """A function and its gradient, on one set of operands."""

    def __init__(self, function: Any, inputs: Sequence[Tensor]):
        self.function, self.leaves = function, [x.requires_grad_() for x in inputs]

    @classmethod
    def of_attention(cls, attend: Any, call: AttentionCall) -> _Passes:
        return cls(lambda *qkv: (attend(*qkv, call.spans),), call.inputs()[:3])

    def ready(self) -> _Passes:
        self.forward()
        self.gradients = [torch.ones_like(one) for one in self.outputs]
        return self

    def forward(self) -> None:
        self.outputs: tuple[Tensor, ...] = self.function(*self.leaves)

    def backward(self) -> None:
        torch.autograd.grad(self.outputs, self.leaves, self.gradients, retain_graph=True)

    def moved(self) -> list[int]:
        """Bytes of memory traffic of both passes, of tensors without values."""
        self.ready()
        counters = [OperationCounter(OPERATOR_BYTES) for _ in range(2)]
        for counter, one_pass in zip(counters, (self.forward, self.backward), strict=True):
            with counter:
                one_pass()
        return [counter.bytes.total() for counter in counters]


def _both(
    name: str, unit: str, work: Sequence[float], make: Callable[[], _Passes]
) -> Iterator[MeasuredBound]:
    for title, amount in zip(("forward", "backward"), work, strict=True):
        yield MeasuredBound(
            f"{name}, {title}", unit, amount, lambda pass_=title: getattr(make().ready(), pass_)
        )


def _random(*shape: int, where: torch.device | None = None) -> Tensor:
    dtype = torch.bfloat16 if device().type == "cuda" else torch.float32
    return torch.randn(*shape, device=where or device()).to(dtype)


_TABLES = {"ceilings": _ceilings, "attention": _attention, "fused": _fused}
"""By the name of a part."""
