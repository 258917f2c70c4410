"""Differences between a layout and one process."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dit.layout_check.names import parse_layout
from dit.layout_check.probe import Probe
from dit.layout_check.program import check_layouts
from dit.layout_check.report import compare
from tests.packs import run_config

QUERIES, VALUES = "blocks.layers.qkv.lora.3.0.A", "blocks.layers.qkv.lora.3.2.A"
OTHER = "blocks.layers.proj.lora.3.0.A"


def _verdict(**gradients: float) -> str:
    """Of gradients that differ by so much, of 1e-2 of queries and 1 of the others."""
    names = {"queries": QUERIES, "values": VALUES, "other": OTHER}
    size = {QUERIES: 1e-2, VALUES: 1.0, OTHER: 1.0}
    one = {name: torch.tensor([norm]) for name, norm in size.items()}
    layout = {n: g + gradients.get(w, 0.0) for w, n in names.items() for g in [one[n]]}
    values = {"validation": {"loss": 1.0}, "losses": [1.0], "grad_norms": [1.0]}
    weights = {name: torch.ones(1) for name in one}
    a = Probe(**values, weights=weights, gradients=one, reach=weights)
    b = replace(a, gradients=layout)
    return compare(b, a, layout=parse_layout("tp2+lora"), config=run_config()).verdict


def test_each_gradient_of_an_adapter_is_measured_by_itself() -> None:
    assert _verdict() == _verdict(queries=5e-7) == _verdict(values=5e-5) == "same"
    assert QUERIES in _verdict(queries=2e-5)  # 2e-3 of its own size, 2e-5 of that of the values
    assert VALUES in _verdict(values=2e-3)
    assert OTHER in _verdict(other=2e-3)


@pytest.mark.parametrize("gap", [float("nan"), float("inf")])
def test_what_is_not_finite_is_different(gap: float) -> None:
    assert "inf" in _verdict(other=gap)


@pytest.mark.parametrize(
    ("layout", "problem"), [("tp2+muon+lora", "optimizer.kind=muon"), ("drift", "drift_weight=0.5")]
)
def test_words_that_do_not_go_together_are_named(layout: str, problem: str) -> None:
    with pytest.raises(ValueError, match=rf"--layouts {re.escape(layout)} \(--help .*{problem}"):
        check_layouts(["--layouts", layout], base=run_config(), script=Path("none.py"))
