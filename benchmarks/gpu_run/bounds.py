"""What this device reaches at most: products, copies, each kernel of attention, fused kernels.

A row is a name, the work of a call and calls on operands of their own, which are made in turns so
that no call finds its operands in a cache.
"""

# T tokens, N level rows, H heads, K head width, D model width

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from dit.models.kernels import gated_norm, rotated_heads
from dit.models.kernels.row_chunks import RowChunks
from dit.models.kernels.traffic import OPERATOR_BYTES
from gpu_run.parts import Part
from gpu_run.schedule import Outcome

_SETS = 2
_TOKENS = {"full": 32768, "tiny": 256}
_SQUARE = {"full": 8192, "tiny": 256}
_COPIED = {"full": 4 << 30, "tiny": 1 << 22}  # bytes
_PRODUCTS = {"full": {"xl": 1152, "7b": 4096}, "tiny": {"xl": 48, "7b": 64}}
_LENGTHS = {"full": (1024, 4096, 32768), "tiny": (64, 256)}
_HEAD_WIDTHS = (72, 128)  # of DiT-XL, and of most others
_HEADS = {"full": 16, "tiny": 2}
_FUSED = {"full": ((1152, 72), (4096, 128), (5120, 128)), "tiny": ((144, 72),)}  # model, head
_LEVELS = 32

Call = Callable[[], object]


class Bound(NamedTuple):
    """One row of a table."""

    name: str
    unit: str
    work: float
    """Of a call, in units times seconds."""
    calls: Callable[[], Sequence[Call]]


def bounds(part: Part, *, size: str, **_: Any) -> Outcome:
    """Work a second by name; where it cannot be measured, the error."""
    return {"found": {f"{one.name}, {one.unit}": _rate(one) for one in _TABLES[part.name](size)}}


def _rate(bound: Bound) -> float | str:
    try:
        return bound.work / call_seconds(bound.calls(), device())
    except Exception as error:  # noqa: BLE001  # the other rows are worth having
        return f"{type(error).__name__}: {error}".splitlines()[0]


def _ceilings(size: str) -> Iterator[Bound]:
    copied, side = _COPIED[size], _SQUARE[size]
    yield Bound(
        "square product", "TFLOP/s", 2 * side**3 / 1e12, lambda: _products(side, side, side)
    )
    yield Bound("copy, read and written", "TB/s", 2 * copied / 1e12, lambda: _copies(copied))
    tokens = _TOKENS[size]
    for name, width in _PRODUCTS[size].items():
        for outputs in (3 * width, 4 * width):
            yield Bound(
                f"{name}: {tokens} x {width} x {outputs}",
                "TFLOP/s",
                2 * tokens * width * outputs / 1e12,
                lambda n=width, m=outputs: _products(tokens, n, m),
            )


def _copies(size: int) -> list[Call]:
    pairs = [torch.ones(2, size, dtype=torch.uint8, device=device()) for _ in range(_SETS)]
    return [lambda pair=pair: pair[0].copy_(pair[1]) for pair in pairs]


def _products(rows: int, inputs: int, outputs: int) -> list[Call]:
    """The forward pass of a linear layer."""
    made = [(_random(rows, inputs), _random(outputs, inputs)) for _ in range(_SETS)]
    return [lambda x=x, w=w: torch.nn.functional.linear(x, w) for x, w in made]


def _attention(size: str) -> Iterator[Bound]:
    """Both passes apart, counted as MFU counts them: backward twice forward."""
    tokens, heads = _TOKENS[size], _HEADS[size]
    for width in _HEAD_WIDTHS:
        for length in _LENGTHS[size]:
            rows = [(start, length) for start in range(0, tokens, length)]
            spans = Spans.of(rows, rows, total=tokens, device=device())
            call = AttentionCall(spans=spans, heads=heads, width=width, layers=1)
            flops = 4 * tokens * length * heads * width / 1e12
            for backend in fitting(_case(width, length)):
                name = f"{backend}: heads of {width}, samples of {length:,}"

                def made(attend: Any = ATTEND[backend], call: AttentionCall = call) -> _Passes:
                    q, k, v, gradient = call.inputs()
                    function = lambda *qkv: (attend(*qkv, call.spans),)  # noqa: E731
                    return _Passes(function, (q, k, v), (gradient,))

                yield from _both(name, "TFLOP/s", (flops, 2 * flops), made)


def _case(width: int, longest: int) -> AttentionCase:
    on_gpu = device().type == "cuda"
    return AttentionCase(
        capability=torch.cuda.get_device_capability(device()) if on_gpu else None,
        head_width=width,
        half=on_gpu,
        longest=longest,
    )


def _fused(size: str) -> Iterator[Bound]:
    tokens = _TOKENS[size]
    kinds = {"gated norm": _gated_norm, "norm and rotation of heads": _rotated_heads}
    for width, head in _FUSED[size]:
        for name, make in kinds.items():

            def made(
                where: torch.device | None = None, make: Any = make, sizes: Any = (width, head)
            ) -> _Passes:
                return make(tokens, *sizes, where or device())

            moved = made(torch.device("meta")).moved()
            yield from _both(f"{name}, width {width}", "GB/s", [n / 1e9 for n in moved], made)


def _gated_norm(tokens: int, width: int, _head: int, where: torch.device) -> _Passes:
    """Residual, gate, norm, scale and shift between two branches of a layer."""
    level_row_T = torch.arange(_LEVELS, device=where).repeat_interleave(tokens // _LEVELS)
    chunks = RowChunks.of(level_row_T, rows=_LEVELS)
    inputs = [_random(tokens, width, where=where) for _ in range(2)]
    inputs += [_random(_LEVELS, width, where=where) for _ in range(3)]

    def function(h: Tensor, y: Tensor, gate: Tensor, scale: Tensor, shift: Tensor) -> Any:
        return gated_norm.add_and_modulate(
            h, y, gate_ND=gate, scale_ND=scale, shift_ND=shift, chunks=chunks
        )

    return _Passes(function, inputs)


def _rotated_heads(tokens: int, width: int, head: int, where: torch.device) -> _Passes:
    """Queries and keys of an attention that normalises each head."""
    angles = _random(tokens, head, where=where), _random(tokens, head, where=where)
    inputs = (
        _random(tokens, width // head, 3 * head, where=where),
        *(_random(head, where=where) for _ in range(2)),
    )

    def function(x: Tensor, weight_q: Tensor, weight_k: Tensor) -> Any:
        weights = weight_q, weight_k
        return rotated_heads.queries_and_keys(x, weights, angles, eps=1e-6, others=(head,))

    return _Passes(function, inputs)


class _Passes:
    """A function and its gradient, on one set of operands."""

    def __init__(self, function: Any, inputs: Sequence[Tensor], gradients: Any = None):
        self.leaves = [x.requires_grad_() for x in inputs]
        self.function, self.gradients = function, gradients
        self.outputs: Any = None

    def forward(self) -> object:
        self.outputs = self.function(*self.leaves)
        return self.outputs

    def backward(self) -> object:
        outputs = self.outputs or self.forward()
        self.gradients = self.gradients or [torch.ones_like(one) for one in outputs]
        return torch.autograd.grad(outputs, self.leaves, self.gradients, retain_graph=True)

    def moved(self) -> list[int]:
        """Bytes of memory traffic of both passes, of tensors without values."""
        found = []
        for one_pass in (self.forward, self.backward):
            with OperationCounter(OPERATOR_BYTES) as counter:
                one_pass()
            found.append(counter.bytes.total())
        return found


def _both(
    name: str, unit: str, work: Sequence[float], make: Callable[[], _Passes]
) -> Iterator[Bound]:
    for title, amount in zip(("forward", "backward"), work, strict=True):

        def calls(title: str = title) -> list[Call]:
            sets = [make() for _ in range(_SETS)]
            return [getattr(one, title) for one in sets]

        yield Bound(f"{name}, {title}", unit, amount, calls)


def _random(*shape: int, where: torch.device | None = None) -> Tensor:
    return torch.randn(*shape, device=where or device()).to(_dtype())


def _dtype() -> torch.dtype:
    return torch.bfloat16 if device().type == "cuda" else torch.float32


_TABLES: dict[str, Callable[[str], Iterator[Bound]]] = {
    "ceilings": _ceilings,
    "attention": _attention,
    "fused": _fused,
}
"""By the name of a part."""
