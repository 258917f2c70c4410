"""Adapters: their arithmetic beside fused linears, their dropout, which linears get one, how they
follow from those of Diffusers' modules, and what a run trains by its keys and its checkpoint.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dit.checkpoint_paths import ADAPTERS, CheckpointError
from dit.config import LoraConfig, LoraTargets, Precision, Problems
from dit.config_loading import save_config
from dit.lora.adapter import AdapterShape, adapter_key, dropped, freeze, narrowed
from dit.lora.checkpoint import DRAWN, AdapterRun, adapter_run, adapters_of, check_told
from dit.lora.factors import LoraFileError, from_stored, linear_shapes, shapes_of, to_stored
from dit.lora.targets import (
    adapters_by_linear,
    attach_adapters,
    chosen_adapters,
    linear_name,
    stored_name,
    their_modules,
)
from dit.models.dit.family import DitConfig
from dit.models.layer_spec import TOKENS
from dit.models.layers.adaptable import (
    DropoutRows,
    TokenPlaces,
    dropping,
    is_adapter,
    is_up,
)
from dit.models.linears import matrices_of_linears
from dit.models.wan.model import WanNetwork
from dit.train.checkpoint.adapters import initialise_adapters, load_adapted
from dit.train.model_and_optimizer import randomise
from tests.families.flux import flux_model
from tests.families.wan import CONDITIONS, wan_model
from tests.float64 import IN_FLOAT64
from tests.lora_files import random_factors
from tests.packs import run_config

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
    linear.double()
    heads, parts = linear.lora.groups, len(linear.lora.parts)
    x = torch.randn(7, linear.weight.shape[1], dtype=torch.float64, requires_grad=True)
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
        assert (got - right).abs().max() <= IN_FLOAT64 * right.abs().max(), name


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
    initialise_adapters(network, seed=1)
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
    names = {name for pair in matrices_of_linears(model) for name in pair.theirs}
    assert "patch_embedding.weight" not in names  # a convolution


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (("to_qq",), ("lora.targets=to_qq", "to_q")),
        (("attention", "blocks.9.attn1.to_q"), ("blocks.9.attn1.to_q", "use a name such as")),
        (("modulation",), ("no such linears",)),
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


DIT = {
    "name": "custom",
    "num_layers": 2,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "crossattn_emb_size": 16,
    "in_channels": 4,
}
MODELS = {f"wan {kind}": wan_model(kind) for kind in CONDITIONS}
MODELS |= {
    "flux": flux_model(),
    "dit": DitConfig(**DIT),
    "projected": DitConfig(**DIT, crossattn_proj_size=20),
}


@pytest.fixture(params=MODELS)
def case(request):
    model = MODELS[request.param]
    pairs = matrices_of_linears(model)
    mine = {name for pair in pairs for name in their_modules(pair)}
    shapes = {name: size for name, size in linear_shapes(model).items() if name in mine}
    # Ranks of q, k and v differ, and one of them has no adapter.
    del shapes[next(name for name in shapes if name.endswith(("attn1.to_k", "attn.to_k")))]
    made = random_factors(shapes, ranks={"to_q": 3, "to_v": 5})
    return model, made


def test_the_product_of_ours_is_the_arranged_product_of_theirs(case) -> None:
    model, factors = case
    stored = to_stored(factors, model)
    assert len(stored) == 2 * len(factors)
    for pair in matrices_of_linears(model):
        names, shapes = their_modules(pair), pair.their_shapes.values()
        theirs = [
            factors[name].up.double() @ factors[name].down.double()
            if name in factors
            else torch.zeros(size, dtype=torch.float64)
            for name, size in zip(names, shapes, strict=True)
        ]
        wanted = pair.join(theirs)
        heads, ours = pair.model.num_attention_heads if len(names) > 1 else 1, []
        for part, (name, size) in enumerate(zip(names, shapes, strict=True)):
            product = torch.zeros(size, dtype=torch.float64)
            if name in factors:
                down, up = (stored[stored_name(pair, part, letter)].double() for letter in "AB")
                product = up @ down
            ours.append(product.unflatten(0, (heads, -1)))
        made = torch.cat(ours, dim=1).flatten(0, 1)
        torch.testing.assert_close(made, wanted, rtol=1e-13, atol=1e-13)


def test_the_way_back_gives_every_bit(case) -> None:
    model, factors = case
    stored = to_stored(factors, model)
    back = from_stored(shapes_of(factors), model, stored.__getitem__)
    assert back.keys() == factors.keys()
    for name, one in back.items():
        assert torch.equal(one.down, factors[name].down)
        assert torch.equal(one.up, factors[name].up) and one.alpha == factors[name].alpha


RUN = AdapterRun(
    adapters={"transformer_blocks.0.attn1.to_q": AdapterShape(rank=2, alpha=3.0)},
    base=DRAWN,
)


def test_a_checkpoint_of_adapters_says_what_they_are(tmp_path):
    assert adapters_of(tmp_path) is None
    (tmp_path / ADAPTERS).write_text(RUN.as_json())
    assert adapters_of(tmp_path) == RUN
    config = run_config(lora=LoraConfig(rank=2))
    save_config(config, tmp_path / "config.yaml")
    assert adapter_run(config, tmp_path) == RUN


@pytest.mark.parametrize(
    ("lora", "refused"),
    [
        (
            LoraConfig(rank=3, alpha=2),
            r"lora\.rank=3 \(these have 2\); lora\.alpha=2 \(these have 3\)",
        ),
        (LoraConfig(init_from="file"), r"lora\.init_from=file \(a file of other adapters\)"),
        (LoraConfig(rank=2), None),
    ],
)
def test_a_new_run_from_adapters_asks_for_no_others(lora, refused):
    """Those of the checkpoint train; other targets are only said, for imports name all modules."""
    config, said = run_config(lora=lora), list[str]()
    if refused:
        with pytest.raises(Problems, match=refused):
            check_told(RUN.adapters, Path("run"), config, said.append)
        return
    check_told(RUN.adapters, Path("run"), config, said.append)
    assert said == ["the run resumes with the adapters of run, and lora.targets is not used"]
    said.clear()
    every = {name: AdapterShape(rank=2, alpha=2) for name in chosen_adapters(config.model, lora)}
    check_told(every, Path("run"), config, said.append)
    assert not said


def test_weights_that_are_in_no_file_show_nothing(tmp_path):
    (tmp_path / ADAPTERS).write_text(RUN.as_json())
    with pytest.raises(CheckpointError, match="are in no file: they were drawn at"):
        load_adapted(tmp_path, nn.Linear(1, 1), None, averaged=False, read_folder=None)


def test_adapters_alone_are_no_weights_to_train(tmp_path):
    (tmp_path / ADAPTERS).write_text(RUN.as_json())
    with pytest.raises(CheckpointError, match="holds only LoRA adapters"):
        adapter_run(run_config(), tmp_path)


def test_keys_of_text_encoders_are_left_out_where_the_run_says_so(tmp_path):
    config = run_config()
    name, (outputs, inputs) = next(iter(linear_shapes(config.model).items()))
    one = random_factors({name: (outputs, inputs)})[name]
    file = tmp_path / "x.safetensors"
    tensors = {f"{name}.lora_A.weight": one.down, f"{name}.lora_B.weight": one.up}
    save_file(tensors | {"text_encoder.m.lora_A.weight": torch.ones(2, 2)}, file)
    dataset = replace(config.dataset, mock=True)  # adapters beside weights of a seed
    lora = LoraConfig(init_from=str(file))
    with pytest.raises(LoraFileError, match=r"lora\.ignore_text_encoder=true"):
        adapter_run(replace(config, dataset=dataset, lora=lora), None)
    said: list[str] = []
    lora = replace(lora, ignore_text_encoder=True)
    found = adapter_run(replace(config, dataset=dataset, lora=lora), None, said.append)
    assert found is not None and list(found.adapters) == [name]
    assert [line for line in said if "1 of 3 keys are of text encoders" in line] == said != []


BASE = '{"path": null, "averaged": false, "digest": ""}'
DAMAGED = {
    "empty": "",
    "no keys": "{}",
    "base": '{"base": 1, "adapters": {}}',
    "half a base": '{"base": {"path": null}, "adapters": {}}',
    "key": f'{{"base": {BASE}, "adapters": {{}}, "more": 1}}',
    "rank": f'{{"base": {BASE}, "adapters": {{"a": {{"rank": 0, "alpha": 1.0}}}}}}',
    "alpha": f'{{"base": {BASE}, "adapters": {{"a": {{"rank": 1, "alpha": Infinity}}}}}}',
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / ADAPTERS).write_text(content)
    with pytest.raises(CheckpointError, match=ADAPTERS):
        adapters_of(tmp_path)
    (tmp_path / ADAPTERS).write_text(f'{{"base": {BASE}, "adapters": {{}}}}')
    assert adapters_of(tmp_path) == AdapterRun(base=DRAWN, adapters={})
