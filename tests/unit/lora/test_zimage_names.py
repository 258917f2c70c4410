"""Adapters of Z-Image in the names of other tools, as Diffusers reads them."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_z_image_lora_to_diffusers
from safetensors.torch import save_file

from dit.lora.files import read_lora
from tests.families.zimage import random_zimage
from tests.lora_files import check_read_as, comfyui, kohya, linears, model_of, random_factors

MODEL = model_of(random_zimage())
STACKS = ("layers", "noise_refiner", "context_refiner")


def test_files_of_ai_toolkit_diffusion_pipe_and_kohya(tmp_path: Path) -> None:
    """Diffusers' names behind `diffusion_model.`, and with underscores, `out` and alpha."""
    shapes = {n: s for n, s in linears(random_zimage()).items() if n.startswith(STACKS)}
    factors = random_factors(shapes)
    names = {name: name.replace("to_out.0", "out") for name in factors}
    plain = comfyui(factors, {name: name for name in names}, alphas=False)
    for content, scale in ((plain, 1.0), (kohya(factors, names), 2.0)):
        save_file(content, tmp_path / "other.safetensors")
        found = read_lora(tmp_path / "other.safetensors", MODEL)
        theirs = _convert_non_diffusers_z_image_lora_to_diffusers(dict(content))
        check_read_as(found, theirs)
        assert found.keys() == factors.keys()
        for name, one in found.items():
            torch.testing.assert_close(one.product(), scale * factors[name].up @ factors[name].down)


def test_files_with_one_linear_of_queries_keys_and_values(tmp_path: Path) -> None:
    shapes = {f"{stack}.0.attention.qkv": (144, 48) for stack in STACKS}
    factors = random_factors(shapes)
    save_file(comfyui(factors, {n: n for n in shapes}, alphas=False), tmp_path / "a.safetensors")
    found = read_lora(tmp_path / "a.safetensors", MODEL)
    for name, one in factors.items():
        parts = [name.replace("qkv", f"to_{letter}") for letter in "qkv"]
        whole = torch.cat([found.pop(part).product() for part in parts])
        torch.testing.assert_close(whole, one.up @ one.down)
    assert not found
