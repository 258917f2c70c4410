"""cuDNN's attention of packs: the graphs that its frontend is given, and what they compute.

Where the frontend is not installed, a stand-in computes what a graph says (`stand_in_cudnn`).
"""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from dit.models.attention import cudnn_graphs, kernels
from dit.models.attention.cudnn_graphs import GraphKey, backward_graph, few_sizes, forward_graph
from dit.models.attention.kernels import attend_packed, cudnn_kernel
from dit.models.attention.spans import Offsets, Spans, attend_one_by_one
from dit.models.kernels.row_gradient import RowGradient, offered
from tests.record_kernel_calls import signatures
from tests.stand_in_cudnn import stand_in

CPU = torch.device("cpu")
RECORDED = ["nvidia_cudnn_frontend 1.28.0", "nvidia_cudnn_frontend 1.32.0"]
WIDTHS = [64, 72, 96, 128, 256]


@pytest.fixture
def graphs(monkeypatch):
    """The keys of all graphs that are built with the stand-in."""
    built, real = [], cudnn_graphs._built.__wrapped__

    def noted(key, device, *, backward):
        built.append((key, backward))
        return real(key, device, backward=backward)

    monkeypatch.setitem(sys.modules, "cudnn", stand_in(signatures(RECORDED[-1])))
    monkeypatch.setattr(cudnn_graphs, "_built", cudnn_graphs.cache(noted))
    monkeypatch.setattr(kernels, "flash_2_kernel", None)
    cudnn_graphs._handle.cache_clear()
    yield built
    cudnn_graphs._handle.cache_clear()


def _pack(lengths, key_lengths, *, padding):
    """Spans of samples with so many tokens of padding behind each."""

    def rows(sizes):
        ends = torch.tensor([size + padding for size in sizes]).cumsum(0).tolist()
        return list(zip((0, *ends[:-1]), sizes, strict=True)), ends[-1]

    (queries, total), (keys, key_total) = rows(lengths), rows(key_lengths)
    return Spans.of(queries, keys, total=total, device=CPU), key_total


def _inputs(total, key_total, *, heads, width, fused):
    """Queries, keys and values, and the tensors that they are parts of."""
    drawn = torch.Generator().manual_seed(total)

    def made(rows, X):
        return torch.randn(rows, heads, X, generator=drawn).bfloat16().requires_grad_()

    if not fused:
        q, k, v = made(total, width), made(key_total, width), made(key_total, width)
        return (q, k, v), (q, k, v)
    if total == key_total:  # as the matrix product of a layer writes them
        row = made(total, 3 * width)
        return row.split(width, dim=-1), (row,)
    q, row = made(total, width), made(key_total, 2 * width)
    return (q, *row.chunk(2, dim=-1)), (q, row)


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
@pytest.mark.parametrize("across", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize(
    ("samples", "width", "padding"),
    [(1, 64, 0), (7, 72, 3), (17, 96, 1), (200, 128, 0), (5, 256, 2)],
)
def test_a_pack_equals_one_by_one(graphs, samples, width, padding, across, fused):
    random = torch.Generator().manual_seed(samples)
    low, high = (90, 129) if width == 72 else (1, 20)  # of 72, cuDNN takes even packs alone
    lengths, texts = torch.randint(low, high, (2, samples), generator=random).tolist()
    spans, key_total = _pack(lengths, texts if across else lengths, padding=padding)
    (q, k, v), leaves = _inputs(spans.total, key_total, heads=2, width=width, fused=fused)
    real_T11 = torch.zeros(spans.total, 1, 1)  # what padding gives means nothing
    for start, length in zip(spans.starts, spans.lengths, strict=True):
        real_T11[start : start + length] = 1
    weight = torch.randn(q.shape, generator=random) * real_T11
    results = []
    for attend in (
        lambda *of: attend_packed(*of, kernel=cudnn_kernel),
        lambda *of: attend_one_by_one(*(x.float() for x in of[:3]), of[3]),
    ):
        out = attend(q, k, v, spans)
        gradients = torch.autograd.grad((out * weight).sum(), leaves)
        results.append([out.float() * real_T11, *(x.float() for x in gradients)])
    for ours, plain in zip(*results, strict=True):
        assert (ours - plain).norm() / plain.norm() < 1e-2
    assert [backward for _, backward in graphs] == [False, True]


@pytest.mark.parametrize("name", RECORDED)
def test_layers_share_graphs_and_offsets(graphs, monkeypatch, name):
    """Two layers, of which one computes its forward pass again, and the next pack."""
    monkeypatch.setitem(sys.modules, "cudnn", stand_in(signatures(name)))
    made, real = [], cudnn_graphs._numbers
    monkeypatch.setattr(cudnn_graphs, "_numbers", lambda *of: made.append(real(*of)) or made[-1])
    for lengths in ([5, 9], [7, 4]):
        spans, total = _pack(lengths, lengths, padding=0)
        (q, k, v), _ = _inputs(total, total, heads=1, width=64, fused=False)
        for _ in range(2):
            attend_packed(q, k, v, spans, kernel=cudnn_kernel).sum().backward()
    assert [backward for _, backward in graphs] == [False, True]
    # Lengths and offsets of queries and of keys, and offsets of statistics.
    assert len({id(one) for one in made}) == 2 * 5


def test_packs_of_about_the_same_sizes_share_graphs():
    keys = []
    for lengths in ([600] * 20, [900, 1000, 30] * 8, [1024] * 31, [512] * 6):
        cu = torch.tensor([0, *lengths]).cumsum(0)
        offsets = Offsets(cu=cu, key_cu=cu, longest=max(lengths), longest_key=7)
        q = torch.empty(sum(lengths), 1, 64, device="meta")
        key = cudnn_graphs._key(q, q, q, q, offsets)
        keys.append((key.sequences, key.longest, key.longest_key, key.tokens))
    first, second, third, fourth = keys
    assert first == (32, 1024, 64, 12_288)
    assert second == (32, 1024, 64, 16_384) and third == (32, 1024, 64, 32_768)
    assert fourth == (8, 512, 64, 4096)
    assert [few_sizes(n, 16) for n in (1, 2, 3, 9, 16, 17, 200)] == [1, 2, 4, 16, 16, 32, 208]


def test_values_are_read_where_the_product_wrote_them(graphs):
    spans, total = _pack([5, 9], [5, 9], padding=0)
    (q, k, v), _ = _inputs(total, total, heads=2, width=64, fused=True)
    attend_packed(q, k, v, spans, kernel=cudnn_kernel)
    ((key, _),) = graphs
    assert key.q == key.k == key.v == (2 * 3 * 64, 3 * 64)


def test_the_gradient_of_values_is_written_into_the_row_of_the_product(graphs):
    """Where the kernel that hands out values offers a place; else into memory of its own."""
    spans, total = _pack([5, 9], [5, 9], padding=0)
    (q, k, v), _ = _inputs(total, total, heads=2, width=64, fused=True)
    found = []
    for place in (None, RowGradient(128)):
        v_THK = v.detach().requires_grad_()
        if place:
            offered(v_THK, place)
        out = attend_packed(q.detach(), k.detach(), v_THK, spans, kernel=cudnn_kernel)
        found += torch.autograd.grad(out.float().square().sum(), v_THK)
    apart, inside = found
    assert apart.is_contiguous() and torch.equal(apart, inside)
    assert inside.stride() == v.stride() and inside.storage_offset() == 128
    assert [key.to_v for key, backward in graphs if backward] == [(128, 64), (384, 192)]


@pytest.mark.parametrize(
    "bad",
    [
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)[..., ::2],
        lambda x: x[:, :1, ::2].expand(-1, 2, -1),
        lambda x: torch.cat((x, x[..., :4]), -1)[..., :64],
        lambda x: torch.cat((x[..., :4], x), -1)[..., 4:68],
    ],
    ids=["numbers apart", "heads on each other", "odd rows", "odd begin"],
)
def test_layouts_that_cudnn_does_not_read_are_copied(graphs, bad):
    spans, total = _pack([5, 9], [5, 9], padding=0)
    (q, k, x), _ = _inputs(total, total, heads=2, width=128, fused=False)
    q, k, v = (q[..., :64].contiguous(), k[..., :64].contiguous(), bad(x))
    out = attend_packed(q, k, v, spans, kernel=cudnn_kernel)
    plain = attend_one_by_one(q.float(), k.float(), v.float(), spans)
    assert (out - plain).norm() / plain.norm() < 1e-2


def test_offsets_are_wide_from_two_to_the_31_on(graphs):
    """In numbers, not bytes; tensors without values have room for them."""
    cu = torch.tensor([0, 2**20, 2**20 + 10], dtype=torch.int32)
    offsets = Offsets(cu=cu, key_cu=cu, longest=2**20, longest_key=2**20)
    found = []
    for tokens in (2**24 - 1, 2**24):
        q = torch.empty(tokens, 1, 128, dtype=torch.bfloat16, device="meta")
        key = cudnn_graphs._key(q, q, q, q, offsets)
        found.append((key.wide, cudnn_graphs._numbers(("offsets", "k", 4096), key, offsets)))
    (narrow, short), (wide, long) = found
    assert (narrow, short.dtype) == (False, torch.int32)
    assert (wide, long.dtype) == (True, torch.int64)
    assert long.tolist() == [0, 2**32, 2**32 + 40_960]


@pytest.mark.parametrize(("width", "taken"), [(72, "flash_2"), (64, "cudnn")])
def test_an_uneven_pack_of_odd_heads_would_take_too_much_memory(monkeypatch, width, taken):
    """16,384 tokens and 100 x 160: 112 sequences as long as the longest one are 56 times as many.

    Only where the width of a head does not divide by 16 the frontend makes room for that.
    """
    for module, name in ((cudnn_graphs, "cudnn_attention"), (kernels, "flash_2_kernel")):
        monkeypatch.setattr(module, name, lambda *of, name=name: name)
    cu = torch.tensor([0, 16_384, *(16_384 + 160 * (n + 1) for n in range(100))])
    offsets = Offsets(cu=cu, key_cu=cu, longest=16_384, longest_key=16_384)
    q = torch.empty(32_384, 1, width, device="meta")
    assert cudnn_kernel(q, q, q, offsets).startswith(taken)
    even = Offsets(cu=cu[:33], key_cu=cu[:33], longest=1000, longest_key=1000)
    assert cudnn_kernel(q, q, q, even) == "cudnn_attention"


def _key(width, **changes):
    packed, fused = (16 * width, width), (3 * 16 * width, 3 * width)
    key = GraphKey(
        capability=(9, 0),
        dtype=torch.bfloat16,
        sequences=208,
        longest=1024,
        longest_key=512,
        tokens=32_768,
        heads=16,
        width=width,
        wide=False,
        q=packed,
        k=packed,
        v=fused,
        to_v=fused,
    )
    return replace(key, **changes)


@pytest.mark.skipif(not find_spec("cudnn"), reason="nvidia-cudnn-frontend is not installed")
@pytest.mark.parametrize("wide", [False, True], ids=["int32", "int64"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_frontend_takes_both_graphs(width, wide):
    """From 1.32 on without a GPU and without cuDNN; 1.28 asks cuDNN's library."""
    for sequences in (1, 2, 16, 208):
        key = _key(width, wide=wide, sequences=sequences)
        for graph in (forward_graph, backward_graph):
            graph(key).graph.validate()


@pytest.mark.skipif(not find_spec("cudnn"), reason="nvidia-cudnn-frontend is not installed")
def test_the_frontend_refuses_what_we_refuse():
    with pytest.raises(Exception, match="multiple of 8"):
        forward_graph(_key(36)).graph.validate()


def test_a_missing_library_is_one_sentence(monkeypatch):
    module = stand_in(signatures(RECORDED[-1]))

    def missing():
        raise RuntimeError("Unable to find symbol cudnnGetVersion")

    module.backend_version = missing
    monkeypatch.setitem(sys.modules, "cudnn", module)
    cudnn_graphs._handle.cache_clear()
    spans, total = _pack([5, 9], [5, 9], padding=0)
    inputs, _ = _inputs(total, total, heads=2, width=64, fused=False)
    with pytest.raises(RuntimeError, match="finds no cuDNN library: install"):
        attend_packed(*inputs, spans, kernel=cudnn_kernel)
