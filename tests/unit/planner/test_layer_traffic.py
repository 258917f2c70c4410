"""What layers move through memory: by hand, and as the counter of operations finds it."""

from __future__ import annotations

from dataclasses import replace
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
    added_traffic,
    layer_traffic,
)

from dit.config import ContextComm, ModelConfig, Precision
from dit.models.dit.family import DitConfig, dit_stack
from dit.models.kernels import across_heads
from dit.models.kernels.rotated_heads import HEADS
from dit.models.kernels.row_chunks import CHUNK
from dit.models.layer_spec import (
    Activation,
    AttentionSpec,
    CrossLayerSpec,
    FeedForwardSpec,
    LayerSpec,
    QkNorm,
    SingleLayerSpec,
    TableModulation,
)
from dit.models.layers import context_parallel
from dit.models.layers.context_parallel import Context, Exchange, TokenOrder
from dit.models.registry import named_model
from dit.pack_wire import pack_to
from dit.planner import layer_traffic as planned
from dit.planner.layer_traffic import LayerLoad, Moved, layer_units
from tests.toy_family import ToyConfig
from tests.toy_networks import NETWORKS, toy_model, toy_pack, toy_parts


def dit_layer(model: ModelConfig) -> CrossLayerSpec:
    assert isinstance(model, DitConfig)
    layer = dit_stack(model).layer
    assert isinstance(layer, CrossLayerSpec)
    return layer


XL = dit_layer(named_model("dit_xl"))
TIGHT = LayerLoad(fused=False, text=1 / 8, samples=32)


def test_units_of_a_layer_by_hand():
    """DiT-XL, 32 samples of 1,024 tokens with 128 of text."""
    angles, text = 4 * 72 / 1152, 1 / 8
    qk = 2 * (2 + 2 + 16 + angles)  # cut out, RMSNorm, rotation in float32
    forward = 3 * 8 + 3 * 5 + qk + (2 + 4 * text) + 2 * 4
    mask = 3 * 32 / 1152  # of a sum over samples
    back_qk = 2 * (3 + 16 + angles) + 6
    norm, gate = 18 + 2 * mask, 11 + mask
    backward = 3 * norm + 3 * gate + back_qk + (3 + 7 * text) + 3 * 4
    eager = layer_units(XL, TIGHT)
    assert (eager.forward, eager.backward) == pytest.approx((forward, backward))
    # Three norms with rows, two of them with the sum before them; the last sum alone.
    row, part, read = 1 / 32, 1 / 8, 2 / 16
    forward = (2 + 2 * row) + 2 * (4 + 3 * row) + (3 + row) + (4 + read) + (2 + 4 * text) + 8
    backward = (4 + row + 2 * part) + 2 * (6 + 2 * row + 3 * part) + (3 + row + part)
    backward += 8 + read + (3 + 7 * text) + 12
    fused = layer_units(XL, replace(TIGHT, fused=True))
    assert (fused.forward, fused.backward) == pytest.approx((forward, backward))


def test_tensor_ranks_share_what_is_inside_and_with_their_sequence_all():
    whole = layer_units(XL, TIGHT)
    shared = layer_units(XL, replace(TIGHT, tensor=2, sequence_parallel=True))
    assert shared == whole.times(1 / 2)
    inside = layer_units(XL, replace(TIGHT, tensor=2))
    outside = 3 * 8 + 3 * 5  # norms and gated sums, forward
    assert inside.forward == pytest.approx(outside + (whole.forward - outside) / 2)


@pytest.mark.parametrize("fused", [False, True], ids=["eager", "fused"])
@pytest.mark.parametrize("name", ["dit_xl", "cosmos_7b"])
def test_the_counter_finds_as_much_in_the_dit(groups, name, fused):
    model = replace(named_model(name), precision=Precision.BF16)
    shape = PackShape()
    found = layer_traffic(model, shape, groups, fused=fused)
    text = (model.text_pad_to or shape.text) / 1024
    load = LayerLoad(fused=fused, text=text, samples=shape.samples)
    _agree(found, layer_units(dit_layer(model), load))
    left_out = (ATTENTION, WEIGHT_PRODUCTS)
    operations = sum(n for one in found for name, n in one.count.items() if name not in left_out)
    products = sum(one.count[WEIGHT_PRODUCTS] for one in found)
    assert operations + products + 8 == pytest.approx(planned.KERNELS[fused], rel=0.03)


def _agree(found: Any, units: Moved) -> None:
    forward, backward = found
    assert units.forward == pytest.approx(forward.units(), rel=0.015)
    assert units.backward == pytest.approx(backward.units(), rel=0.015)


def test_chunks_and_heads_are_those_of_the_kernels():
    assert (planned.CHUNK, planned.HEADS) == (CHUNK, HEADS) and across_heads.HEADS == HEADS


SIZES: dict[str, Any] = {
    "hidden_size": 768, "num_attention_heads": 16, "precision": Precision.BF16
}  # fmt: skip


def _cross() -> tuple[ModelConfig, ModelConfig, LayerSpec]:
    """In the manner of Wan."""
    model = toy_model("cross", **SIZES)
    parts = toy_parts(model, norm=QkNorm.ACROSS_HEADS)
    layer = CrossLayerSpec(
        **parts,
        cross_attention=parts["attention"],
        text_width=model.crossattn_emb_size,
        modulation=TableModulation(),
        gated_cross=False,
    )
    return replace(model, num_layers=1), replace(model, num_layers=2), layer


def _double() -> tuple[ModelConfig, ModelConfig, LayerSpec]:
    model = toy_model("joint", **SIZES)
    one, two = (replace(model, num_layers=layers) for layers in (1, 2))
    return one, two, _stacks(model)[0]


def _single() -> tuple[ModelConfig, ModelConfig, LayerSpec]:
    model = toy_model("joint", **SIZES)
    one, two = (replace(model, num_single_layers=layers) for layers in (1, 2))  # type: ignore[call-arg]
    return one, two, _stacks(model)[1]


def _stacks(model: ModelConfig) -> list[LayerSpec]:
    assert isinstance(model, ToyConfig)
    return [stack.layer for stack in model.stacks]


KINDS = {"cross": _cross, "double": _double, "single": _single}


@pytest.mark.parametrize("fused", [False, True], ids=["eager", "fused"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_counter_finds_as_much_in_other_layers(groups, kind, fused):
    less, more, layer = KINDS[kind]()
    network = NETWORKS["cross" if kind == "cross" else "joint"]
    batch = pack_to(toy_pack(less, [(1, 32, 32)] * 32, [256] * 32, multiple=16), META)
    one, two = (network(replace(m, fused_kernels=fused), groups) for m in (less, more))
    found = added_traffic(one, two, batch, width=768)
    _agree(found, layer_units(layer, LayerLoad(fused=fused, text=256 / 1024, samples=32)))


def test_gated_units_and_heads_without_norm(groups, monkeypatch):
    """A single-stream layer with SwiGLU, and no norm of queries and keys."""
    less, more, _ = _single()
    (_, single) = less.stacks  # type: ignore[attr-defined]
    layer = replace(
        single.layer,
        feed_forward=FeedForwardSpec(width=768, hidden=1536, activation=Activation.SWIGLU),
        attention=AttentionSpec(width=768, heads=16, norm=QkNorm.NONE),
    )
    assert isinstance(layer, SingleLayerSpec)

    def stacks(model: ToyConfig) -> tuple:
        return (replace(single, count=model.num_single_layers, layer=layer),)

    monkeypatch.setattr(ToyConfig, "stacks", property(stacks))
    network = NETWORKS["joint"]
    batch = pack_to(toy_pack(less, [(1, 32, 32)] * 8, [256] * 8, multiple=16), META)
    one, two = (network(model, groups) for model in (less, more))
    found = added_traffic(one, two, batch, width=768)
    _agree(found, layer_units(layer, LayerLoad(fused=True, text=256 / 1024, samples=8)))


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
    exchange = Exchange(spans=None, all_ranks=order)  # type: ignore[arg-type]
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
