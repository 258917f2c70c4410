"""What layers move through memory: the table is what is counted, and near a count by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from measuring.memory_traffic import (
    ATTENTION,
    META,
    WEIGHT_PRODUCTS,
    OperationCounter,
    PackShape,
    layer_traffic,
)

from benchmarks.count_traffic import LAYERS, layer_columns
from dit.config import ContextComm, Precision
from dit.models.dit.family import ExtraPosition
from dit.models.layers import context_parallel
from dit.models.layers.context_parallel import Context, TokenExchange, TokenOrder
from dit.models.registry import families, named_model, network_spec
from dit.planner import layer_traffic as planned
from dit.planner.layer_traffic import LayerLoad, layer_units, row_of

(_XL,) = network_spec(named_model("dit_xl")).stacks
XL = _XL.layer
_MODEL = replace(named_model("dit_xl"), extra_pos_embed=ExtraPosition.LEARNABLE)
POSITIONED = network_spec(_MODEL).stacks[0].layer
TIGHT = LayerLoad(fused=False, text=1 / 8)


@pytest.mark.parametrize("kernels", ["eager", "fused"])
@pytest.mark.parametrize("name", LAYERS)
def test_the_table_is_what_is_counted(groups, name: str, kernels: str) -> None:
    """Else: python benchmarks/count_traffic.py --table dit/planner/layer_units.json."""
    written = json.loads(Path(planned.__file__).with_name("layer_units.json").read_text())
    assert written.keys() == LAYERS.keys()
    found = layer_columns(name, kernels, groups)
    for way, columns in written[name][kernels].items():
        assert columns == pytest.approx(found[way], abs=0.011)


def test_a_row_is_of_such_a_layer_and_every_layer_has_a_row():
    for name, (size, _, more) in LAYERS.items():
        rows = [
            row_of(one.layer) for one in network_spec(replace(named_model(size), **more)).stacks
        ]
        assert name in rows
    sizes = [size for family in families() for size in family.config().sizes]
    rows = {row_of(one.layer) for size in sizes for one in network_spec(named_model(size)).stacks}
    assert rows == LAYERS.keys()


@pytest.mark.parametrize("left", ["AttendTo, Feed", "Feed", "Attend, AttendTo", "AddPositions"])
def test_a_layer_unlike_all_others_says_where_its_row_is_missing(left: str):
    """Whatever parts a family's own layer lacks."""
    kept = [one for one in POSITIONED.parts if type(one).__name__ in left.split(", ")]
    layer = replace(POSITIONED, steps=(*kept,))
    with pytest.raises(ValueError, match=f"for a layer of {left}: .* give row_of in "):
        layer_units(layer, TIGHT)


def test_units_of_a_layer_by_hand():
    """DiT-XL, 1,024 tokens with 128 of text; sums over the tokens of a sample read a mask, too."""
    angles, text = 4 * 72 / 1152, 1 / 8
    qk = 2 * (2 + 2 + 16 + angles)  # cut out, RMSNorm, rotation in float32
    forward = 3 * 8 + 3 * 5 + qk + (2 + 4 * text) + 2 * 4
    mask = 3 * 8 / 1152  # of a sum over 8 samples
    back_qk = 2 * (3 + 16 + angles) + 6
    norm, gate = 18 + 2 * mask, 11 + mask
    backward = 3 * norm + 3 * gate + back_qk + (3 + 7 * text) + 3 * 4
    eager = layer_units(XL, TIGHT)
    assert (eager.forward, eager.backward) == pytest.approx((forward, backward), rel=0.01)
    # Three norms with rows, two of them with the sum before them; the last sum alone.
    row, part, read = 1 / 32, 1 / 8, 2 / 16
    forward = (2 + 2 * row) + 2 * (4 + 3 * row) + (3 + row) + (4 + read) + (2 + 4 * text) + 8
    backward = (4 + row + 2 * part) + 2 * (6 + 2 * row + 3 * part) + (3 + row + part)
    backward += 8 + read + (3 + 7 * text) + 12
    fused = layer_units(XL, replace(TIGHT, fused=True))
    assert (fused.forward, fused.backward) == pytest.approx((forward, backward), rel=0.015)


def test_tensor_ranks_share_what_is_inside_and_with_their_sequence_all():
    whole = layer_units(XL, TIGHT)
    shared = layer_units(XL, replace(TIGHT, tensor=2, sequence_parallel=True))
    assert shared == whole.times(1 / 2)
    inside = layer_units(XL, replace(TIGHT, tensor=2))
    # Norms and gated sums are not shared; half of the units stand for them.
    between, every = 3 * 8 + 3 * 5 + 3 * 18 + 3 * 11, whole.forward + whole.backward
    expected = between + (every - between) / 2
    assert inside.forward + inside.backward == pytest.approx(expected, rel=0.07)


SIZES: dict[str, tuple[str, dict[str, Any], int]] = {
    "dit_xl": ("dit_xl", {}, 128),
    "cosmos_7b": ("cosmos_7b", {}, 128),
    "wan 1.3b": ("wan2.1_t2v_1.3b", {"text_pad_to": None}, 512),
    "small qwen": ("qwen_image", {"hidden_size": 1536, "num_attention_heads": 12}, 256),
    "small z-image": ("zimage", {"hidden_size": 1920, "num_attention_heads": 15}, 256),
    "omnigen2": ("omnigen2", {"num_refiner_layers": 1}, 256),
}


@pytest.mark.parametrize("fused", [False, True], ids=["eager", "fused"])
@pytest.mark.parametrize("name", SIZES)
def test_the_counter_finds_as_much_in_other_sizes(groups, name, fused):
    size, keys, text = SIZES[name]
    model = replace(named_model(size), name="custom", precision=Precision.BF16, **keys)
    shape = PackShape(text=text)
    found = layer_traffic(model, shape, groups, fused=fused)
    load = LayerLoad(fused=fused, text=(model.text_pad_to or text) / 1024)
    units = layer_units(network_spec(model).stacks[-1].layer, load)
    forward, backward = found
    assert units.forward == pytest.approx(forward.units(), rel=0.03)
    assert units.backward == pytest.approx(backward.units(), rel=0.03)
    if name in ("dit_xl", "cosmos_7b"):
        beside = (ATTENTION, WEIGHT_PRODUCTS)
        operations = sum(n for one in found for kind, n in one.count.items() if kind not in beside)
        products = sum(one.count[WEIGHT_PRODUCTS] for one in found)
        assert operations + products + 8 == pytest.approx(planned.KERNELS[fused], rel=0.03)


class _Given(torch.autograd.Function):
    """Results and gradients that come from elsewhere: they move nothing here."""

    @staticmethod
    def forward(ctx, shape, *inputs):
        ctx.shapes = [x.shape for x in inputs]
        return inputs[0].new_empty(shape)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[override]
        return None, *(gradient.new_empty(shape) for shape in ctx.shapes)


@pytest.mark.parametrize("comm", [ContextComm.A2A, ContextComm.ALL_GATHER])
@pytest.mark.parametrize("ranks", [2, 8])
def test_copies_around_an_exchange_of_context_ranks(monkeypatch, comm, ranks):
    tokens, heads, width = 4096, 16, 64
    group: Any = SimpleNamespace(size=lambda: ranks, rank=lambda: 0)
    monkeypatch.setattr(context_parallel, "all_to_all", lambda _, x: _Given.apply(x.shape, x))
    monkeypatch.setattr(
        context_parallel,
        "gather_from_sequence_parallel_region",
        lambda x, group: _Given.apply((ranks * len(x), *x.shape[1:]), x),
    )
    place = torch.empty(ranks * tokens, dtype=torch.int64, device=META)
    gathered = TokenOrder(place, place)
    order = TokenOrder(None, None) if comm is ContextComm.A2A else gathered
    exchange = TokenExchange(spans=None, all_ranks=order)  # type: ignore[arg-type]
    qkv = [torch.empty(tokens, heads, width, device=META, requires_grad=True) for _ in range(3)]
    forward, backward = OperationCounter({}), OperationCounter({})
    with forward:
        out_THK = Context(group=group, comm=comm).attend(
            lambda q, k, v, _: _Given.apply(q.shape, q, k, v),  # type: ignore[return-value]
            (qkv[0], qkv[1], qkv[2]),
            exchange,
        )
    with backward:
        torch.autograd.grad(out_THK, qkv, torch.empty_like(out_THK))
    unit = out_THK.nbytes
    load = replace(TIGHT, context=ranks, by_heads=comm is ContextComm.A2A)
    planned_units = planned._exchange(load)
    assert forward.bytes.total() / unit == pytest.approx(planned_units.forward, rel=0.03)
    assert backward.bytes.total() / unit == pytest.approx(planned_units.backward, rel=0.03)
    assert layer_units(XL, load) == layer_units(XL, TIGHT) + planned_units
