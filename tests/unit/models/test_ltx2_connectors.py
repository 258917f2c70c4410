"""LTX-2's connectors, of a pipeline's folder: captions of any length, as Diffusers makes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
from torch import Tensor

from dit.config import Weights
from dit.convert.export import ExportOptions, export_weights
from dit.convert.import_ import import_weights
from dit.convert.verify import compare_forward, compare_tensors
from dit.models.ltx2.family import FAMILY, SOUND_TEXT, TextConnectors
from dit.models.ltx2.model import Ltx2Network
from dit.models.parameter_groups import frozen_weights, own_name
from dit.sizing.count_work import count_work
from dit.sizing.inventory import alone
from dit.train.checkpoint.state_dict import load_weights
from tests.families import case, ltx2
from tests.packs import random_pack

ROWS, REGISTERS, TEXTS = 16, 8, (5, 16, 1)
HEADS: dict[str, Any] = {
    f"{one}_connector_{name}": value
    for one in ("video", "audio")
    for name, value in {
        "num_attention_heads": 3,
        "num_layers": 2,
        "num_learnable_registers": REGISTERS,
    }.items()
}
KINDS: dict[str, dict[str, Any]] = {
    "2.0": {"video_connector_attention_head_dim": 8, "audio_connector_attention_head_dim": 8},
    "2.3": {
        **{"video_connector_attention_head_dim": 16, "audio_connector_attention_head_dim": 8},
        **{"video_gated_attn": True, "audio_gated_attn": True, "proj_bias": True},
        **{"per_modality_projections": True, "video_hidden_dim": 48, "audio_hidden_dim": 24},
    },
}


def made_by(connector: Any, text_1LE: Tensor) -> Tensor:
    """What Diffusers makes of a caption, with its padding on the left."""
    free = ROWS - text_1LE.shape[1]
    mask = torch.zeros(1, 1, 1, ROWS)
    mask[..., :free] = torch.finfo(torch.float32).min
    padding = torch.full((1, free, text_1LE.shape[2]), 7.0)  # whatever the encoder makes of it
    return connector(torch.cat([padding, text_1LE], dim=1), mask)[0]


@pytest.mark.parametrize("version", KINDS)
def test_captions_pass_the_connectors_of_a_pipeline(groups, tmp_path: Path, version: str) -> None:
    sizes: dict[str, Any] = {"attention_head_dim": 16, "audio_attention_head_dim": 8}
    sizes |= {"cross_attention_dim": 48, "audio_cross_attention_dim": 24, "caption_channels": 24}
    heads = {"num_attention_heads": 3, "audio_num_attention_heads": 3, "patch_size": 1}
    network = ltx2.random_network(version, 3, **sizes, **heads, num_layers=2)
    own: dict[str, Any] = {"caption_channels": 24, "text_proj_in_factor": 3, "rope_type": "split"}
    connectors = LTX2TextConnectors(**own, **HEADS, **KINDS[version]).eval()
    case.fill_random(connectors, seed=1)
    network.save_pretrained(tmp_path / "hf/transformer")
    connectors.save_pretrained(tmp_path / "hf/connectors")
    done = import_weights(
        tmp_path / "hf", tmp_path / "ours", objective=["model.text_connectors=frozen"]
    )
    model: Any = replace(done.config.model, connector_rows=ROWS)
    ours = Ltx2Network(model, groups)
    load_weights(done.path, [ours], groups, averaged=False)

    batch = random_pack([(2, 2, 3)] * 3, TEXTS, model=model, fps=(24.0,) * 3, family=FAMILY)
    batch = replace(batch, others={})  # without sound
    level_M = torch.cat([torch.tensor([812.5, 20.0, 437.0]), torch.zeros(3)])
    made_TC = ours(batch.latent_TC, level_M, batch)
    made_TC.sum().backward()
    frozen = {name for name, one in ours.named_parameters() if not one.requires_grad}
    assert frozen == {name for name, _ in ours.named_parameters() if ".connector." in name}
    # What is not averaged in training is not expected in a stored average either.
    config = replace(done.config, model=model)
    assert {own_name(weight) for weight in frozen_weights(config).alone} == frozen
    assert all(one.grad is not None for one in ours.parameters() if one.requires_grad)
    with torch.no_grad():
        for index, start in enumerate(batch.starts[:-1]):
            text = case.text_of(batch, index)
            heard = case.text_of(batch, index, SOUND_TEXT) if version != "2.0" else text
            wanted = network(
                hidden_states=batch.latent_TC[None, start : start + 12],
                audio_hidden_states=torch.zeros(1, 1, model.sound_channels),
                encoder_hidden_states=made_by(connectors.video_connector, text),
                audio_encoder_hidden_states=made_by(connectors.audio_connector, heard),
                timestep=level_M[index].where(torch.arange(12) >= 6, 0)[None],
                sigma=level_M[index : index + 1],
                audio_timestep=torch.zeros(1),
                **{"num_frames": 2, "height": 2, "width": 3, "fps": 24.0},
                **{"audio_num_frames": 1, "isolate_modalities": True, "return_dict": False},
            )[0][0]
            found = made_TC[start : start + 12]
            assert case.gap(found, wanted) < 2e-5

    report, _ = compare_tensors(tmp_path / "hf", done.path, Weights.MODEL)
    assert (report.different, report.count) == (0, done.tensors)
    forward = compare_forward(tmp_path / "hf", done.path, Weights.MODEL)
    assert forward.largest <= 2e-5 * forward.scale
    # The pipeline's own folder keeps the connectors, whose first linears are nowhere here.
    export_weights(done.path, tmp_path / "back", ExportOptions(scheduler=False))
    assert not (tmp_path / "back/connectors").exists()
    again = type(network).from_pretrained(tmp_path / "back").state_dict()
    assert all(torch.equal(again[key], value) for key, value in network.state_dict().items())


def test_work_on_captions_follows_from_the_rows_of_connectors() -> None:
    """Also below the 128 rows that are usual in measuring: each latent attends to all rows."""
    works = []
    for rows in (8, 16, 256):
        told: Any = {"text_connectors": TextConnectors.FROZEN, "connector_rows": rows}
        told["text_projections"] = False
        tiny: Any = {**FAMILY.tiny["ltx2.3"], **told, "connector_registers": 8}
        _, layers, _ = count_work(alone(FAMILY.config(name="custom", **tiny)))
        works.append(layers[0].attention.n)
    assert works[0] > 0 and [work / works[0] for work in works] == [1, 2, 32]
