"""Texts and latents of Ideogram 4 are its pipeline's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2
from diffusers.pipelines.ideogram4.pipeline_ideogram4 import Ideogram4Pipeline
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from transformers import AutoTokenizer, Qwen3VLModel

from tests.families import encoding, ideogram4

CAPTIONS = ["a red bird on a roof", "", "x" * 60]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ideogram4.encoders(tmp_path_factory.mktemp("ideogram4"))


def test_texts_are_those_of_the_pipeline(folder: Path) -> None:
    """States of thirteen layers laid through each other; the padding before a chat changes none."""
    ours = encoding.encoder("ideogram4", folder, max_sequence_length=40)
    assert (ours.width, ours.max_length) == (13 * 16, 40)
    network = Qwen3VLModel.from_pretrained(folder, subfolder="text_encoder").eval()
    letters = AutoTokenizer.from_pretrained(folder, subfolder="tokenizer")
    pipe = Ideogram4Pipeline(None, None, network, letters, None, None)  # type: ignore[arg-type]
    for caption in CAPTIONS:
        told: Any = {"max_sequence_length": 100, "device": "cpu"}
        with torch.no_grad():
            rows_1LE, *_, kinds_1L = pipe.encode_prompt(caption, grid_h=0, grid_w=0, **told)
        expected_LE = rows_1LE[0][kinds_1L[0] > 0]
        found_LE = ours.embed(caption)["text"]
        assert len(found_LE) == min(len(expected_LE), 40)
        assert (found_LE - expected_LE[:40]).abs().max() < 1e-5
        assert ours.is_cut(caption) == (len(expected_LE) > 40) == (caption == CAPTIONS[2])
    encoding.check_card(ours)
    assert ours.notices == ("each token of a caption takes 0 KB",)


def test_latents_decode_as_in_the_pipeline(folder: Path) -> None:
    """Numbers of a cell lie in another order than FLUX.2's, and statistics with them."""
    vae = AutoencoderKLFlux2.from_pretrained(folder, subfolder="vae")
    model = encoding.codec("ideogram4", folder)
    cells = torch.randn(16, 1, 5, 7, generator=torch.Generator().manual_seed(0))
    mean, std = vae.bn.running_mean, (vae.bn.running_var + vae.config.batch_norm_eps).sqrt()
    plain_TC = cells.flatten(1).T * std + mean
    split = plain_TC.view(5, 7, 2, 2, 4).permute(4, 0, 2, 1, 3).reshape(1, 4, 10, 14)
    with torch.no_grad():
        wanted = vae.decode(split).sample[0]
    found = model.decode_raw(model.whitening.undo(cells))
    assert (found[:, 0] - wanted).abs().max() < 1e-5
    shown = torch.rand(3, 1, 20, 28, generator=torch.Generator().manual_seed(1)) * 2 - 1
    with torch.no_grad():
        whole = vae.encode(shown[:, 0][None]).latent_dist.mode()[0]
    of_cells = whole.view(4, 5, 2, 7, 2).permute(2, 4, 0, 1, 3).reshape(16, 5, 7)
    assert (model.encode_raw(shown)[:, 0] - of_cells).abs().max() < 1e-5
    assert not model.edits_pictures


@pytest.mark.parametrize("size", ["1GB", "20KB"])
def test_texts_of_eight_bits_are_multiplied_out(folder: Path, tmp_path: Path, size: str) -> None:
    """Published folders have the text encoder so, in one file or in several; the network, too."""
    network = Qwen3VLModel.from_pretrained(folder, subfolder="text_encoder")
    weights, stored = network.state_dict(), {}
    for name, weight in weights.items():
        stored[name] = weight
        if name.endswith("proj.weight") and weight.dim() == 2:
            scale_O = weight.abs().amax(1) / 448
            stored[name] = (weight / scale_O[:, None]).to(torch.float8_e4m3fn)
            stored[f"{name}_scale"] = scale_O
            weights[name] = stored[name].float() * scale_O[:, None]
    for place in ("plain", "scaled"):
        shutil.copytree(folder, tmp_path / place)
    network.load_state_dict(weights)
    network.save_pretrained(tmp_path / "plain" / "text_encoder")
    split = split_torch_state_dict_into_shards(stored, max_shard_size=size)
    at = tmp_path / "scaled" / "text_encoder"
    names = {file: file.replace("pytorch_", "") for file in split.filename_to_tensors}
    (at / "model.safetensors").unlink()
    for file, members in split.filename_to_tensors.items():
        save_file({n: stored[n].contiguous() for n in members}, at / names[file], {"format": "pt"})
    if split.is_sharded:
        told = {name: names[file] for name, file in split.tensor_to_filename.items()}
        index = {"metadata": {}, "weight_map": told}
        (at / "model.safetensors.index.json").write_text(json.dumps(index))
    plain, scaled = (encoding.encoder("ideogram4", tmp_path / one) for one in ("plain", "scaled"))
    assert torch.equal(scaled.encode(CAPTIONS[0]), plain.encode(CAPTIONS[0]))
    assert not torch.equal(
        plain.encode(CAPTIONS[0]), encoding.encoder("ideogram4", folder).encode(CAPTIONS[0])
    )
