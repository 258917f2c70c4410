"""Adapters of LTX-2 in the names of Diffusers, Lightricks and ComfyUI."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_ltx2_lora_to_diffusers
from safetensors.torch import load_file, save_file

from dit.lora.factors import LoraFactors
from dit.lora.files import read_lora, write_lora
from dit.lora.names import to_original
from dit.models.ltx2.diffusers import LTX2_NAMES
from dit.models.registry import named_model
from tests.families import ltx2
from tests.lora_files import comfyui, kohya, linears, random_factors

SIZES = {"2.0": "ltx2.0", "2.3": "ltx2.3"}


@pytest.fixture(params=SIZES)
def made(request: pytest.FixtureRequest) -> tuple[str, dict[str, LoraFactors]]:
    """Adapters of every linear of a network."""
    network = ltx2.random_network(request.param, 3, num_layers=2)
    return SIZES[request.param], random_factors(linears(network))


def test_every_form_of_a_file_is_read(
    made: tuple[str, dict[str, LoraFactors]], tmp_path: Path
) -> None:
    size, factors = made
    names = to_original(factors, LTX2_NAMES)
    assert names is not None
    same = {module: module for module in factors}
    files = [
        *(comfyui(factors, names, alphas=True, prefix=p) for p in ("diffusion_model.", "")),
        kohya(factors, names),
        comfyui(factors, same, alphas=True, prefix="transformer."),
    ]
    for number, tensors in enumerate(files):
        folder = tmp_path / str(number)
        folder.mkdir()
        save_file(tensors, folder / "x.safetensors")
        read = read_lora(folder, named_model(size))
        assert read.keys() == factors.keys()
        for module, one in factors.items():
            assert torch.equal(read[module].down, one.down) and torch.equal(read[module].up, one.up)


def test_diffusers_understands_the_file_for_comfyui(
    made: tuple[str, dict[str, LoraFactors]], tmp_path: Path
) -> None:
    _, factors = made
    write_lora(tmp_path, factors, comfyui_names=LTX2_NAMES)
    stored = load_file(tmp_path / "comfyui/lora.safetensors")
    translated = _convert_non_diffusers_ltx2_lora_to_diffusers(stored)
    found = {name.removeprefix("transformer.").rpartition(".lora_")[0] for name in translated}
    assert found - {""} == factors.keys()
