"""Adapters of LTX-2 in the names of Diffusers, Lightricks and ComfyUI."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import LTX2Pipeline
from safetensors.torch import load_file, save_file

from dit.lora.factors import LoraFactors
from dit.lora.files import read_lora, write_lora
from dit.lora.names import to_original
from dit.models.ltx2.diffusers import LTX2_NAMES
from dit.models.registry import named_model
from tests.families import ltx2
from tests.lora_files import check_read_as, comfyui, kohya, linears, random_factors

SIZES = {"2.0": "ltx2.0", "2.3": "ltx2.3", "2.5": "ltx2.5"}


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


def test_diffusers_reads_what_is_written_in_its_names_and_in_those_of_comfyui(
    made: tuple[str, dict[str, LoraFactors]], tmp_path: Path
) -> None:
    size, factors = made
    names = to_original(factors, LTX2_NAMES)
    assert names is not None
    write_lora(tmp_path, factors, comfyui_names=LTX2_NAMES)
    stored = load_file(tmp_path / "comfyui/lora.safetensors")
    assert {key.partition(".lora_")[0] for key in stored} == {
        f"diffusion_model.{name}" for name in names.values()
    }
    for file in ("pytorch_lora_weights.safetensors", "comfyui/lora.safetensors"):
        check_read_as(factors, LTX2Pipeline.lora_state_dict(str(tmp_path / file)))
        read = read_lora(tmp_path / file, named_model(size))
        assert read.keys() == factors.keys()
        for module, one in factors.items():
            torch.testing.assert_close(read[module].product(), one.product())
