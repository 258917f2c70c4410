"""Each implementation of packed attention against the plain definition."""

from __future__ import annotations

import pytest
import torch
import torch.nn.attention as nn_attention

from dit.models.layers import attention
from dit.models.layers.attention import Spans, attend_by_runs, attend_one_by_one


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
        device=torch.device("cpu"),
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


@pytest.mark.parametrize(
    ("generation", "installed", "chosen"), [(9, True, ["FA3"]), (9, False, []), (8, True, [])]
)
def test_flash_attention_3_is_chosen_where_it_is_registered(
    monkeypatch, generation, installed, chosen
):
    asked = []
    nn_attention.register_flash_attention_impl("FA3", register_fn=lambda: asked.append("FA3"))
    monkeypatch.setattr(attention, "find_spec", lambda name: installed)
    attention.use_newest_flash.cache_clear()
    attention.use_newest_flash(generation)
    attention.use_newest_flash(generation)
    assert asked == chosen
