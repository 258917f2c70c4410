"""Adapters of LTX-Video in the names of Diffusers, Lightricks, ComfyUI and others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dit.lora.factors import LoraFactors
from dit.lora.files import read_lora, write_lora
from dit.models.ltx.diffusers import LTX_NAMES
from dit.models.registry import named_model
from tests.families.table import CASES
from tests.lora_files import comfyui, kohya, linears, random_factors

# Diffusers' names that differ in Lightricks' code, which ComfyUI and diffusion-pipe follow.
OTHER = {
    "proj_in": "patchify_proj",
    "time_embed.emb.timestep_embedder.linear_1": "adaln_single.emb.timestep_embedder.linear_1",
    "time_embed.emb.timestep_embedder.linear_2": "adaln_single.emb.timestep_embedder.linear_2",
    "time_embed.linear": "adaln_single.linear",
}
ALPHA = 8.0


@pytest.fixture(scope="module")
def factors() -> dict[str, LoraFactors]:
    """Of every linear; with alphas of twice the rank, which products show exactly."""
    case = CASES["ltx"]
    with torch.device("meta"):
        shapes = linears(case.network(**case.tiny))
    return random_factors(shapes, ranks={"to_q": 2})


@pytest.mark.parametrize("prefix", ["diffusion_model.", "model.diffusion_model.", ""])
@pytest.mark.parametrize("alphas", [True, False])
def test_names_of_the_original_code(
    factors: dict[str, LoraFactors], tmp_path: Path, prefix: str, alphas: bool
) -> None:
    names = {module: OTHER.get(module, module) for module in factors}
    assert set(OTHER) < set(names) and len(names) == 27
    save_file(comfyui(factors, names, alphas=alphas, prefix=prefix), tmp_path / "x.safetensors")
    assert_same(factors, tmp_path, alphas=alphas)


def test_names_of_kohya_and_of_diffusers(factors: dict[str, LoraFactors], tmp_path: Path) -> None:
    names = {module: OTHER.get(module, module) for module in factors}
    save_file(kohya(factors, names), tmp_path / "x.safetensors")
    assert_same(factors, tmp_path, alphas=True)
    same = {module: module for module in factors}
    tensors = comfyui(factors, same, alphas=False, prefix="transformer.")
    save_file(tensors, tmp_path / "x.safetensors")
    assert_same(factors, tmp_path, alphas=False)


def assert_same(factors: dict[str, LoraFactors], folder: Path, *, alphas: bool) -> None:
    """The same bits; without an alpha in the file it is the rank."""
    read = read_lora(folder, named_model("ltxv_2b"))
    assert read.keys() == factors.keys()
    for module, one in read.items():
        assert torch.equal(one.down, factors[module].down)
        assert torch.equal(one.up, factors[module].up)
        assert one.alpha == (ALPHA if alphas else len(one.down))


def test_the_file_for_comfyui_has_the_original_names(
    factors: dict[str, LoraFactors], tmp_path: Path
) -> None:
    write_lora(tmp_path, factors, comfyui_names=LTX_NAMES)
    stored = load_file(tmp_path / "comfyui/lora.safetensors")
    found = {name.removeprefix("diffusion_model.").rpartition(".lora_")[0] for name in stored}
    assert found - {""} == {OTHER.get(module, module) for module in factors}
    read = read_lora(tmp_path / "comfyui", named_model("ltxv_2b"))
    for module, one in factors.items():
        torch.testing.assert_close(read[module].product(), one.product(), rtol=0, atol=0)
