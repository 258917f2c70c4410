"""What a family says of its networks is so: tensors, parameters, operations, sizes, refusals."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dit.codecs.text import TEXT_ENCODERS
from dit.codecs.vae import CODECS
from dit.config import (
    CUSTOM_SIZE,
    LoraConfig,
    ModelConfig,
    ObjectiveConfig,
    Precision,
    Problems,
    RunConfig,
)
from dit.config_loading import ConfigError, load_config
from dit.config_loading.schema import hints
from dit.convert.diffusers_config import diffusers_transformer_config, model_config
from dit.convert.megatron_checkpoint import stored_shape
from dit.lora.targets import chosen_adapters
from dit.models.registry import (
    diffusers_form,
    family_named,
    family_of,
    named_model,
    pairs,
)
from dit.sizing.flops import forward_flops
from dit.sizing.memory import parameter_count
from recipes.runs import dit_debug
from tests.families.case import COUNTED
from tests.families.table import CASES

FAMILIES = tuple(CASES)
SIZES = {size: name for name in FAMILIES for size in family_named(name).sizes}
TINY = {size: name for name in FAMILIES for size in family_named(name).tiny}


def tiny(size: str, **changes: Any) -> ModelConfig:
    """The family's own tiny network of a named size."""
    family = family_of(named_model(size))
    return family.config(**{**family.sizes[size], **family.tiny[size], "name": "custom", **changes})


def exportable(size: str, **changes: Any) -> Any:
    """The same as Diffusers' class can be."""
    return tiny(size, **{**CASES[TINY[size]].exportable, **changes})


@pytest.mark.parametrize("size", TINY)
def test_a_position_has_as_many_numbers_as_its_rule_says(size: str) -> None:
    model = tiny(size)
    rule = family_of(model).positions(model)
    assert rule(((1, 2, 3),), fps=24.0).shape == (6, rule.axes)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_says_what_others_take_from_it(name: str) -> None:
    family = family_named(name)
    model = family.default()
    assert family_of(model) is family and model.family == name
    assert {f.name for f in fields(ModelConfig)} <= {f.name for f in fields(family.config)}
    for one in (model, *map(named_model, family.sizes)):
        codec = CODECS[family.vae(one)]
        (text, *_) = family.inputs(one)
        assert text.encoder == getattr(codec, "text_encoder", None), one.name
    assert {one.encoder for one in family.inputs(model) if one.encoder} <= {*TEXT_ENCODERS}
    for size, keys in family.objective.of_size.items():
        assert size in family.sizes and {*keys} <= {*hints(ObjectiveConfig)}
    network: Any = family.network()
    turned = (network.sign, network.tells_data_part)
    assert turned == (family.objective.sign, family.objective.tells_data_part)
    for size, keys in family.tiny.items():
        small = family.config(name=size, **{**family.sizes[size], **keys})
        assert small.precision is Precision.FP32 and parameter_count(small) < 1e6
        assert small.num_layers >= 4 and small.num_attention_heads % 4 == 0
    if family.diffusers is not None:
        adapted = chosen_adapters(model, LoraConfig(rank=1))
        names = {name.rpartition(".")[0] for pair in pairs(model) for name in pair.theirs}
        assert names > adapted.keys()


@pytest.mark.parametrize(
    ("size", "why"),
    [(size, why) for name in FAMILIES for size, why in family_named(name).refused.items()],
)
def test_networks_beside_the_family_are_refused_by_name(size: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.name={size} is not .*{re.escape(why)}"):
        load_config(dit_debug(), overrides=[f"model.name={size}"])


def test_named_sizes_belong_to_one_family() -> None:
    assert sum(len(family_named(name).sizes) for name in FAMILIES) == len(SIZES)
    assert CUSTOM_SIZE not in SIZES
    assert all(named_model(size).family == name for size, name in SIZES.items())


@pytest.mark.parametrize("size", SIZES)
def test_named_sizes_have_the_tensors_of_diffusers(size: str) -> None:
    """And the parameters of the published networks, which are written down."""
    model, case = named_model(size), CASES[SIZES[size]]
    with torch.device("meta"):
        theirs = case.network.from_config(diffusers_transformer_config(RunConfig(model=model)))
    wanted = {name: tuple(value.shape) for name, value in theirs.state_dict().items()}
    table = pairs(model)
    assert {name: shape for pair in table for name, shape in pair.their_shapes.items()} == wanted
    assert sum(len(pair.theirs) for pair in table) == len(wanted)
    count = sum(weight.numel() for weight in theirs.parameters())
    assert parameter_count(model) == count
    assert not case.parameters or case.parameters[size] == count


@pytest.mark.parametrize("size", TINY)
def test_every_tensor_of_a_checkpoint_is_named_once(groups, size: str) -> None:
    """Its shape, too; parts of theirs are joined to it, and it is split into them."""
    model = tiny(size)
    network, table = family_of(model).network()(model, groups), pairs(model)
    stored = {
        (entry.key, entry.global_offset[0] if entry.prepend_axis_num else None): entry.global_shape
        for entry in network.sharded_state_dict().values()
        if isinstance(entry, ShardedTensor)
    }
    assert {(pair.ours, pair.layer): stored_shape(pair) for pair in table} == stored
    assert len(stored) == len(table)
    fixed = family_of(model).weights.fixed
    counted = sum(math.prod(pair.shape) for pair in table if pair.ours not in fixed)
    assert counted == parameter_count(model) == sum(p.numel() for p in network.parameters())
    for pair in table:
        whole = torch.arange(math.prod(pair.shape)).view(pair.shape)
        parts = pair.split(whole)
        assert [tuple(part.shape) for part in parts] == [*pair.their_shapes.values()]
        assert torch.equal(pair.join(parts), whole)


@pytest.mark.parametrize("size", [*SIZES, *(f"tiny {size}" for size in TINY)])
def test_settings_survive_the_way_through_config_json(size: str) -> None:
    model = named_model(size) if size in SIZES else exportable(size.removeprefix("tiny "))
    content = json.loads(json.dumps(diffusers_transformer_config(RunConfig(model=model))))
    told = {"precision": model.precision, "text_pad_to": model.text_pad_to}
    again = model_config(content, **told, place="config.json")
    assert again == replace(model, name="custom")


@pytest.mark.parametrize(
    ("name", "size", "changes"),
    [(name, *one) for name, case in CASES.items() for one in case.counted],
)
def test_operations_are_those_of_diffusers(
    groups, resize, name: str, size: str, changes: Mapping[str, Any]
) -> None:
    case, model = CASES[name], exportable(size, **changes)
    network = family_of(model).network()(model, groups)
    assert parameter_count(model) == sum(weight.numel() for weight in network.parameters())
    theirs = case.network(**diffusers_form(model).keys.content(model))
    arguments = case.arguments(model)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        theirs(**{case.level: torch.zeros(1)}, **arguments)
    rows = case.text_rows(arguments) + (getattr(model, "image_rows", 0) or 0)
    tokens = case.attended or math.prod(COUNTED)
    counted = forward_flops(model, tokens=[tokens], text=[rows])
    theirs_alone = case.their_operations(model, tokens, rows) + case.repeated(model)
    assert counted + theirs_alone == counter.get_total_flops()


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [(name, *one) for name, case in CASES.items() for one in case.refused],
)
def test_what_a_network_cannot_be_is_refused(
    name: str, changes: Mapping[str, Any], words: str
) -> None:
    with pytest.raises(Problems, match=words):
        family_named(name).config(
            **{**changes, "name": "custom", "precision": Precision.FP32}  # type: ignore[arg-type]
        )
