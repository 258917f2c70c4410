"""Adapters of Diffusers' modules as adapters of our linears: the same change of every weight."""

from __future__ import annotations

import pytest
import torch

from dit.lora.factors import from_stored, linear_shapes, shapes_of, to_stored
from dit.lora.targets import adaptable_pairs, stored_name, their_modules
from dit.models.dit.family import DitConfig
from tests.flux_networks import flux_model
from tests.lora_files import random_factors
from tests.wan_networks import CONDITIONS, wan_model

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
    pairs = adaptable_pairs(model)
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
    for pair in adaptable_pairs(model):
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
