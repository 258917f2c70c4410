"""What this device reaches at most: matrix products, copies, attention."""

# T tokens, H heads, K head width

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from measuring.steps import measured_flops, median_seconds

from dit.config import AttentionBackend
from dit.distributed.process_groups import device
from dit.models.attention.choice import attention_for
from dit.models.attention.spans import Spans
from gpu_run.parts import Part
from gpu_run.schedule import Outcome

_TOKENS, _SAMPLE = {"full": 32768, "tiny": 256}, {"full": 1024, "tiny": 64}
_COPIED = {"full": 4 << 30, "tiny": 1 << 22}  # bytes
_WIDTHS = {"full": {"xl": (1152, 16), "7b": (4096, 32)}, "tiny": {"xl": (48, 2), "7b": (64, 2)}}


def ceilings(_part: Part, *, size: str, **_: Any) -> Outcome:
    """TFLOP/s and TB/s by name; where one cannot be measured, its error."""
    asked: dict[str, Callable[[], float]] = {
        "square product, TFLOP/s": lambda: measured_flops(device(), _dtype()) / 1e12,
        "copy, TB/s read and written": lambda: _copy(_COPIED[size]) / 1e12,
    }
    tokens = _TOKENS[size]
    for name, (width, heads) in _WIDTHS[size].items():
        for inner in (3 * width, 4 * width):
            title = f"{name}: {tokens} x {width} x {inner}, TFLOP/s"
            asked[title] = lambda n=width, m=inner: _product(tokens, n, m) / 1e12
        title = f"{name}: attention in samples of {_SAMPLE[size]}, forward and backward, TFLOP/s"
        asked[title] = lambda n=width, h=heads: _attention(tokens, _SAMPLE[size], n, h) / 1e12
    return {"found": {name: _or_error(measure) for name, measure in asked.items()}}


def _or_error(measure: Callable[[], float]) -> float | str:
    try:
        return measure()
    except Exception as error:  # noqa: BLE001  # the other ceilings are worth having
        return f"{type(error).__name__}: {error}"


def _dtype() -> torch.dtype:
    return torch.bfloat16 if device().type == "cuda" else torch.float32


def _copy(size: int) -> float:
    """Bytes a second, read and written."""
    source = torch.ones(size, dtype=torch.uint8, device=device())
    target = torch.empty_like(source)
    return 2 * size / median_seconds(lambda: target.copy_(source), device())


def _product(rows: int, inputs: int, outputs: int) -> float:
    """FLOP/s of a linear layer's forward pass."""
    x = torch.randn(rows, inputs, device=device()).to(_dtype())
    weight = torch.randn(outputs, inputs, device=device()).to(_dtype())
    seconds = median_seconds(lambda: torch.nn.functional.linear(x, weight), device())
    return 2 * rows * inputs * outputs / seconds


def _attention(tokens: int, sample: int, width: int, heads: int) -> float:
    """FLOP/s of both passes, counted as MFU counts them: backward twice forward."""
    rows = [(start, sample) for start in range(0, tokens, sample)]
    spans = Spans.of(rows, rows, total=tokens, device=device())
    q, k, v, weight = (
        torch.randn(tokens, heads, width // heads, device=device()).to(_dtype()) for _ in range(4)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    attend = attention_for(AttentionBackend.AUTO, q)

    def passes() -> None:
        torch.autograd.grad(attend(q, k, v, spans), leaves, weight)

    return 3 * 4 * tokens * sample * width / median_seconds(passes, device())
