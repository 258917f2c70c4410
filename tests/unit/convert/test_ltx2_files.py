"""LTX-2 from single files: 2.0's and 2.3's, with other parts in them, and 2.5's network alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders.single_file_utils import convert_ltx2_transformer_to_diffusers
from safetensors.torch import save_file
from torch import Tensor

from dit.config import Weights
from dit.convert.errors import ConvertError
from dit.convert.export import ExportOptions, export_weights
from dit.convert.import_ import import_weights
from dit.convert.verify import compare_forward, compare_tensors
from tests.families import ltx2

ORIGINAL = {
    r"^(audio_)?proj_in": r"\1patchify_proj",
    r"^(audio_)?time_embed": r"\1adaln_single",
    r"^(audio_)?prompt_adaln": r"\1prompt_adaln_single",
    r"^av_cross_attn_(video|audio)_scale_shift": r"av_ca_\1_scale_shift_adaln_single",
    r"^av_cross_attn_(?:video|audio)_(a2v|v2a)_gate": r"av_ca_\1_gate_adaln_single",
    r"(video|audio)_a2v_cross_attn_scale_shift_table": r"scale_shift_table_a2v_ca_\1",
    r"norm_([qk])\.": r"\1_norm.",
}
"""Diffusers' names -> Lightricks'."""
BESIDE = ("vae.decoder.conv.weight", "text_embedding_projection.aggregate_embed.weight")
CONNECTOR = "video_embeddings_connector.learnable_registers"
PREFIX = "model.diffusion_model."


def original(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, value in tensors.items():
        for theirs, own in ORIGINAL.items():
            name = re.sub(theirs, own, name)
        found[f"{prefix}{name}"] = value.contiguous()
    return found


@pytest.mark.parametrize("version", ["2.0", "2.3", "2.5"])
def test_a_single_file_has_the_weights_of_the_folder(groups, tmp_path: Path, version: str) -> None:
    # Nothing in a file of 2.0 tells its heads, 32.
    heads: Any = {"num_attention_heads": 32, "audio_num_attention_heads": 32}
    widths: Any = {"attention_head_dim": 2, "audio_attention_head_dim": 2}
    widths |= {"cross_attention_dim": 64, "audio_cross_attention_dim": 64, "patch_size": 1}
    network = ltx2.random_network(version, 5, **heads, **widths, num_layers=2)
    tensors = network.state_dict()
    alone = version == "2.5"
    stored = original(tensors, "" if alone else PREFIX)
    if version == "2.0":  # later ones have names that Diffusers' reader does not know
        assert convert_ltx2_transformer_to_diffusers(dict(stored)).keys() == tensors.keys()
    beside = {} if alone else {name: torch.ones(2) for name in BESIDE}
    connector = {f"{'' if alone else PREFIX}{CONNECTOR}": torch.ones(2)}
    file = tmp_path / f"ltx-{version}.safetensors"
    save_file({**stored, **beside, **connector}, file)
    done = import_weights(file, tmp_path / "ours")
    assert done.tensors == len(tensors)
    report, _ = compare_tensors(file, done.path, Weights.MODEL)
    assert (report.different, report.count) == (0, len(tensors))
    forward = compare_forward(file, done.path, Weights.MODEL)
    assert forward.largest <= 1e-5 * forward.scale
    export_weights(done.path, tmp_path / "back", ExportOptions(scheduler=False))
    again = type(network).from_pretrained(tmp_path / "back")
    assert all(torch.equal(again.state_dict()[key], value) for key, value in tensors.items())
    told = [{k: v for k, v in one.config.items() if k[0] != "_"} for one in (network, again)]
    for one in told:
        one["vae_scale_factors"] = tuple(one["vae_scale_factors"])
        del one["caption_channels"]  # which only 2.0 reads
    assert told[0] == told[1]


def test_another_file_is_refused(tmp_path: Path) -> None:
    save_file({"proj_in.weight": torch.ones(2, 2)}, tmp_path / "x.safetensors")
    with pytest.raises(ConvertError, match=r"x\.safetensors has tensors of no network"):
        import_weights(tmp_path / "x.safetensors", tmp_path / "ours")
