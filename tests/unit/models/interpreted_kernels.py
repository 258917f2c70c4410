"""The fused kernels against their plain forms, on a CPU by Triton's interpreter.

`test_fused_kernels` runs these tests in a process of their own, since Triton chooses the
interpreter when it is imported:

    TRITON_INTERPRET=1 pytest tests/unit/models/interpreted_kernels.py
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes  # type: ignore[attr-defined]
from torch.utils._python_dispatch import TorchDispatchMode

from dit.config import Recompute
from dit.lora.adapter import adapter_key, dropped
from dit.models.attention.kernels import attend_by_runs
from dit.models.dit.model import DiT
from dit.models.kernels import (
    across_heads,
    adapter_dropout,
    gated_norm,
    restored_rows,
    rotated_heads,
)
from dit.models.kernels.gated_norm import RowChunks
from dit.models.kernels.row_gradient import offer_of, taken
from dit.models.kernels.traffic import OPERATOR_BYTES
from dit.models.layers import packed_attention, per_sample
from dit.models.stacks.frozen_blocks import ByteRows, restored
from dit.train.model_and_optimizer import randomise
from tests import fused_kernels
from tests.fused_kernels import (
    CALLS,
    LEVEL_ROWS,
    ROWS,
    AcrossCall,
    AdaLNCall,
    HeadsCall,
    assert_exact,
    errors,
)
from tests.packs import random_pack, tiny_model
from tests.toy_networks import NETWORKS, level_rows, toy_model, toy_pack

assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
import triton.language as tl  # noqa: E402  # not before its interpreter is chosen
from triton.runtime import interpreter  # noqa: E402

BF16, FP32 = torch.bfloat16, torch.float32
MOST = 1.1
"""Error over that of the plain form, which rounds more often; a tenth is for chance."""
HEADS = {
    "dit_xl": ((5, 16, 72), (72,)),
    "two groups of heads": ((3, 20, 8), (8,)),
    "with a feed-forward": ((4, 3, 12), (12, 7)),
    "one token": ((1, 2, 8), (8,)),
    "no token": ((0, 2, 8), (8,)),
}
ACROSS = {
    "wan": ((5,), (40, 128)),
    "part of a group of heads": ((4,), (3, 12)),
    "one token": ((1,), (2, 8)),
    "no token": ((0,), (2, 8)),
    "text": ((6, 3), (20, 8)),
    "text and image": ((4, 1, 3), (3, 12)),
    "no token beside text": ((0, 2), (2, 8)),
}
ANGLES = ("of tokens", "of heads", "of tokens, twisted", "of heads, twisted")


@pytest.fixture(autouse=True)
def rounding(monkeypatch):
    """Like a GPU, to the nearest number: the interpreter cuts bfloat16 off, which errs twice."""

    def cast(self, source, kind):
        if source.dtype.scalar != tl.float32 or kind.scalar != tl.bfloat16:
            return real(self, source, kind)
        rounded = torch.from_numpy(source.data.copy()).bfloat16().view(torch.int16)
        return interpreter.TensorHandle(rounded.numpy().view(np.uint16), tl.bfloat16)

    real = interpreter.InterpreterBuilder.cast_impl
    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", cast)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """So that a program has several tokens."""
    monkeypatch.setattr(rotated_heads, "PROGRAMS", 2)
    monkeypatch.setattr(across_heads, "PROGRAMS", 2)


@pytest.mark.parametrize(
    ("call", "rows"),
    [
        *product(("branch", "add", "add_and_branch"), ROWS),
        ("modulate", "given frames"),  # otherwise as `branch`
    ],
)
def test_adaln_is_that_of_torch(rows, call):
    call = AdaLNCall.of(call, ROWS[rows], 72, tokens=FP32, levels=FP32)
    assert_exact(call.results(fused=True), call.results(dtype=torch.float64))


@pytest.mark.parametrize("call", ["branch", "add_and_branch"])
def test_adaln_after_rmsnorm_is_that_of_torch(call):
    call = AdaLNCall.of(call, ROWS["given frames"], 72, tokens=FP32, levels=FP32, rms=True)
    assert_exact(call.results(fused=True), call.results(dtype=torch.float64))


def test_width_of_dit_xl():
    call = AdaLNCall.of("add_and_branch", [2] * 3 + [0] * 4, 1152, tokens=FP32, levels=FP32)
    assert_exact(call.results(fused=True), call.results(dtype=torch.float64))


@pytest.mark.parametrize("levels", [BF16, FP32])
@pytest.mark.parametrize("call", CALLS)
def test_adaln_in_bfloat16_errs_no_more_than_torch(call, levels):
    call = AdaLNCall.of(call, ROWS["given frames"], 72, tokens=BF16, levels=levels)
    exact = call.results(dtype=torch.float64)
    for mine, plain, size in errors(call.results(fused=True), call.results(), exact):
        assert mine <= MOST * plain + 1e-6 * size


@pytest.mark.parametrize("shape", HEADS.values(), ids=HEADS)
def test_queries_and_keys_are_those_of_torch(shape):
    call = HeadsCall.of(shape[0], others=shape[1], dtype=FP32)
    assert_exact(call.results(fused=True), call.exact())


def test_queries_and_keys_in_bfloat16_err_no_more_than_torch():
    call = HeadsCall.of((40, 3, 72), others=(72,), dtype=BF16)
    for mine, plain, size in errors(call.results(fused=True), call.results(), call.exact()):
        assert mine <= MOST * plain + 1e-6 * size


@pytest.mark.parametrize("shape", ACROSS.values(), ids=ACROSS)
def test_norm_across_heads_is_that_of_torch(shape):
    call = AcrossCall.of(*shape, dtype=FP32)
    assert_exact(call.results(fused=True), call.exact())


class _Written(torch.autograd.Function):
    """Values as they are; their gradient is written to the place that was offered with them."""

    made: list[torch.Tensor] = []  # noqa: RUF012  # kept, so that no other has their memory

    @staticmethod
    def forward(ctx: Any, v_THK: torch.Tensor) -> torch.Tensor:
        ctx.place = offer_of(v_THK)
        ctx.save_for_backward(v_THK)
        return v_THK.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        to_v_THK = taken(ctx.saved_tensors[0], ctx.place).copy_(gradients[0])
        _Written.made.append(to_v_THK)
        return to_v_THK


@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice"])
@pytest.mark.parametrize("kind", ["per head", "with a feed-forward", "across heads"])
def test_the_gradient_of_values_stays_where_it_was_written(monkeypatch, kind, times):
    """Unless it is only a part of their gradient: then both are added up elsewhere."""
    _Written.made.clear()

    def written(*of, **how):
        *both, v, gate = (*real(*of, **how), None)[:4]
        each = [_Written.apply(v) for _ in range(times)]
        return (*both, sum(each) / times, *([] if gate is None else [gate]))

    if kind == "across heads":
        call, name = AcrossCall.of((5,), (20, 8), dtype=FP32), "fused_across_heads"
    else:
        others = (8,) if kind == "per head" else (8, 5)
        call, name = HeadsCall.of((5, 20, 8), others=others, dtype=FP32), "fused_parts"
    real = getattr(fused_kernels, name)
    monkeypatch.setattr(fused_kernels, name, written)
    found = call.results(fused=True)
    assert_exact(found, call.exact())
    (row,) = (x for x in found[3:] if x.dim() == 3 and x.shape[-1] > 8)
    places = [x.untyped_storage().data_ptr() for x in _Written.made]
    assert (row.untyped_storage().data_ptr() in places) == (times == 1)


@pytest.mark.parametrize("angles", ANGLES)
def test_rotations_after_a_norm_across_heads_are_exact(angles):
    """Of both forms, also by angles that each head or half of a head has of its own."""
    call = AcrossCall.of((5,), (20, 12), dtype=FP32, angles=angles)
    for fused in (True, False):
        assert_exact(call.results(fused=fused), call.exact())


@pytest.mark.parametrize("shape", [((40,), (3, 72)), ((40, 9), (3, 72))])
def test_norm_across_heads_in_bfloat16_errs_no_more_than_torch(shape):
    call = AcrossCall.of(*shape, dtype=BF16)
    for mine, plain, size in errors(call.results(fused=True), call.results(), call.exact()):
        assert mine <= MOST * plain + 1e-6 * size


@pytest.mark.parametrize("lengths", [(5,), (4, 3, 2)])
def test_tensor_ranks_that_share_heads_agree_with_one_that_has_all(lengths, tmp_path):
    whole = AcrossCall.of(lengths, (4, 12), dtype=FP32)
    start_processes(_share_of_rank, (whole, tmp_path), nprocs=2, start_method="fork")
    ranks = [torch.load(tmp_path / str(rank)) for rank in range(2)]
    # Heads are the second axis of tokens, and the only one of weights.
    joined = [
        torch.cat(parts, dim=min(parts[0].dim() - 1, 1)) for parts in zip(*ranks, strict=True)
    ]
    assert_exact(joined, whole.exact())


def _share_of_rank(rank: int, whole: AcrossCall, folder: Path) -> None:
    """What one rank of two makes of its heads."""
    torch.set_num_threads(1)  # a fork has no other threads
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    part = replace(
        whole,
        rows=tuple(x.chunk(2, dim=1)[rank] for x in whole.rows),
        scales=tuple(x.chunk(2)[rank] for x in whole.scales),
        to_out=tuple(x.chunk(2, dim=1)[rank] for x in whole.to_out),
    )
    results = part.results(fused=True, group=dist.group.WORLD)
    torch.save([x.detach() for x in results], folder / str(rank))


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("rate", [0.05, 0.5])
def test_dropout_has_the_bits_of_torch(rate, dtype, monkeypatch):
    """Also for a part of the channels, places beyond 16 bits, zeros and what is not finite."""
    rng = torch.Generator().manual_seed(3)
    x_TI, to_out_TI = (torch.randn(37, 1030, generator=rng).to(dtype) for _ in range(2))
    x_TI[3, :3] = torch.tensor([0.0, -0.0, torch.inf])
    x_TI.requires_grad_()
    place_T = torch.randint(0, 2**31 - 1, (37,), generator=rng)
    where = {"rate": rate, "key": adapter_key(7, "a"), "place_T": place_T, "first": 5 * 1030}
    bits = {BF16: torch.int16, FP32: torch.int32}[dtype]
    monkeypatch.setattr(per_sample, "kernels_run_on", lambda device: True)
    each = []
    for fused in (True, False):
        other_TI, out_TI = dropped(x_TI, **where, fused_kernels=fused)
        (gradient_TI,) = torch.autograd.grad(out_TI, x_TI, to_out_TI, retain_graph=True)
        (sum_TI,) = torch.autograd.grad([other_TI * 3, out_TI], x_TI, [to_out_TI, to_out_TI])
        each.append([x.detach().view(bits) for x in (out_TI, gradient_TI, sum_TI)])
    for mine, plain in zip(*each, strict=True):
        assert torch.equal(mine, plain)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_restored_matrices_have_the_bits_of_torch(dtype, monkeypatch):
    """Of every number of 8 bits, by every factor, whether rows begin side by side or apart."""
    monkeypatch.setattr(per_sample, "kernels_run_on", lambda device: True)
    exponent_O = torch.arange(127 - 100, 127 + 101, 8, dtype=torch.uint8)
    narrow_OI = torch.arange(256, dtype=torch.uint8).repeat(len(exponent_O), 3)[:, 7:]
    rows = ByteRows(narrow_OI.shape[1], fused_kernels=True)
    bytes_OB = torch.zeros(rows.shape(narrow_OI.shape), dtype=torch.uint8)
    bytes_OB[:, : rows.width], bytes_OB[:, rows.width] = narrow_OI, exponent_O
    given = narrow_OI.view(torch.float8_e4m3fn), exponent_O.view(torch.float8_e8m0fnu), dtype
    plain = restored(*given)
    bits = {BF16: torch.int16, FP32: torch.int32}[dtype]
    for mine in (restored(*given, fused_kernels=True), rows.unpack(bytes_OB, dtype)):
        assert torch.equal(mine.isnan(), plain.isnan()) and plain.isnan().any()
        some = ~plain.isnan()
        assert torch.equal(mine[some].view(bits), plain[some].view(bits))


class _Operators(TorchDispatchMode):
    """Counts calls of our operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "dit":
            self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def _numbers(network, batch, level_M):
    """Prediction, gradients by name, and calls of our operators."""
    network.train().zero_grad()
    with _Operators() as operators:
        out_TC = network(batch.latent_TC, level_M, batch)
        (out_TC * batch.latent_TC).sum().backward()
    return {"": out_TC.detach()} | {
        name: p.grad.clone() for name, p in network.named_parameters()
    }, operators.calls


def _assert_same(network, plain_network, batch, level_M, monkeypatch):
    """What both networks give, and the calls of the first."""
    for one in (network, plain_network):
        randomise(one, seed=3)
    plain, calls = _numbers(plain_network, batch, level_M)
    assert not calls
    monkeypatch.setattr(per_sample, "kernels_run_on", lambda device: True)
    fused, calls = _numbers(network, batch, level_M)
    for name, number in plain.items():
        assert (fused[name] - number).norm() <= 1e-5 * number.norm() + 1e-7, name
    return fused, calls


def test_the_dit_gives_the_same_predictions_and_gradients(groups, monkeypatch):
    model = tiny_model(num_layers=1, hidden_size=48, num_attention_heads=2)
    batch = random_pack([(1, 2, 3), (3, 2, 2)], [3, 4], model=model)
    levels = torch.tensor([0.3, -0.2])
    networks = DiT(model, groups), DiT(replace(model, fused_kernels=False), groups)
    fused, calls = _assert_same(*networks, batch, levels, monkeypatch)
    each = model.num_layers
    assert calls == {
        "gated_norm": 4 * each + 1,
        "gated_norm_backward": 4 * each + 1,
        "rotated_heads": each,
        "rotated_heads_backward": each,
    }
    # Recomputed layers take the same kernels, bit for bit.
    again = DiT(replace(model, recompute_granularity=Recompute.FULL), groups)
    randomise(again, seed=3)
    recomputed, calls = _numbers(again, batch, levels)
    assert calls["gated_norm"] == 8 * each + 1
    assert all(torch.equal(recomputed[name], number) for name, number in fused.items())
    _, calls = _numbers(networks[1], batch, levels)
    assert not calls


@pytest.mark.parametrize("name", ["dit", "cross"])
def test_attention_gets_the_place_for_the_gradient_of_values(groups, monkeypatch, name):
    """With those that the network's self-attention computes in one process."""
    seen = []

    def attend(q, k, v, spans):
        seen.append((spans.lengths == spans.key_lengths, offer_of(v) is not None))
        return attend_by_runs(q, k, v, spans)

    monkeypatch.setattr(packed_attention, "attention_for", lambda *of: attend)
    monkeypatch.setattr(per_sample, "kernels_run_on", lambda device: True)
    if name == "dit":
        model = tiny_model(num_layers=1)
        batch = random_pack([(1, 2, 3), (3, 2, 2)], [3, 4], model=model)
        network, levels = DiT(model, groups), torch.tensor([0.3, -0.2])
    else:
        model = toy_model(name)
        batch = toy_pack(model, [(1, 2, 2), (3, 1, 2)], [3, 2])
        network = NETWORKS[name](model, groups)
        levels = level_rows(torch.tensor([0.3, -0.2]), batch)
    randomise(network, seed=3)
    network(batch.latent_TC, levels, batch)
    assert (True, True) in seen and (True, False) not in seen


@pytest.mark.parametrize("name", ["joint", "cross"])
def test_other_kinds_of_layers_give_the_same(groups, monkeypatch, name):
    model = toy_model(name)
    batch = toy_pack(model, [(1, 2, 2), (3, 1, 2)], [3, 2])
    levels = level_rows(torch.tensor([0.3, -0.2]), batch)
    networks = [NETWORKS[name](m, groups) for m in (model, replace(model, fused_kernels=False))]
    _, calls = _assert_same(*networks, batch, levels, monkeypatch)
    assert calls["gated_norm"] and calls["gated_norm"] == calls["gated_norm_backward"]
    assert bool(calls["rotated_heads"]) == (name != "cross")
    if name == "cross":  # queries and keys, of tokens and of text
        each = model.num_layers
        assert calls["across_heads"] == 4 * each
        assert calls["across_heads_sums"] == 8 * each and calls["across_heads_backward"] == 3 * each


@pytest.fixture
def moved(monkeypatch):
    """Bytes of loads and stores so far, in a list of one."""
    total = [0]

    def load(places, mask, other, dtype):
        total[0] += int(mask.sum()) * np.dtype(dtype).itemsize
        return real.load(places, mask, other, dtype)

    def store(places, values, mask):
        total[0] += int(mask.sum()) * values.itemsize
        return real.store(places, values, mask)

    real = interpreter._interpreter
    monkeypatch.setattr(interpreter, "_interpreter", SimpleNamespace(load=load, store=store))
    return total


def _check_traffic(moved, operator, arguments, *, beside=0):
    """`beside` is what torch moves inside of the operator."""
    moved[0] = 0
    out = operator(*arguments)
    name = f"dit::{operator._name}"
    assert OPERATOR_BYTES[name](*arguments) == moved[0] + beside
    return out


@pytest.mark.parametrize("levels", [BF16, FP32])
@pytest.mark.parametrize("steps", ["add", "norm", "add and norm"])
def test_traffic_of_adaln_is_what_its_kernels_move(moved, steps, levels):
    rows = [0] * 40 + [1] * 30  # so that each of four slots has tokens
    # Of a width whose last columns are a tile of their own on the way back.
    call = AdaLNCall.of("add_and_branch", rows, 1100, tokens=BF16, levels=levels)
    h, y, gate, scale, shift = (x if len(x) == len(rows) else x[:2] for x in call.inputs.values())
    (to_sum, to_x), chunks = call.to_out, RowChunks.of(call.level_row_T, 2)
    if steps == "add":
        scale = shift = to_x = None
    if steps == "norm":
        y = gate = to_sum = None
    places = chunks.order_T, chunks.slots_S3
    made = _check_traffic(moved, gated_norm.gated_norm, (h, y, gate, scale, shift, *places))
    h, stats = (None, None) if scale is None else (h, made[-1])
    arguments = (to_x, to_sum, h, y, gate, scale, stats, *places, chunks.rows_N2)
    _check_traffic(moved, gated_norm.gated_norm_backward, arguments)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_traffic_of_queries_and_keys_is_what_their_kernels_move(moved, dtype):
    call = HeadsCall.of((5, 20, 12), others=(12, 5), dtype=dtype)
    inputs = (call.x_THX, *call.weights_K, call.angle_TK.cos(), call.angle_TK.sin(), 1e-6)
    _check_traffic(moved, rotated_heads.rotated_heads, inputs)
    to_q, to_k, *to_others = call.to_out
    # torch copies the others, adds parts of two programs for two groups of heads, and rounds.
    copied = 2 * sum(x.numel() * x.element_size() for x in to_others)
    added = (2 * 2 + 1) * 24 * 4 + (24 * (4 + 2) if dtype is BF16 else 0)
    place = 24, torch.empty_like(call.x_THX)
    arguments = (to_q, to_k, to_others, *place, *inputs)
    _check_traffic(moved, rotated_heads.rotated_heads_backward, arguments, beside=copied + added)


@pytest.mark.parametrize("angles", [*ANGLES, None])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_traffic_of_a_norm_across_heads_is_what_its_kernels_move(moved, dtype, angles):
    call = AcrossCall.of((5,), (20, 12), dtype=dtype, angles=angles or "")
    (x_THX,), (q, *_), (weight, _) = call.rows, call.to_out, call.scales
    x_THK = x_THX[..., :12]
    for other in (None, q):
        squares = _check_traffic(moved, across_heads.across_heads_sums, (x_THK, other))
    how = (*(call.angles if angles and call.angles else (None, None)), call.twisted, 240, 1e-6)
    _check_traffic(moved, across_heads.across_heads, (x_THK, weight, squares.abs(), *how))
    *to_out, other = call.to_out
    # torch copies values, adds parts of two programs, twice, and rounds.
    copied = 2 * other.numel() * other.element_size()
    added = 2 * ((2 + 1) * 240 * 4 + (240 * (4 + 2) if dtype is BF16 else 0))
    to_x = [other], 24, torch.empty_like(x_THX)
    arguments = (to_out, *to_x, x_THX, [weight] * 2, *[squares.abs().repeat(2)] * 2, *how)
    operator = across_heads.across_heads_backward
    _check_traffic(moved, operator, arguments, beside=copied + added)


def test_traffic_of_dropout_is_what_its_kernel_moves(moved):
    x_TI = torch.ones(9, 1030, dtype=BF16)
    arguments = (x_TI, torch.arange(9), 0.1, adapter_key(7, "a"), 0)
    _check_traffic(moved, adapter_dropout.adapter_dropout, arguments)
    _check_traffic(moved, adapter_dropout.adapter_dropout_add, (x_TI.clone(), *arguments))
    check = {"test_utils": ("test_schema", "test_faketensor")}
    torch.library.opcheck(adapter_dropout.adapter_dropout, arguments, **check)


def test_traffic_of_restored_matrices_is_a_byte_a_number_and_what_is_written(moved):
    bytes_OB = torch.zeros(40, 1100, dtype=torch.uint8)
    arguments = (bytes_OB[:, :1030], bytes_OB[:, 1030], BF16)
    _check_traffic(moved, restored_rows.restored_rows, arguments)
    assert moved[0] == 40 * (1030 * 3 + 3)  # exponents once for each tile of columns
    check = {"test_utils": ("test_schema", "test_faketensor")}
    torch.library.opcheck(restored_rows.restored_rows, arguments, **check)


def test_operators_say_what_they_give():
    """Their fake forms have the shapes of the real ones, and no argument is returned.

    None is changed, either, but for the gradient that its operator completes.
    """
    check = {"test_utils": ("test_schema", "test_faketensor")}
    call = AdaLNCall.of("add_and_branch", ROWS["given frames"], 24, tokens=BF16, levels=FP32)
    h, y, *rows = call.inputs.values()
    chunks = RowChunks.of(call.level_row_T, LEVEL_ROWS)
    places = chunks.order_T, chunks.slots_S3
    for gated, norm in ((True, True), (True, False), (False, True)):
        given = (y, rows[0]) if gated else (None, None)
        inputs = (h, *given, *(rows[1:] if norm else (None, None)), *places)
        torch.library.opcheck(gated_norm.gated_norm, inputs, **check)
        stats = gated_norm.gated_norm(*inputs)[-1] if norm else None
        to_x, scale = (call.to_out[0], rows[1]) if norm else (None, None)
        kept = (to_x, call.to_out[1], h if norm else None, *given, scale, stats)
        arguments = (*kept, *places, chunks.rows_N2)
        torch.library.opcheck(gated_norm.gated_norm_backward, arguments, **check)
    heads = HeadsCall.of((3, 2, 8), others=(8, 3), dtype=BF16)
    inputs = (heads.x_THX, *heads.weights_K, heads.angle_TK.cos(), heads.angle_TK.sin(), 1e-6)
    torch.library.opcheck(rotated_heads.rotated_heads, inputs, **check)
    to_q, to_k, *to_others = heads.to_out
    arguments = (to_q, to_k, to_others, 16, torch.zeros_like(heads.x_THX), *inputs)
    torch.library.opcheck(rotated_heads.rotated_heads_backward, arguments, **check)
    across = AcrossCall.of((3,), (2, 8), dtype=BF16, angles="of heads, twisted")
    (x_THX,), (*to_out, other), squares_T = across.rows, across.to_out, torch.ones(3)
    for b in (None, to_out[0]):
        torch.library.opcheck(across_heads.across_heads_sums, (x_THX[..., :8], b), **check)
    how = (*(across.angles or ()), True, 16, 1e-6)
    inputs = (x_THX[..., :8], across.scales[0], squares_T, *how)
    torch.library.opcheck(across_heads.across_heads, inputs, **check)
    sums = [squares_T.repeat(2)] * 2
    place = 16, torch.zeros_like(x_THX)
    arguments = (to_out, [other], *place, x_THX, [*across.scales], *sums, *how)
    torch.library.opcheck(across_heads.across_heads_backward, arguments, **check)
