"""Adapters: their arithmetic beside fused linears, their dropout, and which linears get one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dit.config import LoraConfig, LoraTargets, Precision, Problems
from dit.lora.adapter import AdapterShape, adapter_key, dropped, freeze, narrowed
from dit.lora.targets import (
    adaptable_pairs,
    adapters_by_linear,
    attach_adapters,
    chosen_adapters,
    linear_name,
)
from dit.models.layers.adaptable import (
    TOKENS,
    DropoutRows,
    TokenPlaces,
    dropping,
    is_adapter,
    is_up,
)
from dit.models.wan.model import WanNetwork
from dit.train.checkpoint.adapters import initialise_adapters
from dit.train.model_and_optimizer import randomise
from tests.packs import run_config
from tests.wan_networks import wan_model

QKV = "blocks.layers.1.self_attention.linear_qkv"
OUT_OF_TEXT = "blocks.0.attn2.to_out.0"
SHAPES = {
    "blocks.1.attn1.to_q": AdapterShape(rank=3, alpha=6.0),
    "blocks.1.attn1.to_v": AdapterShape(rank=5, alpha=1.0),
}


def _network(groups, **model: Any) -> WanNetwork:
    network = WanNetwork(wan_model("t2v", **model), groups)
    randomise(network, seed=1)
    return network


def test_a_fused_linear_adds_the_product_of_each_of_its_parts(groups):
    network = _network(groups)
    attach_adapters(network, SHAPES, precision=Precision.FP32)
    randomise(network, seed=2)
    linear: Any = network.get_submodule(QKV)
    x = torch.randn(7, linear.weight.shape[1])
    adapted, linear.lora = linear(x), None
    heads, width = network.model.num_attention_heads, linear.weight.shape[1]
    added = (adapted - linear(x)).detach().view(7, heads, 3, -1)
    attach_adapters(network, SHAPES, precision=Precision.FP32)
    randomise(network, seed=2)
    parts = dict(network.get_submodule(QKV).lora._named())  # type: ignore[union-attr]
    for part, scale in ((0, 2.0), (2, 0.2)):
        wanted = scale * x @ parts[str(part)].A.T @ parts[str(part)].B.T
        got = added[:, :, part].reshape(7, width)
        assert (got - wanted).abs().max() <= 1e-5 * wanted.square().mean().sqrt()
    assert not added[:, :, 1].any()  # keys have no adapter
    assert list(parts) == ["0", "2"]


@pytest.mark.parametrize("shapes", [SHAPES, {OUT_OF_TEXT: AdapterShape(rank=3, alpha=2.0)}])
def test_gradients_are_those_of_products_of_their_own(groups, shapes):
    network = _network(groups)
    attach_adapters(network, shapes, precision=Precision.FP32)
    randomise(network, seed=2)
    linear: Any = next(m for m in network.modules() if getattr(m, "lora", None) is not None)
    heads, parts = linear.lora.groups, len(linear.lora.parts)
    x = torch.randn(7, linear.weight.shape[1], requires_grad=True)
    weights = {n: p for n, p in linear.named_parameters() if p.requires_grad}
    added = x.new_zeros(7, heads, parts, linear.weight.shape[0] // (heads * parts))
    for name, one in linear.lora._named():
        own = one.scale * x @ one.A.T @ one.B.T
        added = added.index_add(2, torch.tensor([int(name)]), own.view(7, heads, 1, -1))
    wanted = torch.nn.functional.linear(x, linear.weight, linear.bias) + added.flatten(1)
    to_out = torch.randn_like(wanted)
    each = [
        (out, *torch.autograd.grad(out, [x, *weights.values()], to_out))
        for out in (linear(x), wanted)
    ]
    for name, got, right in zip(["output", "input", *weights], *each, strict=True):
        assert (got - right).abs().max() <= 1e-6 * right.abs().max(), name


def test_an_input_without_a_gradient_is_given_none():
    """Text needs none: the product with the whole matrix, which would make it, is not computed."""
    x, down = torch.randn(4, 6), torch.nn.Parameter(torch.randn(2, 6))
    for wanted in (False, True):
        for_linear, h = narrowed(x.requires_grad_(wanted), down)
        assert for_linear.requires_grad == wanted and h.requires_grad
        assert torch.equal(h, x @ down.T)


def test_adapters_alone_are_trained_and_start_at_nothing(groups):
    network = _network(groups)
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    attach_adapters(network, SHAPES, precision=Precision.FP32)
    initialise_adapters(network, run_config(model=network.model))
    after = dict(network.named_parameters())
    assert {name for name in after if not is_adapter(name)} == before.keys()
    for name, p in after.items():
        assert p.requires_grad == is_adapter(name)
        assert is_adapter(name) or torch.equal(p, before[name])
        assert not is_up(name) or not p.any()
    down = after[f"{QKV}.lora.0.A"]
    bound = down.shape[1] ** -0.5
    assert 0.8 * bound < down.abs().max() <= bound
    assert torch.equal(down, down.clamp(-bound, bound)) and abs(down.mean()) < 0.3 * bound
    freeze(network, trained=lambda name: "mlp" in name)
    assert {n for n, p in network.named_parameters() if p.requires_grad} == {
        n for n in after if "mlp" in n
    }


def test_checkpoints_name_each_layer_s_adapters(groups):
    network = _network(groups)
    attach_adapters(network, SHAPES, precision=Precision.FP32)
    found = {key for key in network.sharded_state_dict() if is_adapter(key)}
    stored = "blocks.layers.self_attention.linear_qkv.lora.1"
    assert {network.sharded_state_dict()[key].key for key in found} == {
        f"{stored}.{part}.{letter}" for part in (0, 2) for letter in "AB"
    }


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_is_a_function_of_seed_adapter_place_and_channel(rate: float):
    place, ones = torch.arange(400), torch.ones(400, 96, dtype=torch.float64)
    where = {"rate": rate, "place_T": place, "first": 0}
    _, whole = dropped(ones, key=adapter_key(5, "a"), **where)
    kept = whole != 0
    assert whole[kept].unique().tolist() == [pytest.approx(1 / (1 - rate))]
    spread = (rate * (1 - rate) / kept.numel()) ** 0.5
    assert abs(kept.double().mean() - (1 - rate)) < 4 * spread
    assert abs(kept.double().mean(0) - (1 - rate)).max() < 5 * spread * 96**0.5 * 20**0.5
    # Neither neighbours, nor another adapter, nor another pack, know of it.
    for other in (
        dropped(ones, key=adapter_key(5, "b"), **where)[1] != 0,
        dropped(ones, key=adapter_key(6, "a"), **where)[1] != 0,
        kept.roll(1, 0),
        kept.roll(1, 1),
    ):
        both = (kept & other).double().mean()
        assert abs(both - (1 - rate) ** 2) < 6 * spread
    # Any part of rows and channels has the numbers of the whole.
    _, part = dropped(
        ones[37:90, :40], rate=rate, key=adapter_key(5, "a"), place_T=place[37:90], first=24
    )
    assert torch.equal(part, whole[37:90, 24:64])


def test_the_way_back_through_dropout_drops_the_same(groups):
    x = torch.randn(9, 8, dtype=torch.float64, requires_grad=True)
    where = {"rate": 0.4, "key": 3, "place_T": torch.arange(9), "first": 0}
    assert torch.autograd.gradcheck(lambda x: dropped(x, **where)[1], (x,))
    # Beside another use of the input, whose gradient becomes the sum.
    other, kept = dropped(x, **where)
    (both,) = torch.autograd.grad([other * 2, kept], x, [torch.ones(9, 8).double()] * 2)
    (own,) = torch.autograd.grad(dropped(x, **where)[1], x, torch.ones(9, 8).double())
    assert torch.equal(both, own + 2)


def test_adapters_drop_in_training_alone_and_parts_drop_other_numbers(groups):
    network = _network(groups)
    attach_adapters(network, SHAPES, precision=Precision.FP32, dropout=0.3)
    randomise(network, seed=2)
    linear: Any = network.get_submodule(QKV)
    x = torch.randn(6, linear.weight.shape[1])
    place = torch.arange(6)
    rows = DropoutRows(seed=1, places={TOKENS: TokenPlaces(whole_T=place, own_T=place)})
    calm = linear(x)
    with dropping(rows):
        first, again = linear(x), linear(x)
        network.eval()
        assert torch.equal(linear(x), calm)
        network.train()
    with dropping(replace(rows, seed=2)):
        assert not torch.allclose(linear(x), first)
    queries = dict(linear.lora._named())["0"].A
    with dropping(rows):
        made = linear.lora._down(x, [queries, queries])[1]
    assert not torch.allclose(made[:, :3], made[:, 3:])  # as PEFT's modules, each of its own
    assert torch.equal(first, again) and not torch.allclose(first, calm)
    assert torch.equal(linear(x), calm)


def test_words_names_and_patterns_choose_linears():
    model = wan_model("t2v")
    of = lambda *targets: set(chosen_adapters(model, LoraConfig(rank=2, targets=targets)))  # noqa: E731
    attention, mlp = of("attention"), of("mlp")
    assert {name.split(".", 2)[2] for name in attention} == {
        *(f"attn{n}.to_{x}" for n in (1, 2) for x in ("q", "k", "v", "out.0"))
    }
    assert {name.split(".", 2)[2] for name in mlp} == {"ffn.net.0.proj", "ffn.net.2"}
    assert of(LoraTargets.ATTENTION, "mlp") == attention | mlp == of("*blocks.*")
    assert of("blocks.1.attn1.to_q") == {"blocks.1.attn1.to_q"}
    assert of("to_q") == of("*.to_q") == {n for n in attention if n.endswith("to_q")}
    assert "condition_embedder.time_proj" in of("*")
    names = {name for pair in adaptable_pairs(model) for name in pair.theirs}
    assert "patch_embedding.weight" not in names  # a convolution


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (("to_qq",), ("lora.targets=to_qq", "to_q")),
        (("attention", "blocks.9.attn1.to_q"), ("blocks.9.attn1.to_q", "near ones are")),
        (("modulation",), ("no linear of that kind",)),
    ],
)
def test_a_target_that_matches_nothing_is_an_error_with_near_names(targets, words):
    with pytest.raises(Problems) as error:
        chosen_adapters(wan_model("t2v"), LoraConfig(rank=2, targets=targets))
    assert all(word in str(error.value) for word in words)


def test_adapters_of_modules_that_are_not_there_are_refused():
    model = wan_model("t2v")
    with pytest.raises(Problems, match=r"blocks\.7\.attn1\.to_q"):
        adapters_by_linear(model, {"blocks.7.attn1.to_q": AdapterShape(rank=1, alpha=1)})
    found = adapters_by_linear(model, SHAPES)
    assert list(found) == [QKV] == [linear_name(pair) for pair, _ in found.values()]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rank": 0}, "rank=0"),
        ({"rank": 4, "alpha": 0.0}, "alpha=0.0"),
        ({"rank": 4, "dropout": 1.0}, "dropout=1.0"),
        ({"rank": 4, "targets": ()}, "targets"),
    ],
)
def test_values_of_lora_are_checked(values, message):
    with pytest.raises(Problems, match=message):
        LoraConfig(**values)
