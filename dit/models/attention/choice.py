"""The attention calls of a run: which kernels work for them, and how fast the kernels are.

1. attention_calls   the calls for one pack on one rank, from the specification of the layers
2. fault             tries a kernel by a small call; the error if it does not work on this machine
3. milliseconds      time of all calls for a pack, forward and backward, with one kernel
   first_working     the likely fastest kernel that works, without timing
"""

# T query tokens, H heads, K head width, X any width

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from dit.config import AttentionBackend, ContextComm, ModelConfig
from dit.models.attention.fit import AttentionCase, fitting
from dit.models.attention.kernels import ATTEND
from dit.models.attention.spans import Attend, Spans
from dit.models.layer_spec import RowKind
from dit.models.registry import network_spec
from dit.parsing import cause

BUDGET_S = 1.0
"""Seconds for timing all kernels, without the first call of each, which compiles or plans it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCall:
    """The sizes of an attention call for a pack on one rank, and the number of its layers."""

    spans: Spans
    heads: int
    width: int  # of a head
    layers: int

    def inputs(self) -> tuple[Tensor, ...]:
        """(queries, keys, values, gradient of the output), random numbers in bfloat16.

        Queries and gradient are [T, H, K], keys and values [S, H, K]. Values are a slice of a wider
        matrix, as in the layers, because some kernels copy such a slice first.
        """
        spans, width = self.spans, self.width
        keys = spans.key_starts[-1] + spans.key_lengths[-1]
        drawn = torch.Generator(spans.device).manual_seed(0)  # the run's own is not touched
        shapes = ((spans.total, width), (keys, width), (keys, 2 * width), (spans.total, width))
        q, k, kv, gradient = (
            torch.randn(rows, self.heads, X, generator=drawn, device=spans.device).bfloat16()
            for rows, X in shapes
        )
        return q, k, kv[..., width:], gradient


def attention_calls(
    model: ModelConfig, samples: Sequence[tuple[int, int]], *, device: torch.device
) -> list[AttentionCall]:
    """The attention calls of the network on a pack of `samples`; equal calls are counted as one.

    Each sample is (number of latent tokens, number of text tokens). Ring attention over context
    ranks (`model.cp_comm_type=p2p`) is left out.
    """
    network = network_spec(model)
    texts = [max(0, text) for text in network.text([text for _, text in samples])]
    latents = network.filled([tokens for tokens, _ in samples])
    shares, ranks = model.context_parallel_size, model.tensor_model_parallel_size
    found: Counter[tuple[RowKind, RowKind, int, int]] = Counter()
    for stack in network.stacks:
        for shape in stack.layer.attentions:
            found[shape.queries, shape.keys, shape.width, shape.times] += stack.count
    calls = []
    for (queries, keys, width, times), layers in found.items():
        among_tokens = bool(keys & RowKind.LATENTS)
        if among_tokens and shares > 1 and model.cp_comm_type is ContextComm.P2P:
            continue
        by_heads = among_tokens and model.cp_comm_type is ContextComm.A2A
        rows = [
            (_rows(queries, n, m, times), _rows(keys, n, m, times))
            for n, m in zip(latents, texts, strict=True)
        ]
        spans = _side_by_side(rows, parts=1 if by_heads else shares, device=device)
        if spans.lengths:  # without texts there is nothing to attend to
            heads = model.num_attention_heads // ranks // (shares if by_heads else 1)
            width //= model.num_attention_heads
            calls.append(AttentionCall(spans=spans, heads=heads, width=width, layers=layers))
    return calls


def _rows(kind: RowKind, tokens: int, text: int, times: int) -> int:
    if kind == RowKind.SAMPLES:
        return times
    return tokens * bool(kind & RowKind.LATENTS) + text * bool(kind & RowKind.TEXT)


def _side_by_side(rows: Sequence[tuple[int, int]], *, parts: int, device: torch.device) -> Spans:
    """Spans of concatenated samples, given (number of queries, number of keys) of each in `rows`.

    This rank has 1 / `parts` of the queries of each sample, and all of its keys.
    """
    queries, keys, at, key_at = [], [], 0, 0
    for number, key_number in rows:
        mine = -(-number // parts)
        queries.append((at, mine))
        keys.append((key_at, key_number))
        at, key_at = at + mine, key_at + key_number
    return Spans.of(queries, keys, total=at, device=device)


def _passes(attend: Attend, call: AttentionCall) -> Callable[[], None]:
    q, k, v, gradient = call.inputs()
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def passes() -> None:
        torch.autograd.grad(attend(q, k, v, call.spans), leaves, gradient)

    return passes


@cache
def fault(backend: AttentionBackend, width: int, device: torch.device) -> str:
    """The error of a small trial call of the kernel `backend` on `device`; "" if it works.

    `width` is the head width. A package that was built for another torch raises errors of several
    types, at its import or its first call.
    """
    spans = _side_by_side([(128, 128), (152, 152)], parts=1, device=device)
    call = AttentionCall(spans=spans, heads=2, width=width, layers=1)
    try:
        _passes(ATTEND[backend], call)()
    except Exception as error:  # noqa: BLE001
        return cause(error)
    return ""


def milliseconds(
    backend: AttentionBackend, calls: Sequence[AttentionCall], *, budget_s: float
) -> float:
    """Milliseconds of all `calls` in all their layers, forward and backward, with `backend`.

    Timing takes about `budget_s` seconds; each call is timed at least once. The first call of each,
    which compiles or plans the kernel, is not counted.
    """
    total = 0.0
    for call in calls:
        passes = _passes(ATTEND[backend], call)
        passes()
        once = _seconds(passes, 1, call.spans.device)
        times = max(1, min(100, int(budget_s / len(calls) / once)))
        total += 1e3 * _seconds(passes, times, call.spans.device) * call.layers
    return total


def _seconds(passes: Callable[[], None], times: int, device: torch.device) -> float:
    """Mean seconds of one call of `passes`, over `times` calls."""
    _wait(device)
    began = time.perf_counter()
    for _ in range(times):
        passes()
    _wait(device)
    return (time.perf_counter() - began) / times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def attention_for(backend: AttentionBackend, q_THK: Tensor) -> Attend:
    """The attention function of `backend`; for `auto`, of the likely fastest kernel that works.

    Queries on the device `meta` always get the function for `auto`.
    """
    if backend is AttentionBackend.AUTO or q_THK.is_meta:
        backend = first_working(
            q_THK.device,
            q_THK.dtype,
            q_THK.shape[-1],
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
    return ATTEND[backend]


@cache
def first_working(
    device: torch.device, dtype: torch.dtype, width: int, *, deterministic: bool
) -> AttentionBackend:
    """The likely fastest kernel that works on `device`, found by trying kernels in order.

    `dtype` and head width `width` are those of the queries. The last kernel, torch's SDPA, needs no
    trial. Warns about each kernel whose trial fails although `fit.py` allows it.
    """
    half = dtype in (torch.float16, torch.bfloat16)
    if device.type == "meta" and half:
        # Tensors on `meta` serve to count and check a GPU's operations, so they use its kernel.
        return AttentionBackend.FLASH_2
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    case = AttentionCase(
        capability=capability, head_width=width, half=half, deterministic=deterministic
    )
    *tried, last = fitting(case)
    for backend in tried:
        if not (why := fault(backend, width, device)):
            return backend
        warnings.warn(
            f"attention is computed without {backend}, because a trial of it failed on this"
            f" machine: {why}. Install its package again, or set model.attention_backend to"
            " another kernel",
            stacklevel=2,
        )
    return last
