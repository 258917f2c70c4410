"""The table names every tensor of both models, in its shape: also at 14 billion parameters."""

from __future__ import annotations

import math

import pytest
import torch
from diffusers import CosmosTransformer3DModel
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from dit.config import MODEL_SIZES, ModelConfig, RunConfig
from dit.configuring import parameter_count
from dit.convert.settings import transformer_config
from dit.convert.stored import stored_shape
from dit.convert.table import pairs
from dit.model.dit import DiT
from tests.packs import tiny_model

SIZES = [ModelConfig(name=name, **sizes) for name, sizes in MODEL_SIZES.items()]
PROJECTED = tiny_model(crossattn_proj_size=24, patch_temporal=2)


@pytest.mark.parametrize("model", [*SIZES, PROJECTED], ids=lambda model: model.name)
def test_every_tensor_of_both_models_is_named_once(groups, model):
    table = pairs(model)
    with torch.device("meta"):
        ours = DiT(model, groups)
        theirs = CosmosTransformer3DModel.from_config(transformer_config(RunConfig(model=model)))
    stored = {
        (entry.key, entry.global_offset[0] if entry.prepend_axis_num else None): entry.global_shape
        for entry in ours.sharded_state_dict().values()
        if isinstance(entry, ShardedTensor)
    }
    assert {(pair.ours, pair.layer): stored_shape(pair) for pair in table} == stored
    assert len(stored) == len(table)
    wanted = {name: tuple(value.shape) for name, value in theirs.state_dict().items()}
    assert {name: pair.their_shape for pair in table for name in pair.theirs} == wanted
    assert sum(len(pair.theirs) for pair in table) == len(wanted)
    assert sum(math.prod(pair.shape) for pair in table) == parameter_count(model)


@pytest.mark.parametrize("model", [SIZES[-1], PROJECTED], ids=lambda model: model.name)
def test_conversion_has_the_shapes_of_both_sides(groups, model):
    for pair in pairs(model):
        whole = torch.empty(pair.shape, device="meta")
        parts = pair.split(whole)
        assert [tuple(part.shape) for part in parts] == [pair.their_shape] * len(pair.theirs)
        assert pair.join(parts).shape == pair.shape


def test_splitting_undoes_joining():
    model = tiny_model(patch_temporal=2, patch_spatial=3)
    for pair in pairs(model):
        whole = torch.arange(math.prod(pair.shape)).view(pair.shape)
        assert torch.equal(pair.join(pair.split(whole)), whole)
