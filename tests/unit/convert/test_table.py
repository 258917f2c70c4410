"""Named sizes and config.json of Cosmos: those that are published, and what an export adds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dit.config import DatasetConfig, Precision, RunConfig
from dit.convert.diffusers_config import diffusers_transformer_config, model_config
from dit.models.dit.family import MODEL_SIZES, DitConfig
from tests.families.dit import NETWORKS, random_model
from tests.tables import table

# TRANSFORMER_CONFIGS of Diffusers' scripts/convert_cosmos_to_diffusers.py (read on 2026-11-22),
# which made the published folders of Cosmos 1.
PUBLISHED = table(__file__, "published")
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


@pytest.mark.parametrize("name", NETWORKS)
def test_captions_and_frame_rates_of_predict(name):
    """Captions of Predict2 are filled up and its frames are told; those of 2.5 are neither."""
    content = dict(random_model(**NETWORKS[name]).config) | {
        "_class_name": "CosmosTransformer3DModel"
    }
    found = model_config(content, precision=Precision.FP32, place="")
    wanted = (None, None) if "2.5" in name else (512, 24.0)
    assert (found.text_pad_to, found.base_fps) == wanted
