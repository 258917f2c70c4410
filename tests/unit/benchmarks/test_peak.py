"""A product of matrices is measured."""

from __future__ import annotations

import torch
from measuring.steps import measured_flops


def test_a_product_is_measured():
    assert 1e8 < measured_flops(torch.device("cpu"), torch.float32) < 1e14
