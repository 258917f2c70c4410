"""Rows of samples spread over their tokens, against plain indexing."""

from __future__ import annotations

import pytest
import torch

from dit.models.layers.per_sample import PerSample

OWNERS = {
    "equal": [0] * 4 + [1] * 4 + [2] * 4,
    "mixed": [0] * 2 + [1] * 2 + [2] * 5 + [3] * 1 + [4] * 1 + [5] * 3,
    "a part of a pack, with one more row at its end": [2] * 3 + [4] * 3 + [5] * 4,
}


@pytest.mark.parametrize("looked_up", [False, True], ids=["rectangles", "rows"])
@pytest.mark.parametrize("segment", OWNERS.values(), ids=OWNERS)
def test_rows_are_those_of_the_own_sample(segment, looked_up):
    segment_T = torch.tensor(segment)
    per_sample = PerSample.of(segment_T)
    assert per_sample.runs is not None
    per_sample = PerSample(segment_T, None) if looked_up else per_sample
    random = torch.Generator().manual_seed(0)

    def wave(rows):
        x = torch.randn(rows, 5, generator=random, dtype=torch.float64)
        return x.requires_grad_()

    x_TD, h_TD, a_ND, b_ND = wave(len(segment)), wave(len(segment)), wave(6), wave(6)
    found = (
        per_sample.modulate(x_TD, scale_ND=a_ND, shift_ND=b_ND),
        per_sample.add(h_TD, x_TD, gate_ND=a_ND),
    )
    norm_TD = (x_TD - x_TD.mean(-1, keepdim=True)) / (
        x_TD.var(-1, correction=0, keepdim=True) + 1e-6
    ).sqrt()
    expected = (norm_TD * a_ND[segment_T] + b_ND[segment_T], h_TD + a_ND[segment_T] * x_TD)
    for mine, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, plain)
        weight = torch.randn(mine.shape, generator=random, dtype=torch.float64)
        inputs = (x_TD, h_TD, a_ND, b_ND)
        for got, want in zip(
            torch.autograd.grad((mine * weight).sum(), inputs, allow_unused=True),
            torch.autograd.grad((plain * weight).sum(), inputs, allow_unused=True),
            strict=True,
        ):
            torch.testing.assert_close(got, want)


def test_neighbours_of_equal_length_are_one_rectangle():
    (run,) = PerSample.of(torch.tensor(OWNERS["equal"])).runs or ()
    assert (run.sample, run.count, run.row, run.length) == (0, 3, 0, 4)
    assert len(PerSample.of(torch.tensor(OWNERS["mixed"])).runs or ()) == 4
