"""Each implementation of packed attention against the plain definition."""

from __future__ import annotations

import pytest
import torch

from dit.models.attention import kernels
from dit.models.attention.kernels import attend_by_runs, attend_packed, sequences
from dit.models.attention.spans import Spans, attend_one_by_one
from dit.models.layers import context_parallel
from tests.plain_kernel import plain_kernel

CPU = torch.device("cpu")


def _spans(lengths, key_lengths, pad=3, after=(3, 3)):
    """Samples with `pad` rows of padding between them, and `after` behind the last."""

    def starts(sizes, after):
        made, at = [], 0
        for size in sizes:
            made.append(at)
            at += size + pad
        return tuple(made), at - pad + after

    (first, total), (key_first, keys) = starts(lengths, after[0]), starts(key_lengths, after[1])
    spans = Spans(
        starts=first,
        lengths=tuple(lengths),
        key_starts=key_first,
        key_lengths=tuple(key_lengths),
        total=total,
        device=CPU,
    )
    return spans, total, keys


@pytest.mark.parametrize(
    ("lengths", "key_lengths"),
    [([5, 5, 5], [7, 7, 7]), ([1, 9, 4, 9], [3, 1, 8, 1]), ([6], [2])],
    ids=["equal", "mixed", "one"],
)
@pytest.mark.parametrize("after", [(3, 3), (0, 3), (3, 0)])
def test_by_shape_equals_one_by_one(lengths, key_lengths, after):
    spans, total, keys = _spans(lengths, key_lengths, after=after)
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(rows, 3, 8, generator=generator, requires_grad=True)
        for rows in (total, keys, keys)
    ]
    weight = torch.randn(total, 3, 8, generator=generator)
    results = []
    for attend in (attend_one_by_one, attend_by_runs):
        out = attend(*inputs, spans)
        (out * weight).sum().backward()
        results.append([out.detach(), *(x.grad.clone() for x in inputs)])
        for x in inputs:
            x.grad = None
    for plain, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-5)


def test_equal_samples_at_shrinking_distances_keep_their_rows():
    """As a sample that stays whole before the parts of others."""
    starts = (0, 16, 24)
    spans = Spans.of([(at, 1) for at in starts], [(at, 1) for at in starts], total=32, device=CPU)
    inputs = [torch.randn(32, 3, 8, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    found = attend_by_runs(*inputs, spans)
    torch.testing.assert_close(found, attend_one_by_one(*inputs, spans), rtol=1e-5, atol=1e-5)


def test_padding_gets_zeros():
    spans, total, keys = _spans([2, 4], [3, 3])
    out = attend_by_runs(
        torch.ones(total, 1, 4), torch.ones(keys, 1, 4), torch.ones(keys, 1, 4), spans
    )
    real = torch.zeros(total, dtype=torch.bool)
    for start, length in zip(spans.starts, spans.lengths, strict=True):
        real[start : start + length] = True
    assert (out[real] == 1).all()
    assert (out[~real] == 0).all()


LAYOUTS = {
    # (queries, keys, rows of queries, rows of keys) -> sequences
    "tight": (((0, 4), (4, 3)), ((0, 4), (4, 3)), 7, 7, [(4, 4), (3, 3)]),
    "padding of its own": (((1, 4), (6, 2)), ((1, 4), (6, 2)), 8, 8, [
        *((1, 1), (4, 4), (1, 1), (2, 2))
    ]),
    "long padding is cut": (((0, 3),), ((0, 3),), 10, 10, [(3, 3), (3, 3), (2, 2), (2, 2)]),
    "captions have none": (((1, 4), (6, 2)), ((0, 3), (3, 1)), 10, 4, [(6, 3), (4, 1)]),
    "an unasked caption": (((0, 2), (4, 0), (6, 2)), ((0, 3), (3, 5), (8, 1)), 8, 9, [
        *((2, 3), (2, 3), (2, 2), (2, 1))
    ]),
    "an empty caption": (((0, 2), (2, 4), (6, 2)), ((0, 3), (3, 0), (3, 1)), 8, 4, [
        *((6, 3), (2, 1))
    ]),
    "an empty caption first": (((0, 2), (2, 4)), ((0, 0), (0, 3)), 6, 3, [(6, 3)]),
    "fewer queries at the end": (((0, 4), (4, 2)), ((0, 4), (4, 2)), 7, 12, [
        *((4, 4), (2, 2), (1, 1))
    ]),
    "no queries at the end": (((0, 4),), ((0, 4),), 4, 9, [(4, 4)]),
    "no queries for the first": (((0, 0), (0, 3), (3, 2)), ((0, 4), (4, 2), (6, 1)), 6, 10, [
        *((3, 2), (2, 1), (1, 1))
    ]),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_token_is_in_one_sequence(layout):
    queries, keys, total, key_total, expected = LAYOUTS[layout]
    spans = Spans.of(queries, keys, total=total, device=CPU)
    assert sequences(spans, keys=key_total) == expected
    assert sum(length for length, _ in expected) == total


@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_in_sequences_of_its_own_changes_nothing(layout):
    """Outputs of real tokens, and gradients of all: padding gets none."""
    queries, keys, total, key_total, _ = LAYOUTS[layout]
    spans = Spans.of(queries, keys, total=total, device=CPU)
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(rows, 3, 8, generator=generator, requires_grad=True)
        for rows in (total, key_total, key_total)
    ]
    keys_here = zip(spans.key_starts, spans.key_lengths, strict=True)
    asked = _rows(keys_here, key_total)
    real = [_rows(queries, total), asked, asked]
    weight = torch.randn(total, 3, 8, generator=generator) * real[0]
    plain, packed = (
        (out.detach() * real[0], *torch.autograd.grad((out * weight).sum(), inputs))
        for out in (
            attend_one_by_one(*inputs, spans),
            attend_packed(*inputs, spans, kernel=plain_kernel),
        )
    )
    for a, b, rows in zip(plain, packed, (real[0], *real), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)
        assert not (b * ~rows).any()


def _rows(spans, total):
    """True on the rows of `spans`, [total, 1, 1]."""
    found = torch.zeros(total, 1, 1, dtype=torch.bool)
    for start, length in spans:
        found[start : start + length] = True
    return found


def test_keys_between_samples_need_a_query():
    spans = Spans.of([(0, 2), (2, 2)], [(0, 2), (5, 2)], total=4, device=CPU)
    with pytest.raises(AssertionError, match="at the end of the pack"):
        sequences(spans, keys=7)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernels_that_plan_for_a_count_see_few_counts(layout):
    """Empty sequences behind the others: what they hold is the same."""
    queries, keys, total, key_total, expected = LAYOUTS[layout]
    seen = []

    def kernel(q_THK, k_SHK, v_SHK, offsets):
        seen.append(offsets)
        return q_THK

    for multiple in (1, 16):
        spans = Spans.of(queries, keys, total=total, device=CPU)
        rows = (torch.zeros(n, 1, 2) for n in (total, key_total, key_total))
        attend_packed(*rows, spans, kernel=kernel, count_multiple=multiple)
    plain, padded = seen
    assert (plain.longest, plain.longest_key) == (padded.longest, padded.longest_key)
    for one, other in ((plain.cu, padded.cu), (plain.key_cu, padded.key_cu)):
        assert len(one) == len(expected) + 1
        assert len(other) == 17
        assert other[: len(one)].tolist() == one.tolist()
        assert set(other[len(one) :].tolist()) == {int(one[-1])}


def test_neighbours_of_equal_lengths_share_a_call(monkeypatch):
    shapes = []
    plain = kernels.scaled_dot_product_attention

    def counted(q, k, v):
        shapes.append(q.shape[0])
        return plain(q, k, v)

    monkeypatch.setattr(kernels, "scaled_dot_product_attention", counted)
    spans, total, keys = _spans([5, 5, 5, 4], [7, 7, 7, 2])
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(rows, 3, 8, generator=generator) for rows in (total, keys, keys)]
    out = attend_by_runs(*inputs, spans)
    torch.testing.assert_close(out, attend_one_by_one(*inputs, spans))
    assert shapes == [3, 1]
    assert kernels.shapes_of_runs(spans) == {(3, 5, 7), (1, 4, 2)}


def test_the_ring_is_told_few_counts_of_samples():
    for count in (1, 3, 15):
        queries = [(8 * i, 5) for i in range(count)]
        spans = Spans.of(queries, queries, total=8 * count, device=CPU)
        cu, cu_padded, longest = context_parallel._offsets(spans)
        expected = [5 * i for i in range(count + 1)]
        assert len(cu) == len(cu_padded) == 17 and longest == 512
        assert cu.tolist() == expected + [5 * count] * (16 - count)
        assert cu_padded.tolist() == [8 * min(i, count) for i in range(17)]
