"""The table names every tensor of both models, in its shape: also at 14 billion parameters."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from diffusers import CosmosTransformer3DModel
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from dit.config import DatasetConfig, Precision, RunConfig
from dit.convert.diffusers_config import diffusers_transformer_config, model_config
from dit.convert.megatron_checkpoint import stored_shape
from dit.models.cost import parameter_count
from dit.models.dit.family import MODEL_SIZES, DitConfig
from dit.models.dit.model import DiT
from dit.models.registry import pairs
from tests.packs import tiny_model

SIZES = [DitConfig(name=name, **sizes) for name, sizes in MODEL_SIZES.items()]
PROJECTED = tiny_model(crossattn_proj_size=24, patch_temporal=2)


@pytest.mark.parametrize("model", [*SIZES, PROJECTED], ids=lambda model: model.name)
def test_every_tensor_of_both_models_is_named_once(groups, model):
    table = pairs(model)
    with torch.device("meta"):
        ours = DiT(model, groups)
        theirs = CosmosTransformer3DModel.from_config(
            diffusers_transformer_config(RunConfig(model=model))
        )
    stored = {
        (entry.key, entry.global_offset[0] if entry.prepend_axis_num else None): entry.global_shape
        for entry in ours.sharded_state_dict().values()
        if isinstance(entry, ShardedTensor)
    }
    assert {(pair.ours, pair.layer): stored_shape(pair) for pair in table} == stored
    assert len(stored) == len(table)
    wanted = {name: tuple(value.shape) for name, value in theirs.state_dict().items()}
    assert {name: shape for pair in table for name, shape in pair.their_shapes.items()} == wanted
    assert sum(len(pair.theirs) for pair in table) == len(wanted)
    assert sum(math.prod(pair.shape) for pair in table) == parameter_count(model)


@pytest.mark.parametrize("model", [SIZES[-1], PROJECTED], ids=lambda model: model.name)
def test_conversion_has_the_shapes_of_both_sides(groups, model):
    for pair in pairs(model):
        whole = torch.empty(pair.shape, device="meta")
        parts = pair.split(whole)
        assert [tuple(part.shape) for part in parts] == [*pair.their_shapes.values()]
        assert pair.join(parts).shape == pair.shape


@pytest.mark.parametrize("model", [*SIZES, PROJECTED], ids=lambda model: model.name)
def test_settings_survive_the_way_through_config_json(model):
    content = json.loads(json.dumps(diffusers_transformer_config(RunConfig(model=model))))
    told = {"precision": model.precision, "text_pad_to": None}  # what an export says counts
    again = model_config(content, **told, place="config.json")
    assert again == replace(model, name="custom")


# TRANSFORMER_CONFIGS of Diffusers' scripts/convert_cosmos_to_diffusers.py (read on 2026-11-22),
# which made the published folders of Cosmos 1.
PUBLISHED = {
    "_class_name": "CosmosTransformer3DModel",
    "_diffusers_version": "0.34.0.dev0",
    "adaln_lora_dim": 256,
    "attention_head_dim": 128,
    "concat_padding_mask": True,
    "extra_pos_embed_type": "learnable",
    "in_channels": 16,
    "max_size": [128, 240, 240],
    "mlp_ratio": 4.0,
    "num_attention_heads": 32,
    "num_layers": 28,
    "out_channels": 16,
    "patch_size": [1, 2, 2],
    "rope_scale": [2.0, 1.0, 1.0],
    "text_embed_dim": 1024,
}
PUBLISHED_14B = {"num_attention_heads": 40, "num_layers": 36, "rope_scale": [2.0, 2.0, 2.0]}
PREDICT2 = PUBLISHED | {
    **{"extra_pos_embed_type": None, "num_attention_heads": 16, "rope_scale": [1.0, 4.0, 4.0]},
}
PREDICT2_VIDEO = PREDICT2 | {"in_channels": 17, "rope_scale": [1.0, 3.0, 3.0]}
PREDICT2_5 = PREDICT2_VIDEO | {
    **{"use_crossattn_projection": True, "crossattn_proj_in_channels": 100352},
    "encoder_hidden_states_channels": 1024,
}
LARGE = {"num_attention_heads": 40, "num_layers": 36}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("cosmos_7b", PUBLISHED),
        ("cosmos_7b", {"_class_name": "CosmosTransformer3DModel"}),  # all are Diffusers' defaults
        ("cosmos_14b", PUBLISHED | PUBLISHED_14B),
        ("cosmos_predict2_2b", PREDICT2),
        ("cosmos_predict2_14b", PREDICT2 | LARGE),
        ("cosmos_predict2_2b_video2world", PREDICT2_VIDEO),
        (
            "cosmos_predict2_14b_video2world",
            PREDICT2_VIDEO | LARGE | {"rope_scale": [20 / 24, 2.0, 2.0]},
        ),
        ("cosmos_predict2.5_2b", PREDICT2_5),
        ("cosmos_predict2.5_14b", PREDICT2_5 | LARGE),
    ],
)
def test_the_published_cosmos_is_the_named_size(name, content):
    named = DitConfig(name=name, **MODEL_SIZES[name])
    imported = model_config(content, precision=Precision.BF16, place="")
    assert imported == replace(named, name="custom")


@pytest.mark.parametrize(
    ("name", "layers", "width", "heads"),  # DiT: arXiv:2212.09748, Table 1
    [("s", 12, 384, 6), ("b", 12, 768, 12), ("l", 24, 1024, 16), ("xl", 28, 1152, 16)],
)
def test_named_sizes_are_those_of_the_paper(name, layers, width, heads):
    size = {"num_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    assert MODEL_SIZES[f"dit_{name}"] == size


def test_rotary_positions_of_an_export_reach_as_far_as_training():
    model = DitConfig(name="dit_xl", **MODEL_SIZES["dit_xl"])
    for dataset, size in (
        (DatasetConfig(), (128, 240, 240)),
        (DatasetConfig(path="data", task_encoder_seq_length=4096), (4096, 8192, 8192)),
    ):
        content = diffusers_transformer_config(RunConfig(model=model, dataset=dataset))
        assert tuple(content["max_size"]) == size
        # Not a setting of the model: an import has the one it was trained with.
        told = {"precision": model.precision, "text_pad_to": None}
        assert model_config(content, **told, place="").max_size == model.max_size


def test_splitting_undoes_joining():
    model = tiny_model(patch_temporal=2, patch_spatial=3)
    for pair in pairs(model):
        whole = torch.arange(math.prod(pair.shape)).view(pair.shape)
        assert torch.equal(pair.join(pair.split(whole)), whole)
