"""The counter of memory traffic: known bytes of single operations, and a whole layer."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from measuring.memory_traffic import (
    ATTENTION,
    META,
    ONE_HOT_PRODUCTS,
    WEIGHT_PRODUCTS,
    OperationCounter,
    PackShape,
    layer_traffic,
)

from benchmarks import count_traffic
from dit.config import LoraConfig, Precision
from dit.models.registry import named_model
from tests.packs import tiny_model

SMALL = PackShape(samples=3, grid=(1, 4, 4), text=2, multiple=4)


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def test_each_input_and_output_counts_once_and_views_do_not():
    x, y = _empty(4, 6), _empty(6, dtype=torch.bfloat16)
    with OperationCounter({}) as traffic:
        x.T.flatten(0).view(2, 12)  # the copy of a transposed tensor
        x[1:] * x[1:]
        x.mul_(y)
    assert traffic.bytes == {"clone": 2 * 96, "mul": 2 * 72 + 72, "mul_": 2 * 96 + 12}
    assert traffic.count == {"clone": 1, "mul": 1, "mul_": 1}


def test_sums_over_samples_are_told_from_products_with_weights():
    weight_DD, x_TD, row_T = _empty(6, 6), _empty(8, 6), _empty(8, dtype=torch.int64)
    with OperationCounter({}) as traffic:
        x_TD @ weight_DD
        mask_NT = row_T == torch.arange(3, device=META)[:, None]
        mask_NT.to(torch.float32) @ x_TD
    assert traffic.bytes[WEIGHT_PRODUCTS] == 4 * (48 + 36 + 48)
    assert traffic.bytes[ONE_HOT_PRODUCTS] == 4 * (3 * 8 + 48 + 3 * 6)
    assert traffic.bytes["_to_copy"] == 24 + 4 * 24


def test_padded_samples_end_with_padding():
    batch = SMALL.padded.pack(tiny_model())
    assert batch.num_tokens == (9, 9, 9)
    assert batch.starts == (0, 12, 24, 36)


def test_an_operator_is_asked_for_its_bytes():
    with OperationCounter({"aten::relu": lambda x: 10 * x.numel()}) as traffic:
        torch.relu(_empty(5))
    assert traffic.bytes == {"relu": 50}


@pytest.mark.parametrize("shape", [SMALL, SMALL.padded], ids=["tight", "padded"])
def test_a_layer_of_the_network(groups, shape):
    """The products of one layer, by hand; and the norms are the kernels of CUDA."""
    model = tiny_model(precision=Precision.BF16)
    forward, backward = layer_traffic(model, shape, groups)
    tokens = shape.samples * {(4, 4): 16, (3, 3): 12}[shape.grid[1:]]
    text, width, rank = shape.samples * shape.text, model.hidden_size, model.adaln_lora_dim
    pairs = [(tokens, width, 3 * width), (tokens, width, width)]  # self-attention
    pairs += [(tokens, width, width), (text, 20, 2 * width), (tokens, width, width)]
    pairs += [(tokens, width, 4 * width), (tokens, 4 * width, width)]
    pairs += 3 * [(shape.samples, width, rank), (shape.samples, rank, 3 * width)]
    moved = [2 * (rows * a + a * b + rows * b) for rows, a, b in pairs]
    assert forward.bytes[WEIGHT_PRODUCTS] == sum(moved)
    # Two in the backward pass, but for the text, which needs no gradient.
    assert backward.bytes[WEIGHT_PRODUCTS] == 2 * sum(moved) - moved[3]
    assert forward.count["fused_rms_norm"] == backward.count["fused_rms_norm_backward"] == 4
    assert forward.count[ATTENTION] == backward.count[ATTENTION] == 2
    assert backward.count[ONE_HOT_PRODUCTS] == 9
    products = backward.bytes[ONE_HOT_PRODUCTS] / backward.unit
    without = (ATTENTION, WEIGHT_PRODUCTS, ONE_HOT_PRODUCTS)
    assert backward.units() == pytest.approx(backward.units(without=without) + products)


def test_padding_adds_no_operation(groups):
    model = tiny_model(precision=Precision.BF16)
    tight, padded = (layer_traffic(model, shape, groups) for shape in (SMALL, SMALL.padded))
    assert [one.count for one in tight] == [one.count for one in padded]


def test_fused_kernels_move_what_their_loads_and_stores_do(groups):
    """The aim for DiT-XL without padding: 45 units forward, 75 backward."""
    model = replace(named_model("dit_xl"), precision=Precision.BF16)
    forward, backward = layer_traffic(model, PackShape(), groups, fused=True)
    assert forward.units() < 45 and backward.units() < 75
    assert {"gated_norm", "rotated_heads"} <= forward.bytes.keys()
    assert not {"native_layer_norm", "addcmul"} & {n for n, count in forward.count.items() if count}


def test_the_norm_across_heads_of_wan_14b_moves_at_most_30_units(groups):
    model = replace(named_model("wan2.1_t2v_14b"), precision=Precision.BF16)
    shape = PackShape(samples=1, grid=(20, 32, 52), text=512)
    forward, backward = layer_traffic(model, shape, groups, fused=True)
    norm = {"across_heads", "across_heads_sums", "across_heads_backward"}
    every = [(name, n / one.unit) for one in (forward, backward) for name, n in one.bytes.items()]
    assert 17 < sum(units for name, units in every if name in norm) < 30
    assert not {"addcmul_", "pow", "rsqrt"} & {n for n, count in forward.count.items() if count}
    assert backward.units() < 75


def test_the_program(tmp_path, capsys):
    file = tmp_path / "found.json"
    small = ["--models", "dit_s", "--samples", "2", "--grid", "1", "4", "4", "--text", "3"]
    count_traffic.main([*small, "--operations", "--json", str(file)])
    rows = json.loads(file.read_text())
    assert [(row["samples"], row["kernels"], row["pass"]) for row in rows] == [
        (samples, kernels, way)
        for samples in ("tight", "padded")
        for kernels in ("eager", "fused")
        for way in ("forward", "backward")
    ]
    eager = [row for row in rows if row["kernels"] == "eager"]
    assert all(ONE_HOT_PRODUCTS in row["by name"] for row in eager if row["pass"] == "backward")
    count_traffic.main([*small, "--without-products", "--json", str(file)])
    fewer = json.loads(file.read_text())
    assert fewer[0]["units"] == rows[0]["units"]
    assert fewer[1]["units"] < rows[1]["units"]
    assert "native_layer_norm" in capsys.readouterr().out


def test_dropout_of_adapters_reads_and_writes_each_input_once(groups):
    """On all linears of a layer of Wan 14B it adds at most 45 units."""
    model = replace(named_model("wan2.1_t2v_14b"), precision=Precision.BF16)
    shape = PackShape(samples=1, grid=(20, 32, 52), text=512)
    plain, dropped = (
        layer_traffic(
            model, shape, groups, fused=True, lora=LoraConfig(rank=32, alpha=32, dropout=rate)
        )
        for rate in (0.0, 0.1)
    )
    assert sum(one.units() for one in dropped) - sum(one.units() for one in plain) <= 45
    # Queries, keys and values drop other numbers; text needs no gradient.
    calls = 3 + 1 + 1 + 1 + 1 + 1
    assert dropped[0].count["adapter_dropout"] == calls + 2
    assert dropped[1].count["adapter_dropout_add"] == calls
    assert not any("adapter_dropout" in name for one in plain for name in one.count)
    # Products of adapters add to what their linear computes, both ways.
    linears = 7  # text needs no gradient
    assert [one.count["addmm_"] for one in plain] == [linears, linears - 1]
