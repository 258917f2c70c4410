"""Networks of billions of parameters are imported on the meta device, every name and shape."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import CosmosTransformer3DModel, WanTransformer3DModel
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from dit.config import Precision
from dit.convert.diffusers_checkpoint import DiffusersFolder, Header
from dit.convert.diffusers_config import model_config
from dit.convert.errors import ConvertError
from dit.convert.load_hf.settings import checked_table
from dit.convert.megatron_checkpoint import stored_shape
from dit.models.registry import family_of, named_model

# TRANSFORMER_CONFIGS of Diffusers' scripts/convert_wan_to_diffusers.py; the rest are its defaults,
# which are those of the text-to-video network of 14B.
SHOWN = {"in_channels": 36, "out_channels": 16}
CLIP = {"image_dim": 1280, "added_kv_proj_dim": 5120}
SMALL = {"num_attention_heads": 24, "num_layers": 30, "ffn_dim": 14336}
COSMOS = {"num_attention_heads": 40, "num_layers": 36, "rope_scale": (2.0, 2.0, 2.0)}
PUBLISHED: dict[str, tuple[Any, dict[str, Any]]] = {
    "wan2.1_t2v_14b": (WanTransformer3DModel, {}),
    "wan2.1_i2v_14b": (WanTransformer3DModel, {**SHOWN, **CLIP}),
    "wan2.1_flf2v_14b": (WanTransformer3DModel, {**SHOWN, **CLIP, "pos_embed_seq_len": 514}),
    "wan2.2_i2v_a14b": (WanTransformer3DModel, SHOWN),
    "wan2.2_ti2v_5b": (WanTransformer3DModel, {**SMALL, "in_channels": 48, "out_channels": 48}),
    "cosmos_14b": (CosmosTransformer3DModel, COSMOS),
}


def folder(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> DiffusersFolder:
    """What an import knows of a folder with these tensors before it reads one."""
    place = Path("published")
    headers = {
        name: Header(file=place / "weights", kind="BF16", shape=shape)
        for name, shape in shapes.items()
    }
    others: dict[str, Any] = dict.fromkeys(("scheduler", "pipeline", "level_range"))
    others["is_distilled"] = False
    return DiffusersFolder(
        path=place, config=config, scheduler_file=place / "scheduler", headers=headers, **others
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_tensor_arrives_in_the_shape_of_our_network(groups, name: str) -> None:
    network, sizes = PUBLISHED[name]
    with torch.device("meta"):
        theirs = network(**sizes)
        config = {"_class_name": network.__name__, **theirs.config}
        model = model_config(config, precision=Precision.BF16, place="config.json")
        ours = family_of(model).network()(model, groups)
    assert model == replace(named_model(name), name="custom")
    tensors = theirs.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    table = checked_table(folder({}, shapes), model)
    joined = {
        (pair.ours, pair.layer): tuple(pair.join([tensors[one] for one in pair.theirs]).shape)
        for pair in table
    }
    assert joined == {(pair.ours, pair.layer): pair.shape for pair in table}
    wanted = {
        (entry.key, entry.global_offset[0] if entry.prepend_axis_num else None): entry.global_shape
        for entry in ours.sharded_state_dict().values()
        if isinstance(entry, ShardedTensor)
    }
    assert {(pair.ours, pair.layer): stored_shape(pair) for pair in table} == wanted
    wrong, first = dict(shapes), next(iter(shapes))
    wrong[first] = (*wrong[first], 1)
    with pytest.raises(ConvertError, match=first):
        checked_table(folder({}, wrong), model)
