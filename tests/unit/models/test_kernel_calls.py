"""Each kernel of attention is called with parameters that its package has.

None of the packages is here: their parameters were recorded (`tests/record_kernel_calls.py`), and
the plain definition computes in their place.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.attention as nn_attention
from torch.nn.attention import varlen

from dit.models.attention import kernels
from dit.models.attention.kernels import COUNT_MULTIPLE, Offsets, attend_packed, dot_product
from dit.models.attention.spans import Spans, attend_one_by_one
from tests.plain_kernel import plain_kernel
from tests.record_kernel_calls import RECORD, signatures

CPU = torch.device("cpu")
RECORDED = [f"{one['package']} {one['version']}" for one in json.loads(RECORD.read_text())]
FLASH = [name for name in RECORDED if name.startswith("flash_attn_4")]
ENGINES = [name for name in RECORDED if name.startswith("transformer_engine")]
CUMULATIVE = ("cu_seqlens_q", "cu_seqlens_k"), ("max_seqlen_q", "max_seqlen_k")


def _modules(monkeypatch, **modules: object) -> None:
    for path, names in modules.items():
        outer, _, _ = path.partition("__")
        monkeypatch.setitem(sys.modules, outer, ModuleType(outer))
        inner = ModuleType(path.replace("__", "."))
        vars(inner).update(names)  # type: ignore[arg-type]
        monkeypatch.setitem(sys.modules, inner.__name__, inner)


def _compare(kernel, *, count_multiple: int = 1) -> None:
    """A pack with padding, where queries outnumber keys in one sample and not in the other."""
    spans = Spans.of([(0, 5), (6, 2)], [(0, 3), (4, 7)], total=9, device=CPU)
    generator = torch.Generator().manual_seed(0)
    q, k, kv = (torch.randn(n, 2, K, generator=generator) for n, K in ((9, 8), (12, 8), (12, 16)))
    inputs = [x.requires_grad_() for x in (q, k, kv)]
    found = []
    for attend in (
        lambda *of: attend_packed(*of, kernel=kernel, count_multiple=count_multiple),
        attend_one_by_one,
    ):
        out = attend(q, k, kv[..., 8:], spans)
        real = torch.cat((out[0:5], out[6:8]))
        found.append([real, *torch.autograd.grad(real.square().sum(), inputs)])
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain)


def _offsets(cu, key_cu, longest, longest_key) -> Offsets:
    """What a kernel has been told, without the empty sequences at the end."""
    most, key_most = int(cu.diff().max()), int(key_cu.diff().max())
    assert longest >= most and longest_key >= key_most
    count = int(cu.diff().count_nonzero()) + 1
    assert set(cu[count:].tolist()) <= {int(cu[-1])}
    return Offsets(cu=cu[:count], key_cu=key_cu[:count], longest=most, longest_key=key_most)


@pytest.mark.parametrize("whole", [False, True], ids=["output", "output and sums"])
@pytest.mark.parametrize("name", FLASH)
def test_flash_4(monkeypatch, name, whole):
    signature = signatures(name)["flash_attn_varlen_func"]

    def function(*args, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        assert given.pop("deterministic") is False
        q, k, v = (given.pop(one) for one in "qkv")
        offsets = _offsets(*(given.pop(one) for pair in CUMULATIVE for one in pair))
        assert not given
        out = plain_kernel(q, k, v, offsets)
        return (out, None) if whole else out

    _modules(monkeypatch, flash_attn__cute={"flash_attn_varlen_func": function})
    _compare(kernels.flash_4_kernel)


@pytest.mark.parametrize("name", ENGINES)
def test_transformer_engine(monkeypatch, name):
    made, called = signatures(name).values()

    class Attention:
        def __init__(self, *args, **kwargs):
            made.bind(self, *args, **kwargs)

        def __call__(self, *args, **kwargs):
            given = called.bind(self, *args, **kwargs).arguments
            assert (given["qkv_format"], given["attn_mask_type"]) == ("thd", "padding")
            q, k, v = (given[f"{one}_layer"] for one in ("query", "key", "value"))
            assert all(x.is_contiguous() for x in (q, k, v))
            assert len(given["cu_seqlens_q"]) == len(given["cu_seqlens_kv"]) == COUNT_MULTIPLE + 1
            assert given["max_seqlen_q"] == given["max_seqlen_kv"] == 512
            names = ("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv")
            return plain_kernel(q, k, v, _offsets(*(given[one] for one in names))).flatten(1)

    _modules(monkeypatch, transformer_engine__pytorch={"DotProductAttention": Attention})
    monkeypatch.setattr(os, "environ", {})
    kernels._engine_module.cache_clear()
    _compare(kernels.engine_kernel, count_multiple=COUNT_MULTIPLE)
    kernels._engine_module.cache_clear()
    assert os.environ == {"NVTE_UNFUSED_ATTN": "0"}
    ring = ("cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type")
    dot_product(2, 8, **dict.fromkeys(ring))
    padded = {f"cu_seqlens_{one}_padded" for one in ("q", "kv")} | {"pad_between_seqs"}
    assert padded <= called.parameters.keys()


def test_flash_2_and_3_are_torchs_own_and_take_turns(monkeypatch):
    signature, seen, active = inspect.signature(varlen.varlen_attn), [], [None]

    def function(*args, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        seen.append(active[0])
        names = ("cu_seq_q", "cu_seq_k", "max_q", "max_k")
        offsets = _offsets(*(given.pop(one) for one in names))
        q, k, v = (given.pop(one) for one in ("query", "key", "value"))
        assert not given
        assert not varlen._should_use_cudnn(0)  # in 2.14 it is true on Hopper and Blackwell
        return plain_kernel(q, k, v, offsets)

    class Handle:
        def remove(self):
            active[0] = None

    def register():
        active[0] = "FA3"
        return Handle()

    monkeypatch.setattr(varlen, "varlen_attn", function)
    monkeypatch.setattr(varlen, "_should_use_cudnn", lambda _: True)
    nn_attention.register_flash_attention_impl("FA3", register_fn=register)
    for kernel in (
        kernels.flash_2_kernel,
        kernels.flash_3_kernel,
        kernels.flash_3_kernel,
        kernels.flash_2_kernel,
    ):
        _compare(kernel)
    assert seen == [None, "FA3", "FA3", None]


def test_flash_2_is_flash_attention_on_hopper(monkeypatch):
    """torch 2.14 would take cuDNN there, in both passes; which of its two it calls is seen."""
    called, aten = [], torch.ops.aten

    def forward(q, *_, **__):
        called.append("forward")
        sums, state = torch.zeros(q.shape[1], len(q)), torch.zeros(2, dtype=torch.uint64)
        return q.clone(), sums, state, None, None

    def backward(out, q, k, v, *_, **__):
        called.append("backward")
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92400)
    monkeypatch.setattr(varlen, "_should_use_cudnn", varlen._should_use_cudnn)  # put back later
    monkeypatch.setattr(aten, "_flash_attention_forward", forward)
    monkeypatch.setattr(aten, "_flash_attention_backward", backward)
    q, k, v = (torch.ones(256, 2, 8, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    cu = torch.tensor([0, 256], dtype=torch.int32)
    offsets = Offsets(cu=cu, key_cu=cu, longest=256, longest_key=256)
    kernels.flash_2_kernel(q, k, v, offsets).sum().backward()
    assert called == ["forward", "backward"]
